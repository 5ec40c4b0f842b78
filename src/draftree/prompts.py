"""Prompts to measure on (those of the package, or a file of JSON lines), and the progress of a measurement.

A row is an object with a `prompt`, a `question` or several `turns`, and optionally `set`, `id` and `split`. Rows of
Spec-Bench's question.jsonl ({question_id, category, turns}) work unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

FIELDS = ("turns", "prompt", "question")  # Entries of a row that may hold its text.


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and its origin."""

    id: str  # Names the row in result files.
    set: str  # Its set; figures are also given by set.
    text: str  # The user's message, without a chat template.
    warm: bool = False  # Whether a drafter may see it before the measurement.
    later: tuple[str, ...] = ()  # The user's further messages of a dialogue; mostly none.


def embedded_prompts() -> list[Prompt]:
    """Return the prompts of the package, in the order of its file."""
    with as_file(files("draftree") / "data" / "prompts.jsonl") as file:
        return [prompt for _, prompt, _ in jsonl_prompts(file)]


def read_prompts(path: Path, column: str | None = None) -> list[Prompt]:
    """Read the prompts of a JSON-lines file, or of all *.jsonl files of a folder."""
    fields = FIELDS if column is None else (column,)
    found = [prompt for file in jsonl_files(path, "prompts") for _, prompt, _ in jsonl_prompts(file, fields)]
    if not found:
        raise ValueError(f"{path} is empty: give one JSON object with a {column or 'prompt'!r} per line.")
    return found


def jsonl_files(path: Path, kind: str) -> list[Path]:
    """Return the file, or all *.jsonl files of the folder, in order; `kind` names their content in messages."""
    if not path.exists():
        raise ValueError(f"There is no {kind} file {str(path)!r}: give a .jsonl file or a folder of them.")
    found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not found:
        raise ValueError(f"The folder {str(path)!r} holds no .jsonl file: give one that does, or a file.")
    return found


def jsonl_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of each non-empty line; {} for other JSON values than objects."""
    with file.open(encoding="utf-8-sig") as lines:  # Some editors write a byte-order mark.
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    row = json.loads(line)
                    yield number, row if isinstance(row, dict) else {}
        except UnicodeDecodeError:
            raise ValueError(f"{file} is not UTF-8 text: give a file of JSON lines.") from None
        except ValueError:
            raise ValueError(f"{file}, line {number}, is not JSON: write one JSON object per line.") from None


def jsonl_prompts(file: Path, fields: Sequence[str] = FIELDS) -> Iterator[tuple[str, Prompt, dict[str, Any]]]:
    """Yield (place for messages, prompt, whole row) of each row of a file, with its text in one of `fields`."""
    for number, row in jsonl_rows(file):
        where = f"{file}, line {number},"
        turns = next((found for name in fields if (found := _texts(row.get(name)))), ())
        if not turns:
            named = " or ".join(map(repr, fields))
            raise ValueError(f"{where} has no {named} with text, but {', '.join(row) or 'nothing'}: give each row one.")
        prompt = Prompt(
            id=str(row.get("id", row.get("question_id", f"{file.stem}-{number}"))),
            set=str(row.get("set", row.get("category", file.stem))),
            text=turns[0],
            warm=row.get("split") == "warm",
            later=turns[1:],
        )
        yield where, prompt, row


def _texts(given: Any) -> tuple[str, ...]:
    """Return a text or a list of texts as a tuple; () for other values and blank texts."""
    turns = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else ()
    return turns if all(isinstance(turn, str) and turn.strip() for turn in turns) else ()


class Watcher:
    """Receive the progress of a measurement on prompts; the base class shows nothing."""

    def stage(self, name: str, total: int | None) -> None:
        """Begin a stage of `total` steps; None if they cannot be counted."""

    def step(self) -> None:
        """Count one finished step of the stage."""

    def say(self, line: str) -> None:
        """Receive a line about the stage, such as the time that a training has left."""


def take_per_set(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return the first `count` prompts of every set, one of each set in turn, so that a stopped run covers all."""
    by_set: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_set.setdefault(prompt.set, []).append(prompt)
    return [group[i] for i in range(count) for group in by_set.values() if i < len(group)]


def split_prompts(prompts: Sequence[Prompt], per_set: int, warm_per_set: int) -> tuple[list[Prompt], list[Prompt]]:
    """Return (measured, warm-up) prompts: by their rows, else the first ones of each set and later ones."""
    tests = [prompt for prompt in prompts if not prompt.warm]
    measured = take_per_set(tests, per_set)
    warm = [prompt for prompt in prompts if prompt.warm]
    if not warm:
        taken = {id(prompt) for prompt in measured}
        texts = {prompt.text for prompt in measured}
        warm = [p for p in tests if id(p) not in taken and p.text not in texts]
    if not measured:
        raise ValueError("All prompts are marked 'warm': leave 'split' out of the rows to measure on.")
    return measured, take_per_set(warm, warm_per_set)
