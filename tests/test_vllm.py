"""The proposer inside vLLM's CPU build: greedy texts equal those of vLLM without it, and drafts are accepted.

vLLM wants other versions than these tests, so it lives in an environment of its own (`make test-vllm`).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = Path(os.environ.get("DRAFTREE_VLLM", ROOT / ".venv-vllm" / "bin" / "python"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment of make test-vllm"),
]
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


def test_texts_are_vllms_own_and_drafts_are_accepted(demo: Any, tmp_path: Path) -> None:
    demo.model.save_pretrained(tmp_path / "model")
    demo.tokenizer.save_pretrained(tmp_path / "model")
    plain, drafted = run(tmp_path / "model", "none"), run(tmp_path / "model", "lookahead")
    assert drafted["ids"] == plain["ids"]
    assert len(plain["ids"]) == 14
    assert not plain["drafted"]
    assert drafted["drafted"]["accepted_tokens"] > drafted["drafted"]["drafts"], "more than one a step"
