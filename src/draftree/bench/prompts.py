"""Prompts to measure on: those of the package, or anybody's JSON lines.

A row is an object with a `prompt`; `set`, `id` and `split` are read where they are there. Rows of Spec-Bench's
question.jsonl ({question_id, category, turns}) are read as they are. A file that cannot be used says so in one
sentence before anything runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: where it comes from, and its text.

    Attributes:
        id: names the row in result files.
        set: the set it belongs to; figures are also given by set.
        text: what the user says, without any chat template.
        warm: whether it may be shown to a drafter before measuring.
        later: what the user says next, each after the answer to what came before; most prompts have none.
    """

    id: str
    set: str
    text: str
    warm: bool = False
    later: tuple[str, ...] = ()


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
        found.append(_prompt(row if isinstance(row, dict) else {}, f"{file}, line {number},", f"{stem}-{number}", stem))
    return found


def _prompt(row: dict[str, Any], where: str, name: str, stem: str) -> Prompt:
    """One row, ours or Spec-Bench's."""
    turns = row.get("turns") if "turns" in row else [row.get("prompt")]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        wanted = (
            "'turns': give a list of non-empty texts."
            if "turns" in row
            else "'prompt' text: give each row a non-empty one."
        )
        raise ValueError(f"{where} has no {wanted}")
    return Prompt(
        id=str(row.get("id", row.get("question_id", name))),
        set=str(row.get("set", row.get("category", stem))),
        text=turns[0],
        warm=row.get("split") == "warm",
        later=tuple(turns[1:]),
    )


def take_per_set(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """The first `count` of every set, one of each set in turn, so that a stopped run has seen them all."""
    by_set: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_set.setdefault(prompt.set, []).append(prompt)
    return [group[i] for i in range(count) for group in by_set.values() if i < len(group)]
