"""The programs in `examples/` run, on the embedded model, and say what they are to show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAID = {
    "inside_transformers.py": "equal to Hugging Face: True",
    "chat.py": "you: And a cheaper one?",
    "batch.py": "stop a process:",
    "structured_output.py": "name='",
    "server_client.py": "tokens: ",
    "train_medusa.py": "tokens a step:",
}


def test_every_example_is_known() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == SAID.keys()


@pytest.mark.parametrize("name", SAID)
def test_examples_run(name: str) -> None:
    steps = ["2"] if name == "train_medusa.py" else []
    command = [sys.executable, EXAMPLES / name, "embedded", *steps]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert SAID[name] in done.stdout
