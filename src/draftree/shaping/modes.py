"""Whether a request drafts at all, and how: by what drafting is expected to bring it.

A step is plain, or it drafts; a drafter inside the model drafts from what the pass before has prepared, others need no
preparing, and a merge of both can do either. Each way of drafting has an account of its advantage: what its steps
bring in accepted tokens, less the time that these take longer, counted in plain tokens. Steps differ much (a trie finds
nothing five times and then a whole sentence), so a request's own recent steps are shrunk towards those of all requests.
A way that is expected to lose against plain steps, or against the other way, pauses for eight steps; each further time,
for twice as many.
"""

from __future__ import annotations

from collections.abc import Sequence

PLAIN, UNPREPARED, PREPARED = 0, 1, 2
FADING_ALL, FADING_OWN = 0.99, 0.95  # weight of the past, by step
SHRINK = 8.0  # steps that the mean of all requests counts for
HOPE = 0.25  # advantage in tokens of a way that nothing is known of
TRIAL = 8  # steps of a way that was never tried, before it is compared with another
ALLOWANCE, RETRIAL = 1.0, 0.4  # tokens that a way may lose before it pauses, at first and when it is tried again
PAUSE_FIRST, PAUSE_LAST = 8, 64  # steps


class Account:
    """What one way of drafting brings, and its pauses; `before` is the account of all requests, None for it itself."""

    __slots__ = ("_before", "_fading", "_sum", "_weight", "credit", "left", "length", "steps")

    def __init__(self, before: Account | None = None) -> None:
        self._before = before
        self._fading = FADING_ALL if before is None else FADING_OWN
        # Sum and number of its advantages, the recent ones weighing more; a hope that nothing bears out fades.
        self._sum, self._weight = (SHRINK * HOPE, SHRINK) if before is None else (0.0, 0.0)
        self.steps: int = 0 if before is None else min(before.steps, TRIAL)  # that it was tried for
        self.left = 0  # steps of the pause to come
        self.length: int = PAUSE_FIRST if before is None else before.length
        # Tokens that it may lose before it pauses, while it is expected to lose.
        self.credit = ALLOWANCE if self.length == PAUSE_FIRST else RETRIAL

    @property
    def advantage(self) -> float:
        """What a step is expected to bring, in tokens."""
        if self._before is None:
            return self._sum / self._weight
        return (SHRINK * self._before.advantage + self._sum) / (SHRINK + self._weight)

    @property
    def on_trial(self) -> bool:
        """Whether it is to be tried: it hardly was, or it has lost and may do better by now."""
        return self.steps < TRIAL or self.length > PAUSE_FIRST

    def book(self, advantage: float, against: float) -> None:
        """A step brought so much, where another way is expected to bring `against`."""
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
        """A step of its pause passes; what it knows of the text grows old."""
        if self.left:
            self.left -= 1
            self._sum *= self._fading
            self._weight *= self._fading


class Modes:
    """The ways of drafting of one request, or of several that decide together.

    The requests of a batch do: rows that a drafter attaches for one of them cost nearly what they cost for all.

    Args:
        ways: that the drafter has, of UNPREPARED and PREPARED.
        before: accounts to begin with; None for a drafter that nothing is known of.
    """

    def __init__(self, ways: Sequence[int], before: Modes | None = None) -> None:
        self._accounts: dict[int, Account] = {
            way: Account(None if before is None else before._accounts.get(way)) for way in ways
        }

    @property
    def on_trial(self) -> bool:
        """Whether a way is being tried."""
        return any(account.on_trial and not account.left for account in self._accounts.values())

    def next(self) -> int:
        """The way of the step to come: one that is on trial, else the best; a step of all pauses passes."""
        free = [(way, account) for way, account in self._accounts.items() if not account.left]
        for account in self._accounts.values():
            account.rest()
        if not free:
            return PLAIN
        return max(free, key=lambda each: (each[1].on_trial, each[1].advantage))[0]

    def book(self, way: int, advantage: float) -> None:
        """A step drafted in that way, at that advantage in tokens."""
        account = self._accounts.setdefault(way, Account())  # one shape may serve drafters of different ways
        others = (a for a in self._accounts.values() if a is not account and not a.left and not a.on_trial)
        account.book(advantage, max([0.0, *(other.advantage for other in others)]))
