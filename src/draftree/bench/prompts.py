"""Prompts to measure on: those of the package, or anybody's JSON lines.

A row is an object with a `prompt`; `set`, `id` and `split` are read where they are there. A file that cannot be
used says so in one sentence before anything runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: where it comes from, and its text.

    Attributes:
        id: names the row in result files.
        set: the set it belongs to; figures are also given by set.
        text: what the user says, without any chat template.
        warm: whether it may be shown to a drafter before measuring.
    """

    id: str
    set: str
    text: str
    warm: bool = False


def embedded_prompts() -> list[Prompt]:
    """The prompts of the package, in the order of its file."""
    text = (files("draftree") / "data" / "prompts.jsonl").read_text(encoding="utf-8")
    return _parse(text.splitlines(), "prompts.jsonl", "prompts")


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSON-lines file, or of all *.jsonl files of a folder.

    Raises:
        ValueError: no such file, nothing in it, or a line that is no prompt.
    """
    if not path.exists():
        raise ValueError(f"There is no prompts file {str(path)!r}: give a .jsonl file or a folder of them.")
    names = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not names:
        raise ValueError(f"The folder {str(path)!r} holds no .jsonl file: give one that does, or a file.")
    found: list[Prompt] = []
    for name in names:
        try:
            lines = name.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            raise ValueError(f"{name} is not UTF-8 text: give a file of JSON lines.") from None
        found += _parse(lines, str(name), name.stem)
    if not found:
        raise ValueError(f"{path} is empty: give one JSON object with a 'prompt' per line.")
    return found


def _parse(lines: Iterable[str], file: str, stem: str) -> list[Prompt]:
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            raise ValueError(
                f"{file}, line {number}, is not JSON: write one JSON object with a 'prompt' per line."
            ) from None
        text = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{file}, line {number}, has no 'prompt' text: give each row a non-empty one.")
        found.append(
            Prompt(
                id=str(row.get("id", f"{stem}-{number}")),
                set=str(row.get("set", stem)),
                text=text,
                warm=row.get("split") == "warm",
            )
        )
    return found


def take_per_set(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """The first `count` of every set, one of each set in turn, so that a stopped run has seen them all."""
    by_set: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_set.setdefault(prompt.set, []).append(prompt)
    return [group[i] for i in range(count) for group in by_set.values() if i < len(group)]
