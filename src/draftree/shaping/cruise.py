"""Steps between two plans: trees of the guesses that have paid of late, verified as they come.

To weigh trees and to learn from them takes as long as some rows of a small model. So hardly any step does it: steps
come in courses, in which every request has all guesses of the cells that pay (see `cells`), and all that is looked at
is which guesses were walked. A first course finds out what guesses bring at all; a trial, whether they pay for these
texts now; a cruise goes on where they do, and only behind some of those trees are weighed again (ProPD plans again when
things have shifted, section 4.2.3). A course that does not pay ends early.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from draftree.drafting.base import Context
from draftree.shaping.average import Average, Taken, learn_steps
from draftree.shaping.cells import Reach, least_of
from draftree.shaping.compiled import AHEAD, LEVELS, PARTS
from draftree.tree import TokenTree

HABIT = 0.9  # weight of the past in what a request's guesses bring
LOOK_EVERY, LOOK_LEAST = 6, 4  # steps of a course after which it is looked whether they pay, most and least
LOOKED_AT = 24  # steps of all requests together that are enough for a look
LUCK = 0.7  # tokens by which a single step of a request differs from the average: many together differ less
SLOWEST, SLOWER_STEPS = 1.2, 64  # most that courses are taken to be slower by, and steps that tell most of it
FIRST = 3  # guesses of a single request where nothing is known
FIRST_LEAST = 1.05  # tokens a step that these have to bring to be gone on with
USUAL = 0.997  # weight of the past in what guesses of a new request are taken for
UNSURE = 0.12  # by which what is expected may fall short of plain speed if nothing was tried yet
MORE, MOST_MORE = 6, 3.0  # guesses that a tree may have beyond those expected, of which there may be more in places


class Kind(Enum):
    """Of a course; the value is how many steps it has, the first one's those of all requests together."""

    FIRST = 16
    TRIAL = 24
    CRUISE = 31


class Course(NamedTuple):
    """What steps between two plans were for a request: tokens a step, time of a step in plain ones, and how many."""

    request: Context
    gain: float
    spent: float
    steps: int


class Pace(NamedTuple):
    """What steps that are not planned take.

    Attributes:
        seconds: of steps with one node, two, and so on.
        aside: seconds to be added to each.
        plain: seconds of a step without guesses.
        beside: seconds that any step takes besides.
        slower: what courses took, against all this.
    """

    seconds: np.ndarray
    aside: float
    plain: float
    beside: float = 0.0
    slower: float = 1.0

    def of(self, rows: float) -> float:
        """Seconds of a step of so many nodes, between two whole numbers too."""
        whole = int(rows)
        seconds = float(self.seconds[whole - 1])
        if rows > whole:
            seconds += (rows - whole) * (float(self.seconds[whole]) - seconds)
        return seconds + self.aside

    def longer(self, rows: float) -> float:
        """The same in plain steps, all that is done in either counted."""
        return self.slower * (self.of(rows) + self.beside) / (self.plain + self.beside)


def promise_of(averages: Sequence[Average | None]) -> float:
    """Tokens a second, over those of plain decoding, that drafting has to promise to be tried.

    Args:
        averages: that the promise comes from. What many promise together is surer, and so is what was tried for long.
    """
    tried = sum(1.0 + average.tried / Kind.TRIAL.value for average in averages if average is not None)
    return 1.0 - UNSURE / math.sqrt(tried)


