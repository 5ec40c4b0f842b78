"""What the library's models of acceptance expect of recorded trees.

This file alone depends on the models inside the shaping room: it puts recorded trees before them, one after the other,
and lets them learn from the text that came. Everything else takes trees and accepted paths from `draftree.Recorder`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.shapes.by_rank import ByRank
from draftree.drafting.base import RequestState
from draftree.engine import Recorder
from draftree.shaping.planner import AcceptanceStatistics, cells_of
from draftree.tree import TokenTree

OWN = "the drafter's own"
MODELS = ("calibrated", "by-rank", "product", OWN)


@dataclass(frozen=True, slots=True)
class Judged:
    """One request's part in a step, and what was expected of its tree before the text came."""

    request: int  # its number, in the order of requests
    emitted: int  # tokens of the step
    last: bool  # whether it is the request's last step, which may have been cut off
    # By model, the probability [nodes] that each node is accepted; empty where nothing was drafted.
    worth: dict[str, np.ndarray]

    def expected(self, model: str) -> float:
        """Return the tokens expected of the step."""
        return 1 + float(self.worth[model].sum()) if self.worth else 1.0


def judge(recorder: Recorder) -> Iterator[Judged]:
    """Yield the expectations of every model for each recorded step, in order, without the steps of prefill."""
    records = list(recorder.records())
    texts = {r["request"]: list(r["prompt"]) for r in records if r["kind"] == "request"}
    prompts = {request: len(text) for request, text in texts.items()}
    numbers = {request: number for number, request in enumerate(texts)}
    steps = [record for record in records if record["kind"] == "step"]
    lasts = {member["request"]: n for n, step in enumerate(steps) for member in step["members"]}
    models = {"by-rank": ByRank(), "product": ByRank(conditional=False)}
    statistics = AcceptanceStatistics()
    for n, step in enumerate(steps):
        for member in step["members"]:
            text = texts[member["request"]]
            reads_prompt = len(text) == prompts[member["request"]]
            context = RequestState(member["request"], text, prompts[member["request"]], 1 << 20)
            worth: dict[str, np.ndarray] = {}
            if member["drafted"]:
                tree = tree_of(member)
                worth = {name: model.worth(tree, [context])[0] for name, model in models.items()}
                worth[OWN] = np.concatenate([[0.0], np.exp(tree.logp[0, 1:].numpy())])
                chances, cells = statistics.chances(), cells_of(tree.logp[0, 1:].tolist())
                worth["calibrated"] = np.array([0.0, *(chances[cell] for cell in cells)])
                statistics.add(cells, [node - 1 for node in member["accepted"] if node is not None])
                for model in models.values():
                    model.remember([context], tree)
            text += member["emitted"]
            for model in models.values():
                model.compare([context])
                if lasts[member["request"]] == n:
                    model.forget(context)
            if not reads_prompt:
                yield Judged(numbers[member["request"]], len(member["emitted"]), lasts[member["request"]] == n, worth)


def tree_of(member: dict[str, Any]) -> TokenTree:
    """Return the verified tree of a recorded step's member."""
    logp = [0.0 if p is None else p for p in member["logp"]]
    parts = (torch.tensor([member["tokens"]]), torch.tensor([member["parents"]]), torch.tensor([logp]))
    return TokenTree(*parts, torch.ones_like(parts[0]), (len(member["tokens"]),))
