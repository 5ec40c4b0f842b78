"""Whether a drafter is asked at all, request by request: it rests where its guesses have not paid of late.

Asking costs, even where the tree that comes of it is the root alone. So every request keeps a balance of its last
steps: tokens that came against time spent, the drafter's own work included, both in units of a plain step. Where it
stays negative the drafter rests for a while, longer each time, and is tried again. Texts differ, and what one of them
earns must not pay for another's fruitless guesses; but a new request begins with what all have earned of late, in the
middle of a rest where they rest, since it is too short to find out everything again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from draftree.drafting.base import Context

FRUITLESS = 2  # steps in a row with a negative balance after which the drafter rests
REST_FIRST, REST_LAST = 8, 48  # steps of rest: of the first, which doubles, and of one that is long enough for a trial
REST_ASKED = 96  # the longest, where a drafter has only to be asked: what is copied comes in bursts
REST_PREPARED = 256  # the longest, where guesses have to be prepared by a pass with rows
BALANCE = 0.85  # weight of the past in the balance
COURSES = 0.95  # the same at each step of a course
LEAST = 0.01  # of the time spent, what has to be gained: an old success fades, but never quite
HOPELESS = 0.9  # tokens for the time of a plain step under which a right guess changes nothing
LUCK = 0.3  # part of what a step brought, against what it was expected to, that counts
DOUBT = 0.5  # tokens by which luck moves a single step: a balance may be short by that times the root of its steps
START = 0.3  # weight of what all have earned, when a request begins


@dataclass(slots=True)
class _Account:
    """The balance of one request, or of all.

    Attributes:
        hoped, spent: tokens and plain steps, the past fading; of a step that is not over, tokens hoped for.
        fruitless: steps in a row with a negative balance.
        rest: steps still to go without asking the drafter.
        next_rest: how long the next rest will be.
        weight: of the steps in the balance.
        long: whether the rest of late was as long as to be followed by a trial, whatever is expected of it.
    """

    hoped: float = 0.0
    spent: float = 0.0
    fruitless: int = 0
    rest: int = 0
    next_rest: int = REST_FIRST
    weight: float = 0.0
    long: bool = False

    @property
    def losing(self) -> bool:
        return self.hoped <= (1 + LEAST) * self.spent

    def settle(self, gain: float, spent: float, steps: int, longest: int) -> None:
        past = COURSES**steps
        weight = (1 - past) / (1 - COURSES)
        self.hoped = past * self.hoped + weight * gain
        self.spent = past * self.spent + weight * spent
        self.weight = past * self.weight + weight
        if not self.losing:
            self.next_rest = REST_FIRST
        elif self.hoped < self.spent - DOUBT * self.weight**0.5:
            self.go_to_rest(longest)

    def go_to_rest(self, longest: int) -> None:
        self.rest, self.long = self.next_rest, self.next_rest >= REST_LAST
        self.next_rest = min(2 * self.next_rest, longest)

    def book(self, gain: float, spent: float, longest: int, *, known: bool) -> None:
        self.hoped = BALANCE * self.hoped + gain
        self.spent = BALANCE * self.spent + spent
        self.weight = BALANCE * self.weight + 1.0
        if not self.losing:
            self.fruitless, self.next_rest = 0, REST_FIRST
            return
        self.fruitless += 1
        if self.fruitless >= FRUITLESS:
            self.rest = self.next_rest if known else REST_FIRST
            self.next_rest = min(2 * self.next_rest, longest) if known else self.next_rest
            self.fruitless = FRUITLESS - 1  # one more fruitless step is enough to rest again


class Governor:
    """Decides for each request whether the drafter is asked.

    Attributes:
        longest: most steps of a rest.
    """

    def __init__(self) -> None:
        self.longest = REST_LAST
        self._steps = 0
        self._batch = 1  # requests of the last step
        self._all = _Account()
        self._of: dict[int, _Account] = {}

    def open(self, requests: Sequence[Context]) -> list[bool]:
        """A step begins: which requests' drafters are asked. Says in `Context.resting` who will not be asked next."""
        asked = []
        self._steps += 1
        self._batch = len(requests)
        self._all.rest = max(self._all.rest - 1, 0)
        for request in requests:
            account = self._of.get(request.id)
            if account is None:
                account = self._of[request.id] = self._begin()
            asked.append(account.rest == 0)
            account.rest = max(account.rest - 1, 0)
            request.resting = account.rest > 0
        return asked

    def knows(self, ids: Iterable[int]) -> bool:
        """Whether any of these requests was seen before."""
        return any(number in self._of for number in ids)

    def quiet(self, requests: Sequence[Context], *, ahead: int) -> int:
        """In how many steps, from the coming one on, all rest, and in the `ahead` steps behind each of them too."""
        accounts = [self._of.get(request.id) for request in requests]
        return max(min(0 if account is None else account.rest - ahead for account in accounts), 0)

    def awake(self, requests: Sequence[Context], *, ahead: int, hopeful: Callable[[], bool]) -> list[bool]:
        """Which requests' rests are over, or will be in `ahead` steps.

        Args:
            requests: of the coming step.
            ahead: how soon.
            hopeful: whether requests that have just come are to be drafted for, although the others rest.
        """
        awake = []
        self._batch = len(requests)
        for request in requests:
            account = self._of.get(request.id)
            if account is None:
                account = self._of[request.id] = self._begin()
                if account.rest and hopeful():
                    account.rest = 0
            awake.append(account.rest <= ahead)
            request.resting = not awake[-1]
        return awake

    def declines(self, requests: Sequence[Context], takes: Sequence[bool]) -> bool:
        """Guesses promise little: the requests that they are for rest on, unless they have just done so for long."""
        held = [request for request, part in zip(requests, takes, strict=True) if part]
        accounts = [self._of[request.id] for request in held]
        if 2 * len(accounts) >= len(requests) and any(account.long for account in accounts):  # few earn too little
            for account in (self._all, *accounts):
                account.long = False
            return False
        self._all.go_to_rest(self.longest)
        for request, account in zip(held, accounts, strict=True):
            account.go_to_rest(self.longest)
            self._align(request, account)
        return True

    def pause(self, requests: Sequence[Context], steps: int) -> None:
        """All rest for so many steps, whatever their balance."""
        for request in requests:
            account = self._of.setdefault(request.id, _Account())
            account.rest = max(account.rest, steps)
            request.resting = True

    def elapse(self, ids: Iterable[int], steps: int = 1) -> None:
        """Steps passed in which none of these requests was asked anew: rests are over sooner."""
        self._steps += steps
        for account in (self._all, *map(self._of.get, ids)):
            if account is not None:
                account.rest = max(account.rest - steps, 0)

    def _begin(self) -> _Account:
        start = self._all
        return replace(start, hoped=START * start.hoped, spent=START * start.spent, weight=START * start.weight)

    def book(self, request: Context, gain: float, spent: float, *, known: bool = True) -> None:
        """A step of `request` brings `gain` tokens for the time of `spent` plain steps; its drafter may rest by that.

        Where the drafter had no guess at all (not `known`), that says little about those that it will have.
        """
        account = self._of.setdefault(request.id, _Account())
        account.book(gain, spent, self.longest, known=known)
        self._all.book(gain, spent, self.longest, known=known)
        self._align(request, account)

    def settle(self, request: Context, gain: float, spent: float, steps: int) -> None:
        """Steps of `request` brought `gain` tokens each for the time of `spent` plain ones: it may rest by that."""
        account = self._of.setdefault(request.id, _Account())
        account.settle(gain, spent, steps, self.longest)
        self._all.settle(gain, spent, steps, self.longest)
        self._align(request, account)

    def _align(self, request: Context, account: _Account) -> None:
        """The rests of a batch end together, at multiples of (nearly) their length: one costs nearly as much as all."""
        if self._batch > 1 and account.rest:
            account.rest += -(self._steps + account.rest) % (1 << account.rest.bit_length() - 1)
        request.resting = account.rest > 0

    def correct(self, request: Context, more: float) -> None:
        """The step booked last brought `more` tokens than it was booked with (or fewer, below 0).

        What a single step brings is mostly chance; were it booked whole, drafters would rest for bad luck.
        """
        for account in (self._of.get(request.id), self._all):
            if account is not None:
                account.hoped += LUCK * more

    @property
    def pace(self) -> float:
        """Tokens for the time of a plain step, of late and over all requests; at least 1, as plain steps bring that."""
        return max(self._all.hoped / self._all.spent, 1.0) if self._all.spent else 1.0

    @property
    def losing(self) -> bool:
        """Whether drafting has not paid of late, over all requests."""
        return self._all.losing

    def right(self, ids: Iterable[int]) -> None:
        """A guess for these requests came true, whether or not it was worth a row: the drafter has something to say.

        Not where asking costs so much, as in large batches, that a guess more or less does not make up for it.
        """
        for number in ids:
            for account in (self._of.get(number), self._all):
                if account is not None and account.hoped >= HOPELESS * account.spent:
                    account.fruitless, account.rest = min(account.fruitless, FRUITLESS - 2), 0
                    account.next_rest = REST_FIRST

    def end(self, request: Context) -> None:
        """The request is over."""
        self._of.pop(request.id, None)