class Cruise:
    """Which guesses the requests of a batch have in steps that are not planned.

    Attributes:
        plan_every: cruises from one plan to the next.
    """

    def __init__(self) -> None:
        self.plan_every = 1
        self._averages: dict[int, Average] = {}  # by request
        self._usual = Average(USUAL)  # what a new request is taken for
        self._ids: list[int] = []  # of the course's batch
        self._alive: set[int] = set()  # those of them that are not over
        self._slower: dict[int, float] = {}  # by number of requests: time that courses took, over what was expected
        self._seconds = 0.0  # that the course took
        self._levels: list[tuple[int, ...]] = []  # bins that guesses of each request are to be of, in each part
        self._sizes: list[int] = []  # most guesses of each
        self._kind = Kind.FIRST
        self._paid: Kind | None = None  # the course before, if it paid to its end
        self._cruises = 0  # that paid since the last plan
        self._left = 0  # steps to go
        self._look_every = LOOK_EVERY
        self._taken = 0  # steps so far
        self._lengths: list[int] = []  # of the texts, at the first of them
        self._walks: list[Sequence[Sequence[int]]] = []  # nodes that were walked in steps with guesses
        self._trees: list[TokenTree] = []  # of those steps
        self._roots: tuple[int, ...] = ()  # sizes of trees without guesses
        self._counted = 0  # such steps that are in the next one
        self._more = 0.0  # seconds that these took for their guesses
        self._learned = 0  # steps that have come to their end
        self._pace = Pace(np.zeros(1), 0.0, 1.0)  # what such steps take
        self._packed = True  # whether only real rows cost

    # ---------------------------------------------------------------- a course

    @property
    def running(self) -> bool:
        """Whether there are steps to go, or steps that nobody has been told of."""
        return self._left > 0 or self._taken > 0

    @property
    def plan_due(self) -> bool:
        """Whether as many cruises as go before a plan have come to their ends, and paid."""
        return self._paid is Kind.CRUISE and self._cruises >= self.plan_every

    @property
    def begun(self) -> bool:
        """Whether the step is not the first of its course, which comes out of cold caches and behind a course's end."""
        return self._taken > 1

    def due(self, requests: Sequence[Context]) -> list[int] | None:
        """Guesses of the coming step of `requests`, those of the course, if it has one more."""
        if not self._taken:
            self._lengths = [len(request.tokens) for request in requests]
            self._walks, self._trees = [], []
            self._roots = (1,) * len(requests)
            self._counted, self._more, self._learned, self._seconds = 0, 0.0, 0, 0.0
        elif (self._taken % self._look_every == 0 or not self._left) and not self._pays(requests):
            self._left = 0
            return None
        if not self._left:
            self._paid = self._kind
            self._cruises += self._kind is Kind.CRUISE
            return None
        self._left -= 1
        self._taken += 1
        return self._sizes

    def learn(self, walks: Sequence[Sequence[int]], trees: TokenTree) -> None:
        """A step of the course is over: the nodes walked in each of its trees."""
        self._learned += 1
        if trees.sizes != self._roots:
            self._walks.append(walks)
            self._trees.append(trees)

    def took(self, seconds: float) -> None:
        """A step of the course took so long, with what came before it where it was the first."""
        self._seconds += seconds

    def slower(self, batch: int) -> float:
        """What courses of so many requests took, over what their steps were expected to: they begin and end, too."""
        return self._slower.get(batch, 1.0)

    def _pays(self, requests: Sequence[Context]) -> bool:
        """Whether the steps so far have brought what they took, but for some bad luck."""
        came = steps = 0
        for request, length, size in zip(requests, self._lengths, self._sizes, strict=True):
            if size:
                came += len(request.tokens) - length
                steps += self._taken
        if self._kind is Kind.FIRST:
            return came > FIRST_LEAST * steps
        taking = steps / self._taken
        return came > self._taken * (taking + len(self._ids) * (self._longer() - 1)) - LUCK * math.sqrt(steps)

    def _longer(self) -> float:
        """Time of the steps so far in plain ones."""
        batch = len(self._ids)
        least = self._pace.of(batch)
        for trees in self._trees[self._counted :]:
            rows = sum(trees.sizes) if self._packed else batch * max(trees.sizes)
            self._more += self._pace.of(min(rows, len(self._pace.seconds))) - least
        self._counted = len(self._trees)
        pace = self._pace
        return pace.longer(batch) + pace.slower * self._more / max(self._learned, 1) / (pace.plain + pace.beside)

    def _spent(self) -> list[float]:
        """Time of such a step in plain ones, for each request: the drafter's in equal parts, that of rows by guesses.

        0 for requests without guesses; together the others pay for all that it takes longer.
        """
        taking, batch, longer = sum(size > 0 for size in self._sizes), len(self._ids), self._longer()
        if taking == 1:
            return [1.0 + batch * (longer - 1.0) if size else 0.0 for size in self._sizes]
        guesses = [sum(trees.sizes[b] - 1 for trees in self._trees) for b in range(batch)]
        least = self._pace.longer(batch)
        more = max(longer - least, 0.0) / max(sum(guesses), 1)
        return [
            1.0 + batch * ((least - 1.0) / taking + more * count) if size else 0.0
            for size, count in zip(self._sizes, guesses, strict=True)
        ]

    def over(self, requests: Sequence[Context]) -> list[Course]:
        """What the course was, once, for each of these requests that had guesses in it."""
        steps, self._taken, self._left = self._taken, 0, 0
        if not steps or not self._learned:  # none where no step came to its end
            return []
        if self._seconds:
            pace, batch = self._pace, len(self._ids)
            expected = self._learned * self._longer() / pace.slower * (pace.plain + pace.beside)
            before = self.slower(batch)
            found = min(max(self._seconds / expected, 1.0), SLOWEST)
            self._slower[batch] = before + steps / (steps + SLOWER_STEPS) * (found - before)
        courses = []
        there = {request.id: request for request in requests}
        parts = zip(self._ids, self._lengths, self._sizes, self._spent(), strict=True)
        told = []
        for number, length, size, spent in parts:
            request = there.get(number)
            told.append(size > 0 and request is not None)
            if size and request is not None:
                courses.append(Course(request, (len(request.tokens) - length) / steps, spent, steps))
        self._tell(told)
        return courses

    def _tell(self, told: Sequence[bool]) -> None:
        """What was found goes for new requests too; long courses are of texts that are easier than most."""
        if self._learned and any(told):
            averages = [self._average(number) if of else None for number, of in zip(self._ids, told, strict=True)]
            weight = min(1.0, Kind.TRIAL.value / self._learned)
            learn_steps(averages, self._usual, Taken(self._walks, self._trees, self._learned, self._levels), weight)

    def planned(self) -> None:
        """The coming step is planned."""
        self._cruises = 0

    def stop(self) -> None:
        """No more steps, and nobody is told of those taken."""
        self._left = self._taken = 0

    # ---------------------------------------------------------------- what is known

    @property
    def known(self) -> bool:
        """Whether enough is known of what guesses bring to choose sizes."""
        return self._usual.known

    def averages(self, requests: Sequence[Context], takes: Sequence[bool]) -> list[Average | None]:
        """What the guesses of the requests that take part were worth of late."""
        return [self._average(r.id) if part else None for r, part in zip(requests, takes, strict=True)]

    def _average(self, request: int) -> Average:
        found = self._averages.get(request)
        if found is None or (not found.known and self._usual.known):
            found = self._averages[request] = Average(HABIT, self._usual)
        return found

    def promises(self, batch: int, pace: Pace) -> bool:
        """Whether drafting for a batch of requests such as have been is worth a trial."""
        least = 1.0 - UNSURE if self.known else 0.0
        right, there = self._usual.values[:2].reshape(2, PARTS, LEVELS).sum(1).cumsum(1).tolist()
        return any(
            1 + gain > least * pace.longer(batch * (1 + min(guesses, AHEAD)))
            for gain, guesses in zip(right, there, strict=True)
        )

    # ---------------------------------------------------------------- setting out

    def explore(self, requests: Sequence[Context], takes: Sequence[bool], pace: Pace, *, packed: bool) -> bool:
        """Nothing is known: a course with a few guesses for each finds out what they bring.

        False, and no course, where they would not pay if all of them held.
        """
        batch = len(requests)
        size = math.ceil(FIRST / batch)  # many tell of the first guess soon enough, and rows of many are dear
        if pace.longer(batch * (1 + size)) >= 1 + size:
            return False
        sizes = [size * part for part in takes]
        self._begin(Kind.FIRST, requests, [(LEVELS,) * PARTS] * batch, sizes, pace, packed=packed)
        return True

    def set_out(
        self, requests: Sequence[Context], best: Reach, takes: Sequence[bool], pace: Pace, *, packed: bool
    ) -> float:
        """Begin a course: a trial, or a cruise behind a course that paid.

        Args:
            requests: of the coming step.
            best: which guesses are best by what is known, and the tokens expected with them.
            takes: which requests have guesses: one at least.
            pace: what such steps take.
            packed: whether only real rows cost.

        Returns:
            Tokens a second that are expected, over those of plain decoding.
        """
        levels, gains, guesses, seconds = [], [], [], best.seconds
        for request, part, level, gain, count in zip(requests, takes, *best[:3], strict=True):
            if part and not level[0]:  # the likeliest, so that it is known whether they come to more
                right, there = self._average(request.id).values[:2, 0].tolist()
                level, gain, count = (1,) + (0,) * (PARTS - 1), 1.0 + right, there
                seconds += there * (pace.of(len(requests) + 1) - pace.of(len(requests)))
            levels.append(level)
            gains.append(gain)
            guesses.append(count)
        sizes = [min(AHEAD, int(MOST_MORE * n) + MORE) * part for n, part in zip(guesses, takes, strict=True)]
        kind = Kind.TRIAL if self._paid is None else Kind.CRUISE
        self._begin(kind, requests, levels, sizes, pace, packed=packed)
        return sum(gains) * (pace.plain + pace.beside) / (pace.slower * seconds) / len(requests)

    def _begin(
        self,
        kind: Kind,
        requests: Sequence[Context],
        levels: list[tuple[int, ...]],
        sizes: list[int],
        pace: Pace,
        *,
        packed: bool,
    ) -> None:
        """Steps with such guesses are to come."""
        batch = len(requests)
        self._paid, self._kind, self._pace, self._packed = None, kind, pace, packed
        self._look_every = max(min(LOOK_EVERY, LOOKED_AT // batch), LOOK_LEAST)
        self._left = max(kind.value // batch, self._look_every) if kind is Kind.FIRST else kind.value
        self._taken = 0
        self._ids, self._levels, self._sizes = [request.id for request in requests], levels, sizes
        self._alive = set(self._ids)
        for request, level in zip(requests, levels, strict=True):
            request.least = least_of(level)

    def end(self, request: int) -> None:
        """The request is over."""
        if self._taken and request in self._alive:
            self._tell([number == request and size > 0 for number, size in zip(self._ids, self._sizes, strict=True)])
        self._averages.pop(request, None)
        self._alive.discard(request)
        if not self._alive:
            self.stop()
