"""Options of training runs, and the questions that the model answers to make its training data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from draftree.errors import brief, check_least
from draftree.models import encode_prompt
from draftree.prompts import FIELDS, Prompt, jsonl_files, jsonl_prompts, jsonl_rows

RECIPE = "recipe.json"  # Written last; it marks a finished result.
CHECKPOINTS = "checkpoints"  # Folder of Hugging Face's checkpoints.
OTHERS = ("config.json", "draftree_config.json")  # Models and drafters have these files.
EPOCHS = 4.0


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Hold the options of every run.

    Raises:
        ValueError: a value out of range.
    """

    epochs: Annotated[float | None, "Passes over the data; 4 where no steps are given."] = None
    steps: Annotated[int | None, "Optimizer steps, instead of epochs."] = None
    batch: Annotated[int, "Rows of a pass, on each device."] = 8
    accumulate: Annotated[int, "Passes of an optimizer step."] = 1
    learning_rate: Annotated[float | None, "Peak learning rate; None for the method's own."] = None
    max_length: Annotated[int | None, "Leave out rows with more tokens."] = None
    evaluations: Annotated[int, "How often the dev rows are scored."] = 10
    dev_rows: Annotated[int, "Most dev rows to score."] = 256
    checkpoints: Annotated[int, "How many are written over the run."] = 10
    seed: Annotated[int, "Seed of the weights, the order of rows and dropout."] = 0
    bf16: Annotated[bool | None, "Mixed precision; None where the device has it."] = None
    resume: Annotated[bool, "Continue from the last checkpoint in --out."] = False
    force: Annotated[bool, "Replace a finished result in --out."] = False

    def __post_init__(self) -> None:
        check_positive(self, "epochs", "batch", "accumulate", "evaluations", "dev_rows", "checkpoints")
        check_positive(self, "steps", "learning_rate", "max_length")
        check_least(0, 2**32 - 1, seed=self.seed)
        if self.epochs is not None and self.steps is not None:
            raise ValueError("steps and epochs both set the length of a training: give one of them.")
        if self.resume and self.force:
            raise ValueError("resume continues a run and force replaces it: give one of them.")

    @property
    def passes(self) -> float:
        """Return the passes over the data; used if `steps` is None."""
        return EPOCHS if self.epochs is None else self.epochs

    def recorded(self) -> dict[str, Any]:
        """Return all options but `resume` and `force`, which do not change the result."""
        names = {one.name for one in fields(TrainOptions)} - {"resume", "force"}
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Inputs:
    """Name the inputs that a large model answers for a small one.

    Raises:
        ValueError: a limit out of range.
    """

    data: Annotated[Path, "Inputs (JSON lines, or a folder of them), or a data set that draftree train data made."]
    field: Annotated[str | None, "A row's field with its input; by default turns, prompt or question."] = None
    template: Annotated[
        str | None,
        "full, short, or a text with {question} in it; by default short, or the bare input without a chat template.",
    ] = None
    limit: Annotated[int | None, "Most inputs, taken evenly from the files."] = None

    def __post_init__(self) -> None:
        check_positive(self, "limit")


def check_out(out: Path, *, force: bool) -> None:
    """Refuse a folder with a finished result, unless `force` replaces it.

    Raises:
        ValueError: the folder holds a finished result, or a model or drafter of another source.
    """
    if (out / RECIPE).is_file():
        if not force:
            raise ValueError(f"{str(out)!r} holds a finished result: give another folder, or --force to replace it.")
    elif any((out / name).is_file() for name in OTHERS) and not (out / CHECKPOINTS).is_dir():
        raise ValueError(f"{str(out)!r} holds a model or drafter that no training here has left: give another folder.")


def check_positive(options: Any, *names: str) -> None:
    """Raise a ValueError that names the first given option which is not more than 0."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}: give more than 0.")


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
    answers: tuple[str, ...] = ()  # Given answers, one for each turn; none where the model answers.


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
    rows = [row for group in _evenly(by_file, limit) for row in group]
    if not rows:
        raise ValueError("There are no questions: give rows with a 'prompt', a 'question' or 'turns'.")
    return [
        Question(number, prompt.id, prompt.set, (prompt.text, *prompt.later), known)
        for number, (prompt, known) in enumerate(rows)
    ]


ANSWERS = ("answer", "response", "completion")
ASKS, TELLS = ("human", "user"), ("gpt", "assistant")


def read_given(paths: Sequence[Path], limit: int | None = None, first: int = 0) -> list[Question]:
    """Return the questions of files of JSON lines or JSON arrays with their given answers, numbered from `first`.

    A row has a `prompt` or `question` and an `answer`, `response` or `completion`, or it is a dialogue: ShareGPT's
    `conversations`, or `messages`. Of a dialogue, users' turns that the next speaker does not answer are left out.

    Raises:
        ValueError: a missing or unreadable file, a row of another form, or no answers.
    """
    by_file = [list(_given(file)) for path in paths for file in jsonl_files(path, "data")]
    found = [one for group in _evenly(by_file, limit) for one in group]
    if not found:
        raise ValueError("There are no given answers: give rows with a 'prompt' and an 'answer', or 'conversations'.")
    return [replace(one, number=number) for number, one in enumerate(found, first)]


def _given(file: Path) -> Iterator[Question]:
    text = file.read_text("utf-8-sig")
    rows = json.loads(text) if text.lstrip().startswith("[") else [row for _, row in jsonl_rows(file)]
    for number, row in enumerate(rows, 1):
        talk = row.get("conversations", row.get("messages"))
        flat = tuple(next(filter(None, map(row.get, names)), None) for names in (FIELDS[1:], ANSWERS))
        pairs, asked = [flat] if all(flat) else [], None
        for said in talk or ():
            who, text = said.get("from", said.get("role")), said.get("value", said.get("content"))
            if who in TELLS and asked and text:
                pairs.append((asked, text))
            asked = text if who in ASKS else None
        if pairs:
            turns, answers = zip(*pairs, strict=True)
            yield Question(number, str(row.get("id", f"{file.stem}-{number}")), file.stem, turns, answers=answers)
        elif talk is None:
            raise ValueError(f"{file}, row {number}, has no 'prompt' with an 'answer', and is no dialogue.")


Row = tuple[Prompt, str | None]  # A question and its reference.


def _read(file: Path, fields: Sequence[str], reference: str | None) -> Iterator[Row]:
    for where, prompt, row in jsonl_prompts(file, fields):
        known = row.get(reference) if reference is not None else None
        if reference is not None and not (isinstance(known, str) and known.strip()):
            raise ValueError(
                f"{where} has no reference: give it {reference!r} with text, or measure without references."
            )
        yield prompt, known


def _evenly(groups: list[list[Any]], limit: int | None) -> list[list[Any]]:
    """Return the first rows of every group, `limit` in all, taken from the groups in turns; None for all rows."""
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
