"""DraftModel: a small model drafts for the large one, as a chain or a tree.

Speculative decoding with a second model (Leviathan et al., 2023; Hugging Face's assisted generation), with trees: the
small model reads its own likeliest tokens depth by depth, all nodes of a depth in one pass, and the most probable
paths become the tree. What is accepted is what the large model itself chooses, so the text is that of plain decoding,
greedy or sampled, however small or wrong the small model is. Each depth costs a pass of the small model, and
none is spent on draft tokens that would not be verified: how likely they have to be shows in how trees were cut.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from draftree.demo_model import embedded
from draftree.drafting.base import ByRequest, Capabilities, RequestState, Step
from draftree.drafting.base_model import model_hash
from draftree.drafting.small_model import SecondModel
from draftree.errors import check_least
from draftree.runner import inspect_model
from draftree.runner.base import preparations, top_tokens
from draftree.tree import Draft, TokenTree

PRICE_FIRST = 0.25  # prior time of a pass of the small model, in steps of the large one
HABIT, LONGEST = 0.95, 4.0  # weight of the past in mean times; the most that one time counts, in means
BEAM = 4  # nodes read per depth
WORTH = 2.0  # accepted tokens that a pass must promise, per step of the large model that it takes
SHORT = 16  # most rows of a pass that is timed
RATE = 0.1  # weight of a step in what `Cutoff` learns


class DraftModel(SecondModel):
    """Drafts with a small model of the same vocabulary; one object may serve many calls, engines and threads.

    Args:
        model: a Hugging Face causal language model, or an encoder-decoder for one; on any device, of any type.
        depth: most tokens ahead.
        branching: most tokens tried behind each node; 1 drafts a chain.
        beam: most nodes of a depth that the small model reads, all of them in one pass; 1 follows the likeliest path
            alone, with the other likely tokens as leaves. None: 4.
        confidence: stop where a request's paths to be read next have less than this probability together; None: where
            a pass over the paths of all requests takes longer than their draft tokens are worth, both models' times
            being measured as they run.
        runner: how the small model is driven: auto, hooked, eager, cpu, cuda_graphs or in_place.

    Raises:
        TypeError, ValueError: a model that cannot draft, or an option out of range.
    """

    name = "draft-model"
    capabilities = Capabilities(observes=True)
    # Models of one tokenizer may pad their vocabulary differently. The engine drops draft tokens that the large model
    # lacks, and the small model does not draft for texts with ids that it lacks.
    padding = 1 / 64

    def __init__(
        self,
        model: Any,
        *,
        depth: int = 8,
        branching: int = 4,
        beam: int | None = None,
        confidence: float | None = None,
        runner: str = "auto",
    ) -> None:
        check_least(1, depth=depth, branching=branching, beam=beam)
        if confidence is not None and not 0 <= confidence <= 1:
            raise ValueError(f"confidence is {confidence}: give a probability from 0 (never stop) to 1, or None.")
        super().__init__(model, runner)
        self.depth, self.branching, self.beam, self.confidence = depth, branching, beam, confidence
        self._times = OwnTimes()
        self._cutoff = Cutoff()

    # ---------------------------------------------------------------- the drafter's contract

    def draft(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        trees = super().draft(requests, budgets)
        self._cutoff.drafted(requests, trees)
        return trees

    def observe(self, step: Step) -> None:
        """See `Drafter.observe`: learn how long a step takes, and how much of a tree was verified."""
        self._times.stepped(step.seconds)
        self._cutoff.verified(step, self.source)

    def end(self, request: RequestState) -> None:
        super().end(request)
        self._cutoff.end(request)

    # ---------------------------------------------------------------- trees

    def _grow(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        reaches = [
            self._reach(request, self.depth) if budget > 0 else 0
            for request, budget in zip(requests, budgets, strict=True)
        ]
        beam = self.beam or BEAM
        growths = [_Growth(n, beam, request.eos_token_ids) for request, n in zip(requests, budgets, strict=True)]
        frontiers: list[list[int]] = [[-1] if reach > 0 else [] for reach in reaches]
        ids = [request.id for request in requests]
        for depth in range(max(reaches)):
            if depth > 0:
                frontiers = self._frontiers(growths, [reach > depth for reach in reaches])
                if not any(frontiers):
                    break
            prepared, begin = preparations(), time.perf_counter()
            if depth == 0:
                texts = [request.tokens if own else None for request, own in zip(requests, frontiers, strict=True)]
                newest, rows = self._small.read(ids, texts)
                logits = newest[:, None]
            else:
                nodes = [growth.read(frontier) for growth, frontier in zip(growths, frontiers, strict=True)]
                logits = self._small.grow(ids, [n[0] for n in nodes], [n[1] for n in nodes], depth)
            self._offer(growths, frontiers, logits)
            if (rows <= SHORT or depth > 0) and preparations() == prepared:
                self._times.passed(time.perf_counter() - begin)
        drafts: list[Draft] = [(growth.tokens, growth.parents, growth.logp, self.source) for growth in growths]
        return TokenTree.from_drafts([request.tokens[-1] for request in requests], drafts, budgets)

    def _frontiers(self, growths: Sequence[_Growth], going_on: Sequence[bool]) -> list[list[int]]:
        """Return the nodes of each tree to be read next; none where a pass over them does not pay."""
        frontiers = [growth.frontier() if on else [] for growth, on in zip(growths, going_on, strict=True)]
        # A draft token gains what its probability exceeds the least that is worth a row.
        least = self._cutoff.probability if self.confidence is None else 0.0
        promises = [growth.promise(frontier, least) for growth, frontier in zip(growths, frontiers, strict=True)]
        if self.confidence is not None:
            likely = [promise >= self.confidence for promise in promises]
            return [frontier if fit else [] for frontier, fit in zip(frontiers, likely, strict=True)]
        # One pass serves all requests, and a step gives a token of each.
        pays = sum(promises) >= WORTH * self._times.price * len(growths)
        return frontiers if pays else [[] for _ in frontiers]

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

    def frontier(self) -> list[int]:
        """Return the nodes of the last depth whose children can be among the best of the tree."""
        lowest = sorted(self.logp, reverse=True)[self.budget - 1] if len(self.logp) >= self.budget else -math.inf
        last = range(self.newest, len(self.logp))
        fit = [i for i in last if self.logp[i] > lowest and self.tokens[i] not in self._ends]
        self.newest = len(self.logp)
        return sorted(fit, key=self.logp.__getitem__, reverse=True)[: self.beam]

    def promise(self, nodes: Sequence[int], least: float) -> float:
        """Return the summed probability of nodes of one depth, each less `least`."""
        return sum(max(math.exp(self.logp[node]) - least, 0.0) for node in nodes)

    def read(self, nodes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the tokens of `nodes` and their parents, in the small model's numbering."""
        parents = [self._rows[self.parents[node]] for node in nodes]
        for node in nodes:
            self._rows[node] = len(self._rows) - 1
        return [self.tokens[node] for node in nodes], parents


