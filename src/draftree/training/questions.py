"""Read questions for the target to answer, and turn them into prompts by a template.

A row holds one question (`prompt` or `question`) or several in turn (`turns`). Its answers are ignored: a drafter must
draft the target's own text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftree.errors import brief
from draftree.models import encode_prompt
from draftree.prompts import FIELDS, Prompt, jsonl_files, jsonl_prompts

SYSTEM = "You are a helpful assistant."
PLACE = "{question}"


@dataclass(frozen=True, slots=True)
class Question:
    """Hold the user's turns of one conversation."""

    number: int  # Index among all questions of a run.
    id: str  # Name in files.
    set: str  # Name of its question set.
    turns: tuple[str, ...]  # At least one.
    reference: str | None = None  # A reference answer; None where it was not requested.


def read_questions(
    paths: Sequence[Path],
    limit: int | None = None,
    *,
    field: str | None = None,
    reference: str | None = None,
) -> list[Question]:
    """Return the questions of JSON-lines files and of all *.jsonl files of folders, in order.

    Args:
        paths: files and folders.
        limit: most questions in all, taken evenly from the files; None for all.
        field: a row's field with its question; None for `turns`, `prompt` or `question`.
        reference: a row's field with its reference answer; None for no references.

    Raises:
        ValueError: a missing or unreadable file, a row without a question or reference, or no questions.
    """
    fields = FIELDS if field is None else (field,)
    files = [file for path in paths for file in jsonl_files(path, "questions")]
    by_file = [list(_read(file, fields, reference)) for file in files]
    if limit is not None:
        by_file = _evenly(by_file, limit)
    rows = [row for group in by_file for row in group]
    if not rows:
        raise ValueError("There are no questions: give rows with a 'prompt', a 'question' or 'turns'.")
    return [
        Question(number, prompt.id, prompt.set, (prompt.text, *prompt.later), known)
        for number, (prompt, known) in enumerate(rows)
    ]


Row = tuple[Prompt, str | None]  # A question and its reference.


def _read(file: Path, fields: Sequence[str], reference: str | None) -> Iterator[Row]:
    for where, prompt, row in jsonl_prompts(file, fields):
        known = row.get(reference) if reference is not None else None
        if reference is not None and not (isinstance(known, str) and known.strip()):
            raise ValueError(
                f"{where} has no reference: give it {reference!r} with text, or measure without references."
            )
        yield prompt, known


def _evenly(groups: list[list[Row]], limit: int) -> list[list[Row]]:
    """Return the first rows of every group, `limit` in all, taken from the groups in turns."""
    in_turns = sorted((place, i) for i, group in enumerate(groups) for place in range(len(group)))
    share = Counter(i for _, i in in_turns[:limit])
    return [group[: share[i]] for i, group in enumerate(groups)]


class Template:
    """Turn a conversation into the token ids of a prompt.

    Args:
        kind: "full" (the tokenizer's chat template with a system message), "short" (without one), or a text with
            `{question}` in it.
        tokenizer: the target's.
        system: the system message of "full".

    Raises:
        ValueError: an unknown template, or a tokenizer without a chat template for such a prompt.
    """

    def __init__(self, kind: str, tokenizer: Any, system: str = SYSTEM) -> None:
        self.kind, self.tokenizer = kind, tokenizer
        self.system = system if kind == "full" else None
        if kind not in ("full", "short"):
            if PLACE not in kind:
                raise ValueError(f"template is {kind!r}: choose 'full', 'short' or a text with {PLACE} in it.")
            return
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(f"The tokenizer has no chat template: give a text with {PLACE} in it as the template.")
        try:
            self.encode(["?"])
        except Exception as error:  # A chat template may raise any error.
            what, way = ("system message", "'short' or ") if kind == "full" else ("question alone", "")
            raise ValueError(
                f"The tokenizer's chat template takes no {what} ({brief(error)}): give {way}a text with {PLACE} in it "
                "as the template."
            ) from None

    def encode(self, turns: Sequence[str], answers: Sequence[str] = ()) -> list[int]:
        """Return the token ids of the prompt for the last of `turns`, with `answers` to the turns before it."""
        history = list(zip(turns, answers, strict=False))
        if self.kind in ("full", "short"):
            return encode_prompt(self.tokenizer, turns[-1], history=history, system=self.system)
        pieces = [self.kind.replace(PLACE, turn) + answer for turn, answer in history]
        return self.tokenizer("".join([*pieces, self.kind.replace(PLACE, turns[-1])])).input_ids


def template_of(tokenizer: Any, kind: str | None) -> Template:
    """Return a template of `kind`; None for the chat template, or for the bare question if the tokenizer has none."""
    chat = getattr(tokenizer, "chat_template", None)
    return Template(kind or ("short" if chat else PLACE), tokenizer)
