"""DraftModel: a small model drafts for the large one, as a chain or a tree.

Speculative decoding with a second model (Leviathan et al., 2023; Hugging Face's assisted generation), with trees: the
small model reads its own likeliest tokens depth by depth, all nodes of a depth in one pass, and the most probable
paths become the tree. What is accepted is what the large model itself chooses, so the text is that of plain decoding,
greedy or sampled, however small or wrong the small model is. Each depth costs a pass of the small model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from draftree.demo_model import embedded
from draftree.drafting.base import RequestState
from draftree.drafting.folder import model_hash
from draftree.drafting.growth import Best, Limits, Nodes, grow_trees
from draftree.drafting.second_model import SecondModel
from draftree.errors import check_least
from draftree.runner import inspect_model
from draftree.runner.base import top_tokens
from draftree.tree import TokenTree


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
    # lacks, and the small model reads token 0 in place of ids that it lacks.
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
        ids = [request.id for request in requests]

        def first() -> Best:
            texts = [request.tokens if reach > 0 else None for request, reach in zip(requests, reaches, strict=True)]
            return self._best(self._small.read(ids, texts)[:, None])

        def more(nodes: Sequence[Nodes], depth: int) -> Best:
            return self._best(self._small.grow(ids, [own[0] for own in nodes], [own[1] for own in nodes], depth))

        limits = Limits(self.beam, self.confidence, self.source)
        return grow_trees(requests, budgets, reaches, limits, first, more)

    def _best(self, logits: torch.Tensor) -> Best:
        return top_tokens(logits, min(self.branching, logits.shape[-1]))


def demo_draft_model(model: Any) -> DraftModel:
    """Load the small model that was trained to draft for the embedded one."""
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
