"""The pause policy: whether a step drafts, and from what.

A step is plain, or it drafts: unprepared, or from what the pass before has prepared (drafters inside the model). The
advantage of each way is the accepted tokens less the extra time, counted in plain tokens. A way with an expected loss
pauses for eight steps, and twice as long each further time.
"""

from __future__ import annotations

from collections.abc import Sequence

PLAIN, UNPREPARED, PREPARED = 0, 1, 2
FADING = 0.98  # weight of the past per step
HOPE, HOPED = 0.25, 8.0  # prior advantage in tokens, and its weight in steps
TRIAL = 8  # steps of a new way before it is compared with others
ALLOWANCE, RETRIAL = 1.0, 0.4  # tokens that a way may lose before it pauses: first, and after a pause
PAUSE_FIRST, PAUSE_LAST = 8, 64  # steps


class _Way:
    """The advantage of one way of drafting, and its pauses."""

    __slots__ = ("_sum", "_weight", "credit", "left", "length", "steps")

    def __init__(self) -> None:
        self._sum, self._weight = HOPED * HOPE, HOPED  # sum and number of advantages, with fading weights
        self.steps = 0
        self.left = 0  # steps until the pause ends
        self.length = PAUSE_FIRST  # of the next pause
        self.credit = ALLOWANCE  # tokens that it may still lose before it pauses

    @property
    def advantage(self) -> float:
        """Return the expected advantage of a step, in tokens."""
        return self._sum / self._weight

    @property
    def on_trial(self) -> bool:
        """Return whether it must be tried: it is new, or its last pause is over."""
        return self.steps < TRIAL or self.length > PAUSE_FIRST

    def record(self, advantage: float, against: float) -> None:
        """Record the advantage of a step; the best other way is expected to have `against`."""
        self.steps += 1
        self._sum = FADING * self._sum + advantage
        self._weight = FADING * self._weight + 1.0
        if self.advantage >= against:
            self.credit, self.length = ALLOWANCE, PAUSE_FIRST
            return
        self.credit += min(advantage - against, 0.0)
        if self.credit < 0.0:
            self.left, self.credit = self.length, RETRIAL
            self.length = min(2 * self.length, PAUSE_LAST)


class PausePolicy:
    """Decides how steps draft, for all requests of a drafter; `ways` are of UNPREPARED and PREPARED."""

    def __init__(self, ways: Sequence[int]) -> None:
        self._ways = {way: _Way() for way in ways}

    def next(self) -> int:
        """Return the way of the coming step: one on trial, else the best. Count a step of all pauses."""
        free = [(way, own) for way, own in self._ways.items() if not own.left]
        for own in self._ways.values():
            own.left = max(own.left - 1, 0)
        if not free:
            return PLAIN
        return max(free, key=lambda each: (each[1].on_trial, each[1].advantage))[0]

    def record(self, way: int, advantage: float) -> None:
        """Record a step that drafted in a way, with its advantage in tokens."""
        own = self._ways[way]
        others = (a for a in self._ways.values() if a is not own and not a.left and not a.on_trial)
        own.record(advantage, max([0.0, *(other.advantage for other in others)]))
