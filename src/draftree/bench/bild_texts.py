"""Texts of many ways to decode, made in batches and kept in a file, and how good they are.

A text does not depend on how busy the machine is, its time does. So quality is taken on many rows, in batches, whenever
there is time; what was made is kept in the result folder, and a later run, or one after a kill, takes it from there.
The rows that are timed say everything again, one by one, and are held to what is kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftree.bench.bild_ways import Way
from draftree.bench.methods import Method
from draftree.progress import Watcher
from draftree.training.journal import fingerprint

FILE = "bench-bild-texts.jsonl"


class Texts:
    """Token ids that ways have said to rows of prompts.

    Args:
        folder: where `FILE` is, or will be.
        about: what all texts depend on beside the way: models by hash, prompts, length.
        hashes: by name of a small model, its hash.
    """

    def __init__(self, folder: Path, about: dict[str, Any], hashes: dict[str, str]) -> None:
        self.path, self._about, self._hashes = folder / FILE, about, hashes
        self._held: dict[str, list[list[int]]] = {}
        if self.path.exists():
            good = 0
            with self.path.open("rb") as lines:
                for line in lines:
                    try:
                        entry = json.loads(line)
                    except (json.JSONDecodeError, UnicodeDecodeError):
                        break  # a kill tore it
                    self._held[entry["key"]] = entry["ids"]
                    good += len(line)
            with self.path.open("ab") as file:
                file.truncate(good)

    def _key(self, way: Way) -> str:
        return fingerprint([self._about, way.name, self._hashes.get(way.pair)])

    def of(
        self, way: Way, method: Method, prompts: Sequence[Sequence[int]], batch: int, watcher: Watcher
    ) -> list[list[int]]:
        """What `method` says to all prompts, from the file where it is there.

        Args:
            way: which it is.
            method: takes `batch` prompts together.
            prompts: token ids.
            batch: prompts together.
            watcher: hears of every prompt.
        """
        key = self._key(way)
        if key not in self._held:
            order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # like lengths end together
            said: dict[int, list[int]] = {}
            for at in range(0, len(order), batch):
                part = order[at : at + batch]
                answers = method.answers([prompts[i] for i in part])
                said |= {i: answer.ids for i, answer in zip(part, answers, strict=True)}
                for _ in part:
                    watcher.step()
            self._held[key] = [said[i] for i in range(len(prompts))]
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "way": way.name, "ids": self._held[key]}) + "\n")
        else:
            for _ in prompts:
                watcher.step()
        return self._held[key]
