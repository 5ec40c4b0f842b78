"""A shape that keeps what the steps of a run took, and one that is given these times in a replay."""

import dataclasses

from draftree.shaping.base import Shape, Sizer


class Timed(Shape):
    """Another shape, that keeps what its steps took; in a replay its steps take what those of `run` took.

    Attributes:
        cost: what a step cost as the first engine measured it.
        steps: (seconds, seconds of drafting) of every step.
    """

    measures = True

    def __init__(self, inner, run=None):
        self.inner, self.run = inner, run
        self.cost, self.steps = (None, []) if run is None else (run.cost, iter(run.steps))

    def bind(self, cost, drafter, pruner=None, *, packed=True):
        self.cost = self.cost or cost
        return TimedSizer(self.inner.bind(self.cost if self.run else cost, drafter, pruner, packed=packed), self)


class TimedSizer(Sizer):
    """The sizer of a `Timed`."""

    def __init__(self, inner, shape):
        self.inner, self.shape = inner, shape
        self.plan, self.trim, self.end = inner.plan, inner.trim, inner.end

    def plan(self, requests, most):
        """The inner one's, set above."""

    def observe(self, plan, outcome):
        if self.shape.run is None:
            self.shape.steps.append((outcome.seconds, outcome.drafting))
        else:
            seconds, drafting = next(self.shape.steps)
            outcome = dataclasses.replace(outcome, seconds=seconds, drafting=drafting)
        self.inner.observe(plan, outcome)
