"""A simulated machine and text for tests of shapes: a step takes a given function of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tree_paths import from_arrays

from draftree.drafting import Drafter, RequestState
from draftree.drafting.base import Capabilities
from draftree.runner.step_cost import StepCost
from draftree.shaping.base import Outcome
from draftree.tree import TokenTree


class Chain(Drafter):
    """Drafts chains of at most `most` tokens, each accepted with one probability, which it states.

    Args:
        holds: the probability, by request.
        claims: the probability that it states; None for the true one.
        most: draft tokens of a chain.
        attaches: rows attached to each node with prepared drafts; 0 for an outside drafter.
    """

    def __init__(
        self, holds: Callable[[int], float], claims: float | None = None, most: int = 8, attaches: int = 0
    ) -> None:
        self.holds, self.claims, self.most, self.attaches = holds, claims, most, attaches
        self.capabilities = Capabilities(attaches=attaches > 0, prepares=attaches > 0, observes=attaches > 0)
        self.rng = np.random.default_rng(0)

    def rows(self, nodes: Any, requests: int = 1, attach_to: Any = None) -> Any:
        return nodes + self.attaches * (nodes if attach_to is None else np.minimum(nodes, attach_to))

    def draft(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        trees = []
        for request, budget in zip(requests, budgets, strict=True):
            count = min(budget, self.most)
            chance = self.holds(request.id) if self.claims is None else self.claims
            logp = np.log(chance) * np.arange(1, count + 1, dtype=np.float32)
            trees.append(from_arrays([7] * count, range(-1, count - 1), logp, root=5))
        return TokenTree.stack(trees)


@dataclass
class World:
    """Steps of a shape on a machine whose passes take `seconds(rows)`.

    Attributes:
        tokens, steps, time: in all.
        sizes: draft tokens of each step's requests.
        prepared: whether each step prepared the next one.
    """

    drafter: Chain
    shape: Any
    seconds: Callable[[int], float]
    drafting: float = 0.0
    tokens: int = 0
    steps: int = 0
    time: float = 0.0
    sizes: list[list[int]] = field(default_factory=list)
    prepared: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        # What is measured beforehand is short of what follows a pass, and each time is off by a tenth.
        rows = (1, 4, 8, 16, 32)
        noise = np.exp(np.random.default_rng(1).normal(0, 0.1, len(rows)))
        first = StepCost(rows, 0.8 * noise * [self.seconds(n) for n in rows])
        self.sizer = self.shape.bind(first, self.drafter)
        self.ready = False

    def run(self, ids: Sequence[int], steps: int) -> float:
        """Run `steps` steps of these requests together and return their tokens per second."""
        states = [RequestState(i, [1, 5], 2, 10**6) for i in ids]
        before = self.tokens, self.time
        for _ in range(steps):
            plan = self.sizer.plan(states, 64)
            asked = any(plan.budgets)
            can = asked and (self.ready or not self.drafter.attaches)
            drafted = self.drafter.draft(states, plan.budgets if can else [0] * len(ids))
            plan = self.sizer.trim(plan, drafted)
            trees = plan.trees
            assert trees is not None
            accepted = []
            for state, size in zip(states, trees.sizes, strict=True):
                held = self.drafter.rng.random(size - 1) < self.drafter.holds(state.id)
                accepted.append(list(range(1 + int(np.cumprod(held).sum()))))
                state.remaining -= len(accepted[-1])
                self.tokens += len(accepted[-1])
            rows = sum(trees.sizes)
            if plan.prepares_any:
                rows = int(self.drafter.rows(rows, len(ids), plan.attach_to and len(ids) * plan.attach_to))
            drafting = self.drafting if asked else 0.0
            took = self.seconds(rows) + drafting
            self.time += took
            self.steps += 1
            self.sizes.append([size - 1 for size in trees.sizes])
            self.prepared.append(plan.prepares_any)
            self.ready = plan.prepares_any
            self.sizer.observe(plan, Outcome(accepted, sum(trees.sizes), took, drafting, attached=plan.prepares_any))
        for state in states:
            self.sizer.end(state)
        return (self.tokens - before[0]) / (self.time - before[1])
