"""Which request lives in which slot of the cache, and what free slots still hold for requests to come.

Running requests fill the first slots without a gap, so that a pass reads them in one piece: first those that decode,
then those whose prompts are still being read. The slots behind them are free. A free slot may keep the keys and values
of the request that left it: one to come whose prompt begins alike takes them over and reads only the rest.

Keys and values hold for the weights that computed them, so `check_model` compares the model when the first request
comes after a pause.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from draftree.drafting.base import Place
from draftree.engine.request import Request
from draftree.errors import ModelChangedError
from draftree.runner import Runner
from draftree.runner.kv.cache import SlotCache
from draftree.runner.kv.encoder import EncoderState
from draftree.runner.positions import is_length_dependent
from draftree.runner.weights.fingerprint import fingerprint
from draftree.runner.weights.stock import has_hooks

CHEAP_PADDING = 32  # rows of padding that cost no more than a pass of their own would


@dataclass(frozen=True, slots=True)
class Kept:
    """What a free slot holds."""

    tokens: list[int]  # whose keys and values
    cache_salt: str | None  # of the request that left them; one of another cache_salt may not take them over
    left: int  # when, as a number that grows


class Scheduler:
    """Puts requests into slots and takes them out.

    Args:
        runner: of the engine.
        cache: keys and values, by slot.
        encoder: cross attention of an encoder-decoder, by slot; None for other models.
        keeps: whether free slots keep what they hold. Where keys depend on more than the tokens before them
            (encoder-decoders, rotary angles that depend on the text's length, hooks) they never do.

    Attributes:
        mixed: whether an error or Ctrl-C left requests half way between two slots, so that all of them must end.
    """

    def __init__(self, runner: Runner, cache: SlotCache, encoder: EncoderState | None, *, keeps: bool) -> None:
        self.runner = runner
        self.cache = cache
        self.encoder = encoder
        self.keeps = keeps and encoder is None
        if self.keeps:
            modules = list(runner.target.model.modules())
            self.keeps = not any(map(has_hooks, modules)) and not any(map(is_length_dependent, modules))
        self.running: list[Request] = []  # request i lives in slot i
        self.reading = 0  # the last so many of them have prompt tokens that are not in the cache yet
        self._kept: dict[int, Kept] = {}  # by free slot
        self._clock = itertools.count()
        self._read_by = runner.fingerprint  # by which weights prompts were read
        self.mixed = False

    @property
    def decoding(self) -> int:
        """How many requests decode; they live in the first slots."""
        return len(self.running) - self.reading

    @property
    def kept_tokens(self) -> int:
        """Tokens that free slots keep for requests to come; any thread may ask."""
        return sum(len(kept.tokens) for kept in list(self._kept.values()))

    def unread(self, request: Request) -> list[int]:
        """The request's tokens before its newest one that are not in the cache yet."""
        return request.context.tokens[self.cache.lengths[self.running.index(request)] : -1]

    def enter(self, request: Request) -> None:
        """Give a request a slot, with what is known already of its prompt in it."""
        slot = len(self.running)
        request.reused = self._take_over(request, slot) if self.keeps else 0
        self.cache.lengths[slot] = request.reused
        self.running.append(request)
        self.reading += 1
        request.context.place = Place(self.runner, self.cache, self.encoder, slot)

    def shares(self, rows: int, least: int) -> list[int]:
        """How many prompt tokens each of those that read may read now, `rows` in all or a few more.

        Whoever came first goes first, with half of what is left, so that a short prompt behind a long one is read as
        well; what nobody needs goes to the first that needs more.

        Args:
            rows: to share out.
            least: a share is no smaller while rows are left.
        """
        found, left = [], rows
        needs = [len(self.unread(request)) for request in self.running[self.decoding :]]
        for need in needs:
            share = min(need, max(left // 2, least)) if left > 0 else 0
            found.append(share)
            left -= share
        first = next((i for i, need in enumerate(needs) if found[i] < need), None)
        if first is not None and left > 0:
            found[first] = min(needs[first], found[first] + left)
        return found

    def order(self, shares: list[int]) -> tuple[int, list[int]]:
        """Bring those whose share is all that they have unread in front of the others that read.

        Args:
            shares: tokens that each of those that read may read now, in the order of their slots.

        Returns:
            how many have all that they need, and the shares in the new order.
        """
        shares, front = list(shares), self.decoding
        for slot in range(front, len(self.running)):
            if len(self.unread(self.running[slot])) > shares[slot - self.decoding]:
                continue
            shares.insert(front - self.decoding, shares.pop(slot - self.decoding))
            with self._moving():
                for other in range(slot, front, -1):
                    for store in self._stores:
                        store.exchange(other - 1, other)
                    self._change_places(other - 1, other)
            front += 1
        return front - self.decoding, shares

    def begin(self, count: int) -> None:
        """The first `count` of those that read have read their prompts, and decode from now on."""
        self.reading -= count

    def leave(self, request: Request) -> None:
        """Free a request's slot. Others move up behind it, so that they stay in one piece and in order."""
        slot = self.running.index(request)
        with self._moving():
            self._leave(request, slot)

    @property
    def _stores(self) -> list[SlotCache]:
        """What is held of the requests, by slot."""
        return [self.cache] if self.encoder is None else [self.cache, self.encoder]

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """A context in which requests change their slots; where it is left half way, theirs are `mixed`."""
        try:
            yield
        except BaseException:
            self.mixed = True
            raise

    def give_up(self) -> None:
        """Free all slots, and keep nothing."""
        for request in self.running:
            request.context.place = None
        self.running.clear()
        self._kept.clear()
        self.reading, self.mixed = 0, False
        for store in self._stores:
            for slot in range(store.slots):
                store.clear(slot)

    def _leave(self, request: Request, slot: int) -> None:
        last = len(self.running) - 1
        if slot < self.decoding:
            end = self.decoding - 1
            if slot != end:
                self._fill(slot, end)
            slot = end
        else:
            self.reading -= 1
        for behind in range(slot, last):
            self._fill(behind, behind + 1)
        self.running.pop()
        request.context.place = None
        held = self.cache.lengths[last]
        if self.keeps and held:
            kept = Kept(request.context.tokens[:held], request.params.cache_salt, next(self._clock))
            for other in [other for other, shorter in self._kept.items() if _holds(kept, shorter)]:
                del self._kept[other]
            self._kept[last] = kept
        for store in self._stores:
            store.clear(last)

    def _fill(self, gap: int, slot: int) -> None:
        """Move the request in `slot` to `gap`, whose request is on its way out."""
        for store in self._stores:
            if self.keeps:
                store.exchange(gap, slot)
            else:
                store.move(slot, gap)
        self._change_places(gap, slot)

    def _change_places(self, one: int, other: int) -> None:
        self.running[one], self.running[other] = self.running[other], self.running[one]
        for slot in (one, other):
            self.running[slot].context.place = Place(self.runner, self.cache, self.encoder, slot)

    def _take_over(self, request: Request, slot: int) -> int:
        """Bring what is known of a prompt into the free `slot`; return how many tokens that is."""
        prompt, cache_salt = request.context.tokens[:-1], request.params.cache_salt
        held = {
            i: running.context.tokens[: self.cache.lengths[i]]
            for i, running in enumerate(self.running)
            if running.params.cache_salt == cache_salt
        }
        held |= {i: kept.tokens for i, kept in self._kept.items() if kept.cache_salt == cache_salt}
        common = {i: _common(tokens, prompt) for i, tokens in held.items()}
        left = {i: kept.left for i, kept in self._kept.items()}
        source = max(common, key=lambda i: (common[i], common[i] == len(held[i]), -left.get(i, -1)), default=slot)
        length = common.get(source, 0)
        victim = self._victim(slot, source if length else None, common)
        if length and victim == source:  # it moves in, and what was here moves out
            self._kept.pop(source)
            self._swap_free(slot, source, length)
            return length
        if victim != slot and slot in self._kept:
            self._keep_in(victim, slot)
        self._kept.pop(slot, None)
        if length and source != slot:
            self.cache.move(source, slot, length)
        return length

    def _victim(self, slot: int, source: int | None, common: dict[int, int]) -> int:
        """Which free slot gives up what it keeps for a request that comes into `slot` and reuses `source`.

        An empty one if there is one, else that which was left longest ago, unless `source` would lose fewer tokens.
        `common` says with how many tokens of each slot the request begins.
        """

        def lost(i: int) -> int:
            return len(self._kept[i].tokens) - common.get(i, 0) if i in self._kept else 0

        oldest = min(range(slot, self.cache.slots), key=lambda i: self._kept[i].left if i in self._kept else -1)
        return source if source is not None and source in self._kept and lost(source) <= lost(oldest) else oldest

    def _swap_free(self, slot: int, source: int, length: int) -> None:
        if slot == source:
            return
        kept = self._kept.pop(slot, None)
        self.cache.lengths[source], self.cache.lengths[slot] = length, 0 if kept is None else len(kept.tokens)
        self.cache.exchange(slot, source)
        self.cache.clear(source)
        if kept is not None:
            self._kept[source] = kept

    def _keep_in(self, other: int, slot: int) -> None:
        """Copy what a free slot keeps to another, whose own is gone then."""
        kept = self._kept.pop(slot)
        self._kept.pop(other, None)
        self.cache.move(slot, other, len(kept.tokens))
        self.cache.clear(other)
        self._kept[other] = kept

    def check_model(self) -> None:
        """Refuse to answer as a model that has changed, and keep nothing that older weights computed.

        Raises:
            ModelChangedError: it has changed, and the runner holds copies of its weights.
            ValueError: it was put into a training mode in which no two passes agree.
        """
        self.runner.target.refuse_training()
        weights = fingerprint(self.runner.target.model)
        if weights == self._read_by:
            return
        if self.runner.copies:
            raise ModelChangedError
        self._kept.clear()
        self._read_by = weights


def _holds(kept: Kept, other: Kept) -> bool:
    """Whether all that the other could be of use for is kept here too."""
    return kept.cache_salt == other.cache_salt and kept.tokens[: len(other.tokens)] == other.tokens


def _common(one: list[int], other: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(i for i in range(most) if one[i] != other[i])


def reading_groups(lengths: list[int], *, alone: bool = False) -> list[tuple[int, int]]:
    """Neighbours to read in one pass: (begin, end) of each group; every one for itself if `alone`.

    A pass pads all its rows to the longest. That is cheap where the rows are few, and else where lengths are alike.
    """
    if alone:
        return [(i, i + 1) for i in range(len(lengths))]
    groups: list[tuple[int, int]] = []
    for end in range(1, len(lengths) + 1):
        begin = groups[-1][0] if groups else 0
        known = lengths[begin:end]
        if groups and max(known) * len(known) - sum(known) <= max(CHEAP_PADDING, sum(known) // 4):
            groups[-1] = (begin, end)
        else:
            groups.append((end - 1, end))
    return groups
