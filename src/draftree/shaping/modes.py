"""Whether a request drafts at all, and how: by what drafting brought it of late.

A step is plain, or it drafts; a drafter inside the model drafts from what the pass before has prepared, others need no
preparing, and a merge of both can do either. Each way of drafting has an account of its advantage: accepted tokens that
are expected of its steps, less the time that these take longer, in plain tokens. A way that loses against plain steps,
or against the other way, pauses for eight steps; each further time it is found to lose, for twice as many.
"""

from __future__ import annotations

from collections.abc import Sequence

PLAIN, UNPREPARED, PREPARED = 0, 1, 2
TRIAL = 3  # steps after which a way is judged
RATE = 0.1  # weight of a step in a settled account
PAUSE_FIRST, PAUSE_LAST = 8, 64  # steps


class Account:
    """The advantage of one way of drafting, and its pauses."""

    def __init__(self) -> None:
        self.advantage = 0.0
        self.steps = 0  # since the last pause
        self.left = 0  # steps of the pause to come
        self.length = PAUSE_FIRST  # of the next pause

    @property
    def judged(self) -> bool:
        """Whether enough is known of it."""
        return self.steps >= TRIAL

    def heir(self) -> Account:
        """What a new request begins with: the same advantage and no pause, to be judged after a single step."""
        account = Account()
        account.advantage, account.length = self.advantage, self.length
        account.steps = TRIAL - 1 if self.steps or self.length > PAUSE_FIRST else 0
        return account


class Modes:
    """The ways of drafting of one request, or of all together.

    Args:
        ways: that the drafter has, of UNPREPARED and PREPARED.
        before: accounts to begin with; None for a drafter that nothing is known of.
    """

    def __init__(self, ways: Sequence[int], before: Modes | None = None) -> None:
        self._accounts: dict[int, Account] = {
            way: Account() if before is None else before._accounts[way].heir() for way in ways
        }

    def next(self) -> int:
        """The way of the step to come: one that is to be judged, else the best; a step of all pauses passes."""
        free = [(way, account) for way, account in self._accounts.items() if account.left == 0]
        for account in self._accounts.values():
            account.left = max(account.left - 1, 0)
        if not free:
            return PLAIN
        return max(free, key=lambda each: (not each[1].judged, each[1].advantage))[0]

    def book(self, way: int, advantage: float, *, step: int) -> None:
        """A step drafted in that way, at that advantage; number `step` of all, by which pauses are aligned."""
        account = self._accounts[way]
        account.steps += 1
        account.advantage += max(1 / account.steps, RATE) * (advantage - account.advantage)
        if not account.judged:
            return
        others = [other.advantage for name, other in self._accounts.items() if name != way and other.steps]
        if account.advantage < max([0.0, *others]):
            # The pauses of a batch end together: a pass with rows for one request costs nearly what it costs for all.
            end = step + account.length
            account.left = account.length + -end % PAUSE_FIRST
            account.length = min(2 * account.length, PAUSE_LAST)
            account.steps = 0
        else:
            account.length = PAUSE_FIRST
