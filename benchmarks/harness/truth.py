"""What a drafter would draft at every token of the model's own greedy answers, without any draft token being verified.

The engine decodes plainly, one token a step; the drafter attaches its rows to each pass and reads them as it always
does. So every position of an answer is a case with a true prefix, and what is compared with the text is what decoding
would have drafted from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.setup import Setup
from draftree.bench.measure import Share
from draftree.drafting import Drafter
from draftree.drafting.base import Attachment, Capabilities, RequestState, Step, StepPlan
from draftree.drafting.folder import Trained
from draftree.drafting.in_model import InModelDrafter
from draftree.engine import Engine, SamplingParams
from draftree.engine.limits import eos_token_ids
from draftree.pruning.early import EarlyHead
from draftree.runner import layout_of
from draftree.runner.base import top_tokens
from draftree.runner.target import Target
from draftree.shaping import Fixed
from draftree.tree import TokenTree

RANKS = 10  # best draft tokens looked at
SLOTS = 8  # answers that are looked at together, as no time is taken


class OnlyRoots(Fixed):
    """Give no request draft tokens, and let the drafter attach its rows all the same."""

    def __init__(self) -> None:
        super().__init__(0)

    def plan(self, requests: Sequence[RequestState], most: int) -> StepPlan:
        return StepPlan(requests, [0] * len(requests), [True] * len(requests))


class Onlooker(Drafter):
    """Attaches what another drafter attaches, taps further layers, and lets `see` have every step that emits tokens.

    `left` is called when a request is over.
    """

    name = "onlooker"
    capabilities = Capabilities(attaches=True, prepares=True, observes=True)

    def __init__(
        self,
        see: Callable[[Step], None],
        drafter: InModelDrafter | None = None,
        taps: Sequence[int] = (),
        left: Callable[[], None] = lambda: None,
    ) -> None:
        self.see, self.inner, self.taps, self.left = see, drafter, tuple(taps), left

    def bind(self, target: Target, *, eos_token_ids: Sequence[int] = ()) -> None:
        if self.inner is not None:
            self.inner.bind(target, eos_token_ids=eos_token_ids)

    def deep_prefix(self, target: Target) -> list[tuple[Tensor, Tensor]] | None:
        return None if self.inner is None else self.inner.deep_prefix(target)

    def plan(self, step: StepPlan) -> Attachment | None:
        own = self.inner.plan(step) if self.inner is not None else None
        own = own or Attachment()
        return replace(own, taps=tuple(sorted({*own.taps, *self.taps})))

    def draft(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        """See `Drafter.draft`: nothing."""
        return TokenTree.roots(torch.tensor([r.tokens[-1] for r in requests], dtype=torch.long, device="cpu"))

    @torch.no_grad()
    def observe(self, step: Step) -> None:
        if any(step.emitted):
            self.see(step)

    def end(self, request: RequestState) -> None:
        self.left()


def look_on(setup: Setup, prompts: Sequence[Sequence[int]], onlooker: Onlooker) -> dict[int, tuple[int, list[int]]]:
    """Answer `prompts` greedily; by request id, the prompt's number and all tokens, prompt first.

    What ends an answer with an error is raised.
    """
    new = setup["max_new_tokens"]
    capacity = max(len(ids) for ids in prompts) + new + 64
    engine = Engine(setup.model, drafter=onlooker, shape=OnlyRoots(), slots=SLOTS, capacity=capacity)
    params = SamplingParams(new, eos_token_ids(setup.model))
    requests = [engine.add(ids, params) for ids in prompts]
    engine.run()
    for request in requests:
        if request.error is not None:
            raise request.error
    return {request.id: (i, request.context.tokens) for i, request in enumerate(requests)}


@dataclass(frozen=True, slots=True)
class Hits:
    """How often the truth was among the draft tokens."""

    # How many tokens after the newest one each depth speaks of; 1 is the token that the model itself says next, 2 a
    # drafter's first (N in the figures of Hidden Transfer).
    places: tuple[int, ...]
    right: np.ndarray  # int64 [T, D, R], cases of each prompt and depth in which the token of a rank was the truth
    cases: np.ndarray  # int64 [T, D]

    @property
    def by_rank(self) -> list[list[float]]:
        """[D][R], share of all cases in which each rank was the truth, as `best_choices` takes it."""
        return (self.right.sum(0) / np.maximum(self.cases.sum(0), 1)[:, None]).tolist()

    def top(self, depth: int, k: int) -> Share:
        """Return the share of cases with the truth among the best k at depth number `depth` (from 0)."""
        return Share(self.right[:, depth, :k].sum(-1), self.cases[:, depth])


def hits_of(setup: Setup, trained: Trained, prompts: Sequence[Sequence[int]], ranks: int = RANKS) -> Hits:
    """Compare the best `ranks` that `trained` drafts at every token of the answers to `prompts` with what comes."""
    read, places, taps = _reader(setup, trained)
    noted: list[tuple[int, int, np.ndarray]] = []  # request, place of the newest token, candidates [D, RANKS]

    def see(step: Step) -> None:
        logits = read(step)
        if logits is None:
            return
        tokens, _ = top_tokens(logits, min(ranks, logits.shape[-1]))
        for b, emitted in enumerate(step.emitted):
            if emitted:
                request = step.requests[b]
                noted.append((request.id, len(request.tokens) - len(emitted) - 1, tokens[b]))

    drafter = trained if isinstance(trained, InModelDrafter) else None
    texts = look_on(setup, prompts, Onlooker(see, drafter, taps, setup.watcher.step))
    right = np.zeros((len(prompts), len(places), ranks), np.int64)
    cases = np.zeros((len(prompts), len(places)), np.int64)
    for request, newest, tokens in noted:
        prompt, text = texts[request]
        for d, place in enumerate(places):
            if newest + place < len(text):
                cases[prompt, d] += 1
                right[prompt, d, : tokens.shape[1]] += tokens[d] == text[newest + place]
    return Hits(places, right, cases)


def measured_hits(setup: Setup, drafters: dict[str, Any]) -> Iterator[tuple[str, Hits]]:
    """Yield the same of several drafters by name, one after the other, along the answers to the measured prompts."""
    for name, drafter in drafters.items():
        setup.watcher.stage(f"draft tokens of {name}", len(setup.tasks))
        yield name, hits_of(setup, drafter, [task.ids for task in setup.tasks])


def _reader(setup: Setup, trained: Trained) -> tuple[Callable[[Step], Tensor | None], tuple[int, ...], tuple[int, ...]]:
    """Return how logits [B, D, V] at the roots are read off a step, their places, and the tapped layers."""
    if isinstance(trained, InModelDrafter):
        drafter = trained

        def read(step: Step) -> Tensor | None:
            return drafter.draft_logits(step, [[0]] * len(step.requests))

        return read, tuple(range(2, drafter.depth + 2)), ()
    if not isinstance(trained, EarlyHead):
        raise ValueError(f"A {trained.method} drafter has no candidates to look at: give another one.")
    head = trained
    weights, model_head = head.weights.to(setup.target.device), layout_of(setup.model).head

    def read_early(step: Step) -> Tensor | None:
        return torch.stack(weights.ahead(step.result.hidden[head.layer][:, step.offset], model_head), 1)

    return read_early, tuple(range(1, head.settings["places"] + 1)), (head.layer,)
