"""Looks at what a drafter inside the model would draft, while the engine decodes without verifying any draft token.

The drafter's rows are attached to every pass as always, so each place of an answer is seen with its true prefix. The
shape `OnlyRoots` attaches them and verifies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftree.drafting.base import Attachment, Capabilities, Context, Drafter, Step, StepPlan
from draftree.drafting.in_model import InModelDrafter
from draftree.runner.target import Target
from draftree.shaping.base import Fixed
from draftree.tree import TokenTree

See = Callable[[Step], None]


class OnlyRoots(Fixed):
    """No draft tokens in any step, and the drafter prepares those of the next step all the same."""

    def __init__(self) -> None:
        super().__init__(0)

    def plan(self, requests: Sequence[Context], most: int, *, closed: bool = False) -> StepPlan:
        return StepPlan(requests, [0] * len(requests), [True] * len(requests))


class Onlooker(Drafter):
    """Attaches what another drafter attaches, taps further layers, and lets `see` have every step that emits tokens.

    `left` is called when a request is over.
    """

    name = "onlooker"
    capabilities = Capabilities(attaches=True, prepares=True, observes=True)

    def __init__(
        self,
        see: See,
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

    def draft(self, requests: Sequence[Context], budgets: Sequence[int]) -> TokenTree:
        """See `Drafter.draft`: nothing."""
        return TokenTree.roots(torch.tensor([r.tokens[-1] for r in requests], dtype=torch.long, device="cpu"))

    @torch.no_grad()
    def observe(self, step: Step) -> None:
        if any(step.emitted):
            self.see(step)

    def end(self, request: Context) -> None:
        self.left()
