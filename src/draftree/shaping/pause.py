"""The pause policy: whether a request drafts in a step, and from what.

A step is plain, or it drafts: unprepared, or from what the pass before has prepared (drafters inside the model). The
advantage of each way is the accepted tokens less the extra time, counted in plain tokens. Steps vary much, so a
request's own mean is shrunk towards that of all requests. A way with an expected loss pauses for eight steps, and
twice as long each further time.
"""

from __future__ import annotations

from collections.abc import Sequence

PLAIN, UNPREPARED, PREPARED = 0, 1, 2
FADING_ALL, FADING_OWN = 0.99, 0.95  # weight of the past per step
SHRINK = 8.0  # weight of the mean of all requests, in steps
HOPE = 0.25  # prior advantage in tokens
TRIAL = 8  # steps of a new way before it is compared with others
ALLOWANCE, RETRIAL = 1.0, 0.4  # tokens that a way may lose before it pauses: first, and after a pause
PAUSE_FIRST, PAUSE_LAST = 8, 64  # steps


class _Way:
    """The advantage of one way of drafting, and its pauses; `before` holds that of all requests, None for itself."""

    __slots__ = ("_before", "_fading", "_sum", "_weight", "credit", "left", "length", "steps")

    def __init__(self, before: _Way | None = None) -> None:
        self._before = before
        self._fading = FADING_ALL if before is None else FADING_OWN
        # The sum and number of advantages, with fading weights; the prior fades too.
        self._sum, self._weight = (SHRINK * HOPE, SHRINK) if before is None else (0.0, 0.0)
        self.steps: int = 0 if before is None else min(before.steps, TRIAL)
        self.left = 0  # steps until the pause ends
        self.length: int = PAUSE_FIRST if before is None else before.length
        # Tokens that it may still lose before it pauses.
        self.credit = ALLOWANCE if self.length == PAUSE_FIRST else RETRIAL

    @property
    def advantage(self) -> float:
        """Return the expected advantage of a step, in tokens."""
        if self._before is None:
            return self._sum / self._weight
        return (SHRINK * self._before.advantage + self._sum) / (SHRINK + self._weight)

    @property
    def on_trial(self) -> bool:
        """Return whether it must be tried: it is new, or its last pause is over."""
        return self.steps < TRIAL or self.length > PAUSE_FIRST

    def record(self, advantage: float, against: float) -> None:
        """Record the advantage of a step; the best other way is expected to have `against`."""
        self.steps += 1
        self._sum = self._fading * self._sum + advantage
        self._weight = self._fading * self._weight + 1.0
        if self.advantage >= against:
            self.credit, self.length = ALLOWANCE, PAUSE_FIRST
            return
        self.credit += min(advantage - against, 0.0)
        if self.credit < 0.0:
            self.left, self.credit = self.length, RETRIAL
            self.length = min(2 * self.length, PAUSE_LAST)

    def rest(self) -> None:
        """Count a step of a pause; statistics of the text fade meanwhile."""
        if self.left:
            self.left -= 1
            self._sum *= self._fading
            self._weight *= self._fading


class PausePolicy:
    """Decides how one request drafts, or a batch: attached rows cost nearly the same for one request as for all.

    Args:
        ways: the drafter's ways, of UNPREPARED and PREPARED.
        before: the policy of all requests, to begin with; None for a new drafter.
    """

    def __init__(self, ways: Sequence[int], before: PausePolicy | None = None) -> None:
        self._ways: dict[int, _Way] = {way: _Way(None if before is None else before._ways.get(way)) for way in ways}

    @property
    def on_trial(self) -> bool:
        """Return whether a way is being tried."""
        return any(own.on_trial and not own.left for own in self._ways.values())

    def next(self) -> int:
        """Return the way of the coming step: one on trial, else the best. Count a step of all pauses."""
        free = [(way, own) for way, own in self._ways.items() if not own.left]
        for own in self._ways.values():
            own.rest()
        if not free:
            return PLAIN
        return max(free, key=lambda each: (each[1].on_trial, each[1].advantage))[0]

    def record(self, way: int, advantage: float) -> None:
        """Record a step that drafted in a way, with its advantage in tokens."""
        own = self._ways.setdefault(way, _Way())  # a shape may serve several drafters
        others = (a for a in self._ways.values() if a is not own and not a.left and not a.on_trial)
        own.record(advantage, max([0.0, *(other.advantage for other in others)]))
