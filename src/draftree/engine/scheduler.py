"""The scheduler: which request has which slot of the KV cache, and which prefixes free slots keep.

Running requests fill the first slots without a gap, so that a pass reads neighbouring slots. Decoding requests come
first, then requests whose prompts are still being read. A free slot may keep the keys and values of its last request.
A new request with the same beginning reuses them and reads only the rest of its prompt.

Keys and values are valid for the weights that computed them, so `check_model` compares the weights when a request
arrives after a pause.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from draftree.drafting.base import Place
from draftree.engine.request import Request
from draftree.errors import ModelChangedError
from draftree.runner import Runner
from draftree.runner.images import placeholder
from draftree.runner.kv.cache import SlotCache
from draftree.runner.kv.encoder import EncoderState
from draftree.runner.positions import is_length_dependent
from draftree.runner.weights.stock import fingerprint, has_hooks

CHEAP_PADDING = 32  # This many rows of padding cost no more than another pass.


@dataclass(frozen=True, slots=True)
class Kept:
    """A prefix in a free slot."""

    tokens: list[int]  # The tokens whose keys and values it holds.
    sharing: tuple[str | None, str | None]  # Of its request: its salt and images; others may not reuse it.
    shift: int  # Of its request.
    left: int  # Number that grows with the time at which the request left.

    def holds(self, other: Kept) -> bool:
        """Return whether it contains the other prefix."""
        return self.sharing == other.sharing and self.tokens[: len(other.tokens)] == other.tokens


class Scheduler:
    """Put requests into slots and take them out.

    Args:
        encoder: cross attention of an encoder-decoder, by slot; None for other models.
        keeps: whether free slots keep prefixes. They never do if keys depend on more than the tokens before them
            (encoder-decoders, prompts read both ways, rotary angles that depend on the length of the text, hooks).
    """

    def __init__(self, runner: Runner, cache: SlotCache, encoder: EncoderState | None, *, keeps: bool) -> None:
        self.runner = runner
        self.cache = cache
        self.encoder = encoder
        self.keeps = keeps and encoder is None and not runner.target.both_ways
        if self.keeps:
            modules = list(runner.target.model.modules())
            self.keeps = not any(map(has_hooks, modules)) and not any(map(is_length_dependent, modules))
        self.running: list[Request] = []  # Request i has slot i.
        self.reading = 0  # This many requests at the end are still reading their prompts.
        self._kept: dict[int, Kept] = {}  # By free slot.
        self._clock = itertools.count()
        self._read_by = runner.fingerprint  # Fingerprint of the weights that read the prompts.

    @property
    def decoding(self) -> int:
        """Return the number of decoding requests, which have the first slots."""
        return len(self.running) - self.reading

    @property
    def kept_tokens(self) -> int:
        """Return the number of tokens in kept prefixes; any thread may call this."""
        return sum(len(kept.tokens) for kept in list(self._kept.values()))

    def unread(self, request: Request) -> list[int]:
        """Return the request's tokens before its newest one that are not in the cache yet."""
        return request.context.tokens[self.cache.lengths[self.running.index(request)] : -1]

    def whole(self, request: Request) -> bool:
        """Return whether a request's prompt is to be read in one piece: none of its images is in the cache."""
        return request.context.images is not None and not self.cache.lengths[self.running.index(request)]

    def enter(self, request: Request) -> None:
        """Give a request a slot, with a reused prefix if there is one."""
        slot = len(self.running)
        request.reused = self._take_over(request, slot) if self.keeps else 0
        self.cache.lengths[slot] = request.reused
        self.running.append(request)
        self.reading += 1
        request.context.place = Place(self.runner, self.cache, self.encoder, slot)

    def shares(self, rows: int, least: int) -> list[int]:
        """Return the number of prompt tokens that each reading request may read now.

        Earlier requests come first. Each gets half of the remaining rows, so that a short prompt behind a long one is
        read as well. Unused rows go to the first request that needs more.
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
        """Move requests whose share completes their prompt in front of the other reading requests.

        Returns:
            The number of requests that complete their prompts, and the shares in the new order.
        """
        shares, front = list(shares), self.decoding
        for slot in range(front, len(self.running)):
            request = self.running[slot]
            if not self.whole(request) and len(self.unread(request)) > shares[slot - self.decoding]:
                continue
            shares.insert(front - self.decoding, shares.pop(slot - self.decoding))
            for other in range(slot, front, -1):
                for store in self._stores:
                    store.exchange(other - 1, other)
                self._change_places(other - 1, other)
            front += 1
        return front - self.decoding, shares

    def begin(self, count: int) -> None:
        """Count the first `count` reading requests as decoding from now on."""
        self.reading -= count

    def leave(self, request: Request) -> None:
        """Free a request's slot. Later requests move up, so that slots have no gap and keep their order."""
        slot = self.running.index(request)
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
            kept = Kept(request.context.tokens[:held], request.sharing, request.context.shift, next(self._clock))
            self._kept = {slot: other for slot, other in self._kept.items() if not kept.holds(other)} | {last: kept}
        for store in self._stores:
            store.clear(last)

    def clear(self) -> None:
        """Free all slots and drop all prefixes."""
        for request in self.running:
            request.context.place = None
        self.running.clear()
        self._kept.clear()
        self.reading = 0
        for store in self._stores:
            for slot in range(store.slots):
                store.clear(slot)

    @property
    def _stores(self) -> list[SlotCache]:
        """Return the stores that hold state by slot."""
        return [self.cache] if self.encoder is None else [self.cache, self.encoder]

    def _fill(self, gap: int, slot: int) -> None:
        """Move the request in `slot` to `gap`, whose request leaves."""
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
        """Bring the longest known prefix of a prompt into the free `slot`, and return its length."""
        prompt, sharing = request.context.tokens[:-1], request.sharing
        held = {
            i: running.context.tokens[: self.cache.lengths[i]]
            for i, running in enumerate(self.running)
            if running.sharing == sharing
        }
        held |= {i: kept.tokens for i, kept in self._kept.items() if kept.sharing == sharing}
        common = {i: self.cache.reusable(i, _common(tokens, prompt)) for i, tokens in held.items()}
        if request.context.images is not None:  # A prompt is read in one piece up to its last image.
            image = placeholder(self.runner.target)
            common = {i: 0 if image in prompt[length:] else length for i, length in common.items()}
        left = {i: kept.left for i, kept in self._kept.items()}
        source = max(common, key=lambda i: (common[i], common[i] == len(held[i]), -left.get(i, -1)), default=slot)
        length = common.get(source, 0)
        if length:
            shared = self._kept[source] if source in self._kept else self.running[source].context
            request.context.shift = shared.shift
        victim = self._victim(slot, source if length else None, common)
        if length and victim == source:  # The two free slots swap.
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
        """Return the free slot whose prefix is dropped for a request that enters `slot` and reuses `source`.

        An empty slot comes first, then the slot left longest ago, unless `source` would lose fewer tokens.
        `common` has the number of tokens that the request shares with each slot.
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
        """Copy the prefix of a free slot to another, which loses its own."""
        kept = self._kept.pop(slot)
        self._kept.pop(other, None)
        self.cache.move(slot, other, len(kept.tokens))
        self.cache.clear(other)
        self._kept[other] = kept

    def check_model(self) -> None:
        """Drop kept prefixes if the weights have changed."""
        self.runner.target.refuse_training()
        weights = fingerprint(self.runner.target.model)
        if weights == self._read_by:
            return
        if self.runner.copies:
            raise ModelChangedError
        self._kept.clear()
        self._read_by = weights


def _common(one: list[int], other: list[int]) -> int:
    """Return the length of the common beginning of two texts."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(i for i in range(most) if one[i] != other[i])


def reading_groups(lengths: list[int], *, alone: bool = False) -> list[tuple[int, int]]:
    """Return (begin, end) of neighbours to read in one pass; each alone if `alone`.

    A pass pads its prompts to the longest, which is cheap for few rows or similar lengths.
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
