"""Steps between two plans: trees of the sizes that have been best of late, verified as they come.

To weigh trees and to learn from them takes as long as some rows of a small model. So hardly any step does it: steps
come in courses, in which every request has as many guesses as would have been best of late, and all that is looked at
is which guesses were walked. A first course finds out what guesses bring at all; a trial, whether they pay for these
texts now; a cruise goes on where they do, and only behind it trees are weighed again (ProPD plans again when things
have shifted, section 4.2.3). A course that does not pay ends early.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from draftree.drafting.base import Context
from draftree.shaping.average import Average, new_average
from draftree.shaping.counts import Sizes

HABIT = 0.9  # weight of the past in what a request's guesses bring
LOOK_EVERY = 4  # steps of a course after which it is looked whether they pay
LUCK = 0.5  # tokens by which a single step of a request differs from the average: many together differ less
FIRST = 3  # guesses of a single request where nothing is known
FIRST_LEAST = 1.05  # tokens a step that these have to bring to be gone on with
USUAL = 0.997  # weight of the past in what guesses of a new request are taken for
UNSURE = 0.12  # by which what is expected may fall short of plain speed if nothing was tried yet
TRIED = (1, 2, 4)  # guesses of each request that are looked at to see whether drafting may pay at all


class Kind(Enum):
    """Of a course; the value is how many steps it has, the first one's those of all requests together."""

    FIRST = 16
    TRIAL = 8
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
    """

    seconds: np.ndarray
    aside: float
    plain: float
    beside: float = 0.0

    def of(self, rows: float) -> float:
        """Seconds of a step of so many nodes, between two whole numbers too."""
        whole = int(rows)
        seconds = float(self.seconds[whole - 1])
        if rows > whole:
            seconds += (rows - whole) * (float(self.seconds[whole]) - seconds)
        return seconds + self.aside

    def longer(self, rows: float) -> float:
        """The same in plain steps, all that is done in either counted."""
        return (self.of(rows) + self.beside) / (self.plain + self.beside)


def least_of(averages: Sequence[Average | None]) -> float:
    """Tokens a second, over those of plain decoding, that drafting has to promise to be tried.

    Args:
        averages: that the promise comes from. What many promise together is surer, and so is what was tried for long.
    """
    tried = sum(1.0 + average.tried / Kind.TRIAL.value for average in averages if average is not None)
    return 1.0 - UNSURE / math.sqrt(tried)


class Cruise:
    """How many guesses the requests of a batch have in steps that are not planned."""

    def __init__(self) -> None:
        self._averages: dict[int, Average] = {}  # by request
        self._usual = new_average(USUAL)  # what a new request is taken for
        self._ids: list[int] = []  # of the course's batch
        self._alive: set[int] = set()  # those of them that are not over
        self._sizes: list[int] = []
        self._kind = Kind.FIRST
        self._paid: Kind | None = None  # the course before, if it paid to its end
        self._left = 0  # steps to go
        self._taken = 0  # steps so far
        self._lengths: list[int] = []  # of the texts, at the first of them
        self._steps: list[tuple[Sequence[Sequence[int]], Sequence[int]]] = []  # nodes walked in each, and trees' sizes
        self._spent = 0.0  # time of such a step in plain ones, of a request with guesses

    # ---------------------------------------------------------------- a course

    @property
    def running(self) -> bool:
        """Whether there are steps to go, or steps that nobody has been told of."""
        return self._left > 0 or self._taken > 0

    @property
    def plan_due(self) -> bool:
        """Whether a cruise has come to its end, and paid."""
        return self._paid is Kind.CRUISE

    @property
    def begun(self) -> bool:
        """Whether the step is not the first of its course, which comes out of cold caches."""
        return self._taken > 1

    def due(self, requests: Sequence[Context]) -> list[int] | None:
        """Guesses of the coming step of `requests`, those of the course, if it has one more."""
        if not self._taken:
            self._lengths = [len(request.tokens) for request in requests]
            self._steps.clear()
        elif (self._taken % LOOK_EVERY == 0 or not self._left) and not self._pays(requests):
            self._left = 0
            return None
        if not self._left:
            self._paid = self._kind
            return None
        self._left -= 1
        self._taken += 1
        return self._sizes

    def learn(self, walks: Sequence[Sequence[int]], sizes: Sequence[int]) -> None:
        """A step of the course is over: the nodes walked in each tree, and the tree's size."""
        self._steps.append((walks, sizes))

    def _counted(self, place: int) -> tuple[list[int], list[int]]:
        """Of the request in this place: in how many steps node n was walked, and how many had n guesses."""
        right, counts = [0] * (self._sizes[place] + 1), [0] * (self._sizes[place] + 1)
        for walks, sizes in self._steps:
            counts[sizes[place] - 1] += 1
            for node in walks[place]:
                right[node] += 1
        return right, counts

    def _pays(self, requests: Sequence[Context]) -> bool:
        """Whether the steps so far have brought what they took, but for some bad luck."""
        came = steps = 0
        for request, length, size in zip(requests, self._lengths, self._sizes, strict=True):
            if size:
                came += len(request.tokens) - length
                steps += self._taken
        if self._kind is Kind.FIRST:
            return came > FIRST_LEAST * steps
        return came > steps * self._spent - LUCK * math.sqrt(steps)

    def over(self, requests: Sequence[Context]) -> list[Course]:
        """What the course was, once, for each of these requests that had guesses in it."""
        steps, self._taken, self._left = self._taken, 0, 0
        if not steps:
            return []
        courses = []
        there = {request.id: request for request in requests}
        for place, (number, length, size) in enumerate(zip(self._ids, self._lengths, self._sizes, strict=True)):
            request = there.get(number)
            if size and request is not None and self._steps:  # none where no step came to its end
                right, counts = self._counted(place)
                self._average(number).learn(right, counts)
                self._tell_others(right, counts)
                courses.append(Course(request, (len(request.tokens) - length) / steps, self._spent, steps))
        return courses

    def _tell_others(self, right: Sequence[int], counts: Sequence[int]) -> None:
        """What was found goes for new requests too; long courses are of texts that are easier than most."""
        steps = sum(counts)
        if steps:
            self._usual.learn(right, counts, min(1.0, Kind.TRIAL.value / steps))

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
            found = self._averages[request] = new_average(HABIT, self._usual)
        return found

    def promises(self, batch: int, pace: Pace) -> bool:
        """Whether drafting for a batch of requests such as have been is worth a trial."""
        least = 1.0 - UNSURE if self.known else 0.0
        for size in TRIED:
            worth, rows = self._usual.values[:2, :size].sum(1).tolist()
            if 1 + worth > least * pace.longer(batch * (1 + rows)):
                return True
        return False

    # ---------------------------------------------------------------- setting out

    def explore(self, requests: Sequence[Context], takes: Sequence[bool], pace: Pace, *, packed: bool) -> bool:
        """Nothing is known: a course with a few guesses for each finds out what they bring.

        False, and no course, where they would not pay if all of them held.
        """
        batch = len(requests)
        size = math.ceil(FIRST / batch)  # many tell of the first guess soon enough, and rows of many are dear
        if pace.longer(batch * (1 + size)) >= 1 + size:
            return False
        self._begin(Kind.FIRST, requests, [size * part for part in takes], pace, packed=packed)
        return True

    def set_out(
        self, requests: Sequence[Context], best: Sizes, takes: Sequence[bool], pace: Pace, *, packed: bool
    ) -> float:
        """Begin a course: a trial, or a cruise behind a course that paid.

        Args:
            requests: of the coming step.
            best: sizes that are best by what is known, and the tokens expected with them.
            takes: which requests have guesses: one at least.
            pace: what such steps take.
            packed: whether only real rows cost.

        Returns:
            Tokens a second that are expected, over those of plain decoding.
        """
        sizes = [max(size, 1) * part for size, part in zip(best.sizes, takes, strict=True)]
        kind = Kind.TRIAL if self._paid is None else Kind.CRUISE
        longer = self._begin(kind, requests, sizes, pace, packed=packed)
        gain = 0.0
        for request, size, found in zip(requests, sizes, best.gains, strict=True):
            gain += max(found, 1 + float(self._average(request.id).values[0, 0])) if size else 1.0
        return gain / longer / len(requests)

    def _begin(self, kind: Kind, requests: Sequence[Context], sizes: list[int], pace: Pace, *, packed: bool) -> float:
        """Steps of these sizes are to come; what one is expected to take against a plain one."""
        batch = len(requests)
        if packed:
            rows = batch + sum(self._average(r.id).rows(n) for r, n in zip(requests, sizes, strict=True) if n)
        else:
            rows = batch * (1 + max(sizes))
        longer = pace.longer(rows)
        self._paid, self._kind = None, kind
        self._left = max(kind.value // batch, LOOK_EVERY) if kind is Kind.FIRST else kind.value
        self._taken = 0
        self._ids, self._sizes = [request.id for request in requests], sizes
        self._alive = set(self._ids)
        self._spent = self._share(longer)
        return longer

    def _share(self, longer: float) -> float:
        """Time of a step in plain ones for a request with guesses, which together pay for what it takes longer."""
        return 1.0 + (longer - 1.0) * len(self._ids) / max(sum(size > 0 for size in self._sizes), 1)

    def end(self, request: int) -> None:
        """The request is over."""
        self._averages.pop(request, None)
        if self._taken and request in self._alive:
            place = self._ids.index(request)
            if self._sizes[place]:
                self._tell_others(*self._counted(place))
        self._alive.discard(request)
        if not self._alive:
            self.stop()
