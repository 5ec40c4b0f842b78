"""The Python of the README and of the first page of the docs runs as it stands, and says what it promises."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from draftree.cli import app

ROOT = Path(__file__).parent.parent


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_ten_lines_of_python(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And the one argument inside Hugging Face's generate gives the same ids as they do."""
    names: dict[str, Any] = {}
    exec(blocks(page, "python")[-1], names)
    said = capsys.readouterr().out
    assert "class Solution" in said
    assert "acceptance length" in said
    inside = blocks("README.md", "python")[0].replace("model.generate(", "text = model.generate(")
    exec(inside, names)
    assert names["text"].tolist() == names["out"].sequences.tolist()


def test_commands_of_the_readme_are_understood() -> None:
    """Every draftree command there parses: its verb and its options are there."""
    root = typer.main.get_command(app)
    lines = [line for block in blocks("README.md", "sh") for line in block.splitlines() if line.startswith("draftree ")]
    lines += re.findall(r"`(draftree [a-z]+ [a-z]+ --[^`]+)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(lines) >= 4
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        command: Any = root
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        command.make_context(command.name, words)
