"""Texts of many ways to decode, made in batches and kept in a file.

A text does not depend on how busy the machine is, its time does. So quality is taken on many rows, in batches; what was
made is kept in the result folder, and a later run, or one after a kill, takes it from there. The rows that are timed
are answered again, one by one, and compared with what is kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftree.bench.methods import Method
from draftree.progress import Watcher
from draftree.training.journal import fingerprint

FILE = "bench-bild-texts.jsonl"


class Texts:
    """Token ids of the answers that ways have given to rows of prompts.

    Args:
        folder: where `FILE` is, or will be; None keeps nothing.
        about: what all texts depend on: models by hash, prompts, length.
    """

    def __init__(self, folder: Path | None, about: Any) -> None:
        self.path, self._about = None if folder is None else folder / FILE, about
        self._held: dict[str, list[list[int]]] = {}
        if self.path is not None and self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                with suppress(json.JSONDecodeError):  # a line that was cut off by a kill
                    entry = json.loads(line)
                    self._held[entry["key"]] = entry["ids"]

    def of(self, method: Method, prompts: Sequence[Sequence[int]], batch: int, watcher: Watcher) -> list[list[int]]:
        """What `method` answers to all prompts, `batch` of them together; from the file where it is there."""
        key = fingerprint([self._about, method.name])
        if key not in self._held:
            order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # like lengths end together
            found: dict[int, list[int]] = {}
            for at in range(0, len(order), batch):
                part = order[at : at + batch]
                answers = method.answers([prompts[i] for i in part])
                found |= {i: list(answer.ids) for i, answer in zip(part, answers, strict=True)}
            self._held[key] = [found[i] for i in range(len(prompts))]
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    line = json.dumps({"key": key, "way": method.name, "ids": self._held[key]})
                    file.write(f"\n{line}\n")  # on a line of its own, whatever stands before it
        for _ in prompts:
            watcher.step()
        return self._held[key]