class OwnTimes:
    """Mean times of the small model's passes and of the large model's steps, in seconds; 0 before the first."""

    def __init__(self) -> None:
        self.pass_seconds = self.step_seconds = 0.0
        self._passed = False

    @property
    def price(self) -> float:
        """Return the time of a pass in steps."""
        timed = self.pass_seconds and self.step_seconds
        return self.pass_seconds / self.step_seconds if timed else PRICE_FIRST

    def passed(self, seconds: float) -> None:
        """Record the time of a pass; the first one warms up and does not count."""
        if self._passed:
            self.pass_seconds = _smoothed(self.pass_seconds, seconds)
        self._passed = True

    def stepped(self, seconds: float | None) -> None:
        """Record the time of a step from its pass on; None for steps with prompts."""
        if seconds is not None:
            self.step_seconds = _smoothed(self.step_seconds, seconds)


def _smoothed(usual: float, seconds: float) -> float:
    return seconds if usual == 0 else usual + (1 - HABIT) * (min(seconds, LONGEST * usual) - usual)


class Cutoff:
    """Learns the probability below which draft tokens are not verified, so that no pass is spent on them.

    Attributes:
        probability: the small model's probability of the last draft token that is verified; 0 until any was left out.
    """

    def __init__(self) -> None:
        self.probability = 0.0
        self._offered: ByRequest[list[float]] = ByRequest()  # log-probabilities of the last drafts, falling

    def drafted(self, requests: Sequence[RequestState], trees: TokenTree) -> None:
        """Note trees that are handed to the engine, their draft tokens in falling order."""
        for request, logp, size in zip(requests, trees.logp.tolist(), trees.sizes, strict=True):
            self._offered[request.id] = logp[1:size]

    def verified(self, step: Step, source: int) -> None:
        """Compare them with the verified draft tokens, which carry the bit `source`."""
        own = ((step.trees.source & source) != 0).sum(1).tolist()
        for request, kept in zip(step.requests, own, strict=True):
            offered = self._offered.pop(request.id, [])
            if kept > len(offered):
                continue  # these were of an earlier step
            last_in = math.exp(offered[kept - 1]) if kept else 1.0
            first_out = math.exp(offered[kept]) if kept < len(offered) else 0.0
            self.probability += RATE * (min(max(self.probability, first_out), last_in) - self.probability)

    def end(self, request: RequestState) -> None:
        """Forget a request."""
        self._offered.pop(request.id, None)


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
