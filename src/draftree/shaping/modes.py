"""Whether a request drafts at all, and how: by what drafting brought it of late.

A step is plain, or it drafts; a drafter inside the model drafts from what the pass before has prepared, others need no
preparing, and a merge of both can do either. Each way of drafting has an account of its advantage: what its steps
bring in accepted tokens, less the time that these take longer, counted in plain tokens. A way that has lost a token
against plain steps, or against the other way, pauses for eight steps; each further time, for twice as many.
"""

from __future__ import annotations

from collections.abc import Sequence

PLAIN, UNPREPARED, PREPARED = 0, 1, 2
RATE = 0.05  # weight of a step in a settled mean
CREDIT, ALLOWANCE = 1.0, 1.0  # tokens that a way may be ahead, and that it may lose before it pauses
RETRIAL = 0.4  # tokens that it may lose when it is tried again
PAUSE_FIRST, PAUSE_LAST = 8, 64  # steps
TRIAL = 8  # steps of a way that was never tried, before it is compared with another


class Account:
    """What one way of drafting brings, and its pauses.

    Attributes:
        advantage: mean of its steps, in tokens.
        steps: that this is the mean of.
        balance: its sum since the last pause, up to the credit.
        left: steps of the pause to come.
        length: of the next pause.
    """

    __slots__ = ("advantage", "balance", "left", "length", "steps")

    def __init__(self) -> None:
        self.advantage, self.steps = 0.0, 0
        self.balance = 0.0
        self.left, self.length = 0, PAUSE_FIRST

    @property
    def on_trial(self) -> bool:
        """Whether it is to be tried: it hardly was, or it has lost and may do better by now."""
        return self.steps < TRIAL or self.length > PAUSE_FIRST

    def heir(self) -> Account:
        """What a new request begins with: the same mean; where pauses have grown, a short trial."""
        account = Account()
        account.advantage, account.steps, account.length = self.advantage, min(self.steps, TRIAL), self.length
        if self.length > PAUSE_FIRST:
            account.balance = RETRIAL - ALLOWANCE
        return account


class Modes:
    """The ways of drafting of one request, or of several that decide together.

    The requests of a batch do: rows that a drafter attaches for one of them cost nearly what they cost for all.

    Args:
        ways: that the drafter has, of UNPREPARED and PREPARED.
        before: accounts to begin with; None for a drafter that nothing is known of.
    """

    def __init__(self, ways: Sequence[int], before: Modes | None = None) -> None:
        self._accounts: dict[int, Account] = {
            way: before._accounts[way].heir() if before is not None and way in before._accounts else Account()
            for way in ways
        }

    @property
    def on_trial(self) -> bool:
        """Whether a way is being tried."""
        return any(account.on_trial and not account.left for account in self._accounts.values())

    def next(self) -> int:
        """The way of the step to come: one that is on trial, else the best; a step of all pauses passes."""
        free = [(way, account) for way, account in self._accounts.items() if not account.left]
        for account in self._accounts.values():
            account.left = max(account.left - 1, 0)
        if not free:
            return PLAIN
        return max(free, key=lambda each: (each[1].on_trial, each[1].advantage))[0]

    def book(self, way: int, advantage: float) -> None:
        """A step drafted in that way, at that advantage in tokens."""
        account = self._accounts.setdefault(way, Account())  # one shape may serve drafters of different ways
        account.steps += 1
        account.advantage += max(1 / account.steps, RATE) * (advantage - account.advantage)
        others = (a for a in self._accounts.values() if a is not account and not a.left and not a.on_trial)
        against = max((other.advantage for other in others), default=0.0)
        account.balance = min(account.balance + advantage - max(against, 0.0), CREDIT)
        if account.balance < -ALLOWANCE:
            account.left = account.length
            account.length = min(2 * account.length, PAUSE_LAST)
            account.balance = RETRIAL - ALLOWANCE
        elif account.balance > 0.0:
            account.length = PAUSE_FIRST
