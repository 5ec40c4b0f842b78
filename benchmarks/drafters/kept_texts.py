"""Texts of many ways to decode, made in batches and kept in files.

A text does not depend on how busy the machine is, its time does. So quality is taken on many rows, in batches; what was
made is kept in the result folder, and a later run, or one after a kill, takes it from there. The rows that are timed
are answered again, one by one, and compared with what is kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftree.bench.methods import Method
from draftree.files import write_json
from draftree.training.answers import fingerprint

FOLDER = "bench-bild-texts"


def texts_of(
    method: Method, prompts: Sequence[Sequence[int]], batch: int, about: Any, out: Path | None
) -> list[list[int]]:
    """Return token ids of what `method` answers to all prompts (token ids), `batch` of them together.

    They are kept in `out`, one file a method, and taken from there by what they depend on: `about` and the method.
    """
    kept = None if out is None else out / FOLDER / f"{fingerprint([about, method.name])}.json"
    if kept is not None and kept.is_file():
        return json.loads(kept.read_text(encoding="utf-8"))
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # like lengths end together
    found: dict[int, list[int]] = {}
    for at in range(0, len(order), batch):
        part = order[at : at + batch]
        answers = method.answers([prompts[i] for i in part])
        found |= {i: list(answer.ids) for i, answer in zip(part, answers, strict=True)}
    texts = [found[i] for i in range(len(prompts))]
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, texts)
    return texts
