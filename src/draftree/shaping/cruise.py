"""Steps between two plans: trees of the sizes that have been best of late, verified as they come.

To weigh trees and to learn from them takes as long as some rows of a small model. Where drafting pays, only every
thirty-second step does so; those between ask for the sizes that are best on the average of the last plans, and look at
nothing (ProPD plans again when things have shifted, section 4.2.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftree.drafting.base import Context
from draftree.shaping.counts import Average, Sizes

BETWEEN = 31  # steps between two plans
HABIT = 0.9  # weight of the past in what a request's guesses bring
LOOK_EVERY = 4  # of them, after which it is looked whether they pay
PATIENCE = 0.9  # of the time they took, what they must have brought
USUAL = 0.8  # weight of earlier requests in what those of a new one are taken for


class Course(NamedTuple):
    """What steps between two plans were for a request: tokens a step, and time of a step in plain ones."""

    request: Context
    gain: float
    spent: float


class Pace(NamedTuple):
    """What steps that are not planned take.

    Attributes:
        seconds: of steps with one node, two, and so on.
        aside: seconds to be added to each.
        plain: seconds of a step without guesses.
        whole: the same with all that is done beside its pass, for steps that are judged by the time they took; 0 where
            the time expected of them is taken for it.
    """

    seconds: np.ndarray
    aside: float
    plain: float
    whole: float = 0.0


class Cruise:
    """How many guesses the requests of a batch have until the next plan."""

    def __init__(self) -> None:
        self._averages: dict[int, Average] = {}  # by request
        self._usual = Average(USUAL)  # what a new request is taken for
        self._ids: list[int] = []  # of the batch that was planned for
        self._sizes: list[int] = []
        self._left = 0  # steps to go
        self._taken = 0  # steps so far
        self._lengths: list[int] = []  # of the texts, at the first of them
        self._spent = 0.0  # time of such a step in plain ones, of a request with guesses
        self._took = self._whole = 0.0  # seconds of the steps so far, and of a plain one

    @property
    def running(self) -> bool:
        """Whether there are steps to go, or steps that nobody has been told of."""
        return self._left > 0 or self._taken > 0

    def due(self, requests: Sequence[Context]) -> list[int] | None:
        """Guesses of a step that is not planned, which is one of those to go; None for a step to be planned."""
        if not self._left:
            return None
        if len(requests) != len(self._ids) or any(r.id != known for r, known in zip(requests, self._ids, strict=True)):
            self._left = self._taken = 0
            return None
        if not self._taken:
            self._took = 0.0
            self._lengths = [len(request.tokens) for request in requests]
        elif self._taken % LOOK_EVERY == 0 and not self._pays(requests):
            self._left = 0
            return None
        self._left -= 1
        self._taken += 1
        return self._sizes

    def took(self, whole: float) -> None:
        """A step that was not planned took `whole` seconds."""
        self._took += whole
        guessing = sum(size > 0 for size in self._sizes)
        if self._whole and guessing:
            self._spent = 1.0 + (self._took / self._taken / self._whole - 1.0) * len(self._ids) / guessing

    def _pays(self, requests: Sequence[Context]) -> bool:
        """Whether the steps so far have brought what they took, but for some bad luck."""
        came = spent = 0.0
        for request, length, size in zip(requests, self._lengths, self._sizes, strict=True):
            if size:
                came += len(request.tokens) - length
                spent += self._taken * self._spent
        return came > PATIENCE * spent

    def over(self, requests: Sequence[Context]) -> list[Course]:
        """What the steps since the last plan were, once, for each request that had guesses in them."""
        steps, self._taken = self._taken, 0
        if not steps or len(requests) != len(self._ids):
            return []
        return [
            Course(request, (len(request.tokens) - length) / steps, self._spent)
            for request, length, size in zip(requests, self._lengths, self._sizes, strict=True)
            if size
        ]

    def averages(self, requests: Sequence[Context], takes: Sequence[bool]) -> list[Average | None]:
        """What the guesses of the requests that take part were worth of late, to learn of a plan."""
        return [self._average(r.id) if part else None for r, part in zip(requests, takes, strict=True)]

    def _average(self, request: int) -> Average:
        found = self._averages.get(request)
        if found is None:
            found = self._averages[request] = Average(HABIT, self._usual)
        return found

    def follow(
        self,
        requests: Sequence[Context],
        later: Sizes,
        takes: Sequence[bool],
        pace: Pace,
        *,
        packed: bool,
    ) -> None:
        """A step was planned; steps of the sizes `later` follow if they pay.

        Args:
            requests: of the step.
            later: sizes and gains on the average.
            takes: which requests drafting pays for; the others have no guesses until the next plan.
            pace: what such steps take.
            packed: whether only real rows cost.
        """
        batch = len(requests)
        sizes = [size if part else 0 for size, part in zip(later.sizes, takes, strict=True)]
        if packed:
            rows = batch + sum(self._averages[r.id].rows(n) for r, n in zip(requests, sizes, strict=True) if n)
        else:
            rows = batch * (1 + max(sizes))
        gain = sum(more if part else 1.0 for more, part in zip(later.gains, takes, strict=True))
        whole, (seconds, aside, plain, self._whole) = int(rows), pace
        time = seconds[whole - 1] + (rows - whole) * (seconds[whole] - seconds[whole - 1]) + aside
        pays = any(sizes) and gain / time > batch / plain
        self._left, self._taken = (BETWEEN if pays else 0), 0
        guessing = sum(size > 0 for size in sizes)
        self._spent = 1.0 + (time / plain - 1.0) * batch / guessing if guessing else 1.0
        self._ids, self._sizes = [request.id for request in requests], sizes

    def end(self, request: int) -> None:
        """The request is over."""
        ended = self._averages.pop(request, None)
        if ended is not None:
            self._usual.mix(ended.values)
        if request in self._ids:
            self._left = self._taken = 0
