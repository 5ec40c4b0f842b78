"""What `draftree bench bild` is run on: a large model, one or two small ones, and rows with or without references."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftree.drafting import DraftModel
from draftree.drafting.folder import demo_drafter
from draftree.drafting.second_model import check_pair
from draftree.host import inspect_model
from draftree.models import known_folder, load_model
from draftree.prompts import embedded_prompts, take_per_set
from draftree.training.questions import Question, read_questions

UNALIGNED, ALIGNED = "unaligned", "aligned"


def open_pair(model: str | None, small: str | None, aligned: str | None) -> tuple[Any, Any, dict[str, Any]]:
    """(large model, tokenizer, small models by name, the aligned one last).

    Args:
        model: folder or hub name of the large model; None for the embedded one.
        small: of the small one as it was trained; None for none.
        aligned: of the aligned one; None for none, or for the embedded model's where nothing is named.

    Raises:
        ValueError: no small model, or one that does not fit.
    """
    if model is not None and small is None and aligned is None:
        raise ValueError("A large model is named and no small one: name one with --small, --aligned or both.")
    large, tokenizer = load_model(model)
    smalls: dict[str, Any] = {}
    for name, folder in ((UNALIGNED, small), (ALIGNED, aligned)):
        if folder is not None:
            held = DraftModel.from_pretrained(known_folder(folder), tokenizer, dtype=large.dtype).model
            check_pair(inspect_model(held), inspect_model(large))
            smalls[name] = held
    if not smalls:
        smalls[ALIGNED] = demo_drafter("draft-model", large).model
    return large, tokenizer, smalls


def open_rows(data: Path | None, field: str | None, reference: str | None, limit: int) -> list[Question]:
    """Rows to answer: of a file, or the test prompts of the package, of every set in turn.

    Args:
        data: JSON lines or a folder of them; None for the package's prompts.
        field: where a row has its input; None for `turns`, `prompt` or `question`.
        reference: where it has its reference; None for no references.
        limit: most rows.

    Raises:
        ValueError: nothing there, rows without what was named, or references asked of the package's prompts.
    """
    if data is not None:
        return read_questions([data], limit, field=field, reference=reference)
    if reference is not None or field is not None:
        raise ValueError("The prompts of the package have no such fields: name your own rows with --data.")
    prompts: Sequence[Any] = [p for p in embedded_prompts() if not p.warm]
    spread = take_per_set(prompts, len(prompts))[:limit]
    return [Question(i, p.id, p.set, (p.text,)) for i, p in enumerate(spread)]


def read_thresholds(given: Sequence[str]) -> tuple[tuple[float, float], ...]:
    """Points of the grid from FALLBACK:ROLLBACK.

    Raises:
        ValueError: something else.
    """
    found = []
    for text in given:
        fallback, _, rollback = text.partition(":")
        try:
            found.append((float(fallback), float(rollback)))
        except ValueError:
            raise ValueError(f"--thresholds is {text!r}: give FALLBACK:ROLLBACK, as 0.6:5.") from None
    return tuple(dict.fromkeys(found))
