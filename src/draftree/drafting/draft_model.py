"""DraftModel: a small model drafts for the large one, as a chain or a tree.

Speculative decoding with a second model (Leviathan et al., 2023; Hugging Face's assisted generation), with trees: the
small model reads its own likeliest tokens depth by depth, all nodes of a depth in one pass, and the most probable
paths become the tree. What is accepted is what the large model itself chooses, so the text is that of plain decoding,
greedy or sampled, however small or wrong the small model is. Each depth costs a pass of the small model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from draftree.demo_model import embedded
from draftree.drafting.base import RequestState
from draftree.drafting.folder import model_hash
from draftree.drafting.second_model import SecondModel
from draftree.errors import check_least
from draftree.runner import inspect_model
from draftree.runner.base import top_tokens
from draftree.tree import Draft, TokenTree


class DraftModel(SecondModel):
    """Drafts with a small model of the same vocabulary; one object may serve many calls, engines and threads.

    Args:
        model: a Hugging Face causal language model, or an encoder-decoder for one; on any device, of any type.
        depth: most tokens ahead.
        branching: most tokens tried behind each node; 1 drafts a chain.
        beam: most nodes of a depth that the small model reads, all of them in one pass; 1 follows the likeliest path
            alone, with the other likely tokens as leaves.
        confidence: stop where a request's paths to be read next have less than this probability together; 0: never.
        runner: how the small model is driven: auto, hooked, eager, cpu, cuda_graphs or in_place.

    Raises:
        TypeError, ValueError: a model that cannot draft, or an option out of range.
    """

    name = "draft-model"
    # Models of one tokenizer may pad their vocabulary differently. The engine drops draft tokens that the large model
    # lacks, and the small model does not draft for texts with ids that it lacks.
    padding = 1 / 64

    def __init__(
        self,
        model: Any,
        *,
        depth: int = 8,
        branching: int = 4,
        beam: int = 4,
        confidence: float = 0.5,
        runner: str = "auto",
    ) -> None:
        check_least(1, depth=depth, branching=branching, beam=beam)
        if not 0 <= confidence <= 1:
            raise ValueError(f"confidence is {confidence}: give a probability from 0 (never stop) to 1.")
        super().__init__(model, runner)
        self.depth, self.branching, self.beam, self.confidence = depth, branching, beam, confidence

    def _grow(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        reaches = [
            self._reach(request, self.depth) if budget > 0 else 0
            for request, budget in zip(requests, budgets, strict=True)
        ]
        growths = [_Growth(n, self.beam, request.eos_token_ids) for request, n in zip(requests, budgets, strict=True)]
        frontiers: list[list[int]] = [[-1] if reach > 0 else [] for reach in reaches]
        ids = [request.id for request in requests]
        for depth in range(max(reaches)):
            if depth > 0:
                grown = zip(growths, reaches, strict=True)
                frontiers = [growth.frontier(self.confidence) if reach > depth else [] for growth, reach in grown]
                if not any(frontiers):
                    break
            if depth == 0:
                texts = [request.tokens if own else None for request, own in zip(requests, frontiers, strict=True)]
                logits = self._small.read(ids, texts)[:, None]
            else:
                nodes = [growth.read(frontier) for growth, frontier in zip(growths, frontiers, strict=True)]
                logits = self._small.grow(ids, [n[0] for n in nodes], [n[1] for n in nodes], depth)
            self._offer(growths, frontiers, logits)
        drafts: list[Draft] = [(growth.tokens, growth.parents, growth.logp, self.source) for growth in growths]
        return TokenTree.from_drafts([request.tokens[-1] for request in requests], drafts, budgets)

    def _offer(self, growths: Sequence[_Growth], frontiers: Sequence[Sequence[int]], logits: torch.Tensor) -> None:
        tokens, logp = top_tokens(logits, min(self.branching, logits.shape[-1]))
        for b, (growth, frontier) in enumerate(zip(growths, frontiers, strict=True)):
            for i, above in enumerate(frontier):
                growth.offer(above, tokens[b, i].tolist(), logp[b, i].tolist())


class _Growth:
    """One request's growing tree: all candidates; those of the last depth start at `newest`."""

    def __init__(self, budget: int, beam: int, ends: Sequence[int]) -> None:
        self.budget, self.beam, self._ends = budget, beam, ends
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.logp: list[float] = []
        self.newest = 0  # first candidate of the last depth
        self._rows: dict[int, int] = {-1: -1}  # candidate -> its number among the nodes that were read

    def offer(self, above: int, tokens: list[int], logp: list[float]) -> None:
        """Add candidates behind node `above` (-1: the root), with their log-probabilities."""
        base = 0.0 if above < 0 else self.logp[above]
        self.tokens += tokens
        self.parents += [above] * len(tokens)
        self.logp += [base + value for value in logp]

    def frontier(self, confidence: float) -> list[int]:
        """Return the nodes to be read next: those of the last depth whose children can be among the best of the tree.

        None of them if they have less than the probability `confidence` together.
        """
        lowest = sorted(self.logp, reverse=True)[self.budget - 1] if len(self.logp) >= self.budget else -math.inf
        last = range(self.newest, len(self.logp))
        fit = [i for i in last if self.logp[i] > lowest and self.tokens[i] not in self._ends]
        self.newest = len(self.logp)
        best = sorted(fit, key=self.logp.__getitem__, reverse=True)[: self.beam]
        return best if sum(math.exp(self.logp[node]) for node in best) >= confidence else []

    def read(self, nodes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the tokens of `nodes` and their parents, in the small model's numbering."""
        parents = [self._rows[self.parents[node]] for node in nodes]
        for node in nodes:
            self._rows[node] = len(self._rows) - 1
        return [self.tokens[node] for node in nodes], parents


def demo_draft_model(model: Any) -> DraftModel:
    """Load the small model that was trained to draft for the embedded one.

    Args:
        model: what `demo_model` returned.

    Raises:
        ValueError: another model.
    """
    from transformers import AutoModelForCausalLM

    with embedded("chat_600k") as folder:
        base = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))["base_model"]
        target = inspect_model(model)
        if base["hash"] != model_hash(target.model):
            raise ValueError(
                "The small model of the package drafts for the embedded model, with the weights that came with it, and "
                "this is another one: pass DraftModel a small model of its family."
            )
        with torch.device("cpu"):  # and not wherever torch's default device is
            small: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return DraftModel(small.to(target.device).eval())
