"""The KV cache: preallocated keys and values, written in place, one slot a request, lengths ragged.

Layout of a slot in every layer, along the sequence axis: [deep prefix | committed context | rows of this
pass]. A pass writes its rows behind the context; `commit` keeps the accepted ones. Layers before a pruning hold
other rows than layers after it, so a commit maps row numbers through each layer's segment. Window limits are
a matter of token positions in the mask, so sliding layers keep full length (a trimmed cache is silently wrong for
trees).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from draftree.runner.plan import Segment

BLOCK = 256  # KV positions; growing by blocks keeps reallocations rare and memory close to what is used
MOST_WASTE = 4  # times the capacity needed, which the stores of an earlier cache may have


def finite(states: Tensor) -> Tensor:
    """Return keys or values with 0 in place of infinities and NaN.

    Rows that must not see a KV position give it the weight 0, and 0 times infinity is NaN: a draft token on which the
    model overflows would change its neighbours, and a finished request the next one in its slot.
    """
    return torch.nan_to_num(states, nan=0.0, posinf=0.0, neginf=0.0)


class Stores(NamedTuple):
    """The memory of a cache, in lists that the cache changes."""

    keys: list[Tensor | None]  # by layer, [slots, heads, capacity, width]; None before a first pass
    values: list[Tensor | None]  # likewise
    recordings: OrderedDict[Any, Any]  # recorded passes that read this memory, the one used last at the end


def rows_within(segment: Segment, rows: list[list[int]]) -> list[list[int]]:
    """Return where a segment has the rows with these numbers, for each request."""
    if segment.rows is None:
        return rows
    wheres = ({row: i for i, row in enumerate(of_one)} for of_one in segment.rows.tolist())
    return [[where[row] for row in of_one] for where, of_one in zip(wheres, rows, strict=False)]


@dataclass(slots=True)
class OpenPass:
    """The slots of the running pass."""

    first: int  # its first slot
    count: int  # how many slots
    hidden: int = 0  # KV positions of the deep prefix that it leaves out
    # By number of rows, the slot and the KV position of each, where slots begin at different positions.
    places: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def slots(self) -> slice:
        """Its slots."""
        return slice(self.first, self.first + self.count)


class SlotCache(Cache):
    """Keys and values of `slots` requests for every layer; accepted by any Hugging Face `forward`.

    Args:
        capacity: KV positions to allocate at first use (grows by blocks when needed).
        prefix: per-layer (keys, values), each [kv heads, P, head dim], the deep prefix; None for none.

    Attributes:
        keys, values, recordings: see `Stores`.
        lengths: tokens of each slot's context.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        capacity: int = BLOCK,
        prefix: list[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        # Hugging Face's Cache.__init__ wants layer objects; models only call the methods overridden below.
        self.layers: list[Any] = []
        self.layer_class_to_replicate = None
        self.offloading = False
        self.slots = slots
        self.prefix = prefix
        self.prefix_length = prefix[0][0].shape[1] if prefix else 0
        self.capacity = self._round(self.prefix_length + capacity)
        self.lengths = [0] * slots
        self._pass = OpenPass(0, 1)
        self.keys, self.values, self.recordings = Stores([None] * layers, [None] * layers, OrderedDict())

    @staticmethod
    def _round(positions: int) -> int:
        return -(-positions // BLOCK) * BLOCK

    @property
    def all_stores(self) -> Stores:
        """The memory of the cache."""
        return Stores(self.keys, self.values, self.recordings)

    def _held(self, start: int = 0, stop: int | None = None) -> list[Tensor]:
        """Return the keys and values of layers [start, stop) that there are."""
        stores = *self.keys[start:stop], *self.values[start:stop]
        return [store for store in stores if store is not None]

    # ---------------------------------------------------------------- a pass

    def open(self, first: int, count: int, rows: int, *, bare: bool = False) -> None:
        """Point the next pass at slots [first, first + count) and have KV positions for `rows` more rows.

        With `bare` the views of the pass begin behind the deep prefix, which none of its rows sees.
        """
        self._pass = OpenPass(first, count, self.prefix_length if bare else 0)
        need = self.prefix_length + max(self.lengths[first : first + count]) + rows
        if need > self.capacity:
            self._resize(self.slots, self._round(max(need, self.capacity + self.capacity // 2)))

    # Tensors born in inference mode could not be written outside it, and passes may run either way.
    @torch.inference_mode(False)
    def _resize(self, slots: int, capacity: int) -> None:
        """Have so many slots of so many KV positions; further slots are empty."""

        def larger(old: Tensor) -> Tensor:
            new = old.new_zeros(slots, old.shape[1], capacity, old.shape[3])
            # All of it: free slots may keep prefixes, and rows of an open pass lie behind the lengths.
            new[: len(old), :, : old.shape[2]] = old
            new[len(old) :, :, : self.prefix_length] = old[:1, :, : self.prefix_length]
            return new

        self._replace(larger)
        self.lengths += [0] * (slots - self.slots)
        self.slots, self.capacity = slots, capacity

    def _replace(self, make: Callable[[Tensor], Tensor]) -> None:
        """Replace all stores, or none where memory runs out."""
        self.recordings.clear()  # they hold the old ones
        made = [[None if old is None else make(old) for old in store] for store in (self.keys, self.values)]
        self.keys[:], self.values[:] = made

    @torch.inference_mode(False)
    def _allocate(self, layer: int, heads: int, widths: tuple[int, int], like: Tensor) -> None:
        self.recordings.clear()
        for which, store in enumerate((self.keys, self.values)):
            new = like.new_zeros(self.slots, heads, self.capacity, widths[which])
            if self.prefix is not None:
                new[:, :, : self.prefix_length] = finite(self.prefix[layer][which].to(new))
            store[layer] = new

    def take_over(self, stores: Stores) -> None:
        """Use the stores of an earlier cache, if they fit. Their contents lie behind all contexts and are not seen."""
        some = stores.keys[0]
        assert some is not None
        slots, _, capacity, _ = some.shape
        if self.prefix is None and slots == self.slots and self.capacity <= capacity <= MOST_WASTE * self.capacity:
            (self.keys, self.values, self.recordings), self.capacity = stores, capacity

    @property
    def shown_prefix(self) -> int:
        """KV positions of the deep prefix in the views of the current pass."""
        return self.prefix_length - self._pass.hidden

    @property
    def first(self) -> int:
        """First slot of the current pass."""
        return self._pass.first

    @property
    def starts(self) -> list[int]:
        """KV position at which the rows of the current pass begin, per request."""
        return [self.prefix_length + n for n in self.lengths[self._pass.slots]]

    def stores(self, layer: int, heads: int, widths: tuple[int, int], like: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all slots, each [slots, heads, capacity, its width], to be written in place.

        They have the type of `like` in the first pass.
        """
        if self.keys[layer] is None:
            self._allocate(layer, heads, widths, like)
        return self._layer(layer)

    def _layer(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer], self.values[layer]
        assert keys is not None
        assert values is not None
        return keys, values

    def views(self, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the pass [count, heads, K, dim], K up to the longest end of its `rows` rows."""
        (keys, values), slots, begin = self._layer(layer), self._pass.slots, self._pass.hidden
        end = self.prefix_length + max(self.lengths[slots]) + rows
        return keys[slots, :, begin:end], values[slots, :, begin:end]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write rows [count, heads, n, dim] behind each slot's context; return views up to the longest end."""
        _, heads, rows, width = key_states.shape
        key_states, value_states = finite(key_states), finite(value_states)
        keys, values = self.stores(layer_idx, heads, (width, value_states.shape[3]), key_states)
        begin, slots = self.starts[0], self._pass.slots
        if max(self.starts) == min(self.starts):
            keys[slots, :, begin : begin + rows] = key_states
            values[slots, :, begin : begin + rows] = value_states
        else:
            slot, place = self._ragged_places(rows, keys.device)
            # Trainers run passes under autocast, where values may have another type than keys.
            keys[slot, :, place] = key_states.transpose(1, 2).to(keys.dtype)
            values[slot, :, place] = value_states.transpose(1, 2).to(values.dtype)
        return self.views(layer_idx, rows)

    def _ragged_places(self, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        known = self._pass.places.get(rows)
        if known is None:
            slots = self._pass.slots
            starts = torch.tensor(self.starts, dtype=torch.long, device=device)[:, None]
            place = starts + torch.arange(rows, device=device)
            slot = torch.arange(slots.start, slots.stop, device=device)[:, None].expand_as(place)
            known = self._pass.places[rows] = (slot, place)
        return known

    # Models ask these for shapes and for positions of their own; the positions are replaced, the shapes must
    # agree.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the KV positions before the rows of the pass in its longest slot, with the prefix that it sees."""
        return self.shown_prefix + max(self.lengths[self._pass.slots])

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the KV position at which the rows of the current pass start."""
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Return (key length, key offset) of the current pass."""
        rows = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + rows, 0

    # ---------------------------------------------------------------- after a pass

    def commit(self, rows: list[list[int]], segments: list[Segment]) -> None:
        """Keep, per request of the current pass, the original rows `rows[b]`, in this order, as context.

        Every layer takes them from where its segment holds them. Rows already in place are not moved.
        """
        first, count = self._pass.first, self._pass.count
        starts = [s.start for s in segments] + [len(self.keys)]
        for segment, start, stop in zip(segments, starts, starts[1:], strict=False):
            self._move(start, stop, first, rows_within(segment, rows))
        for b in range(count):
            self.lengths[first + b] += len(rows[b])

    def _move(self, start: int, stop: int, first: int, rows: Sequence[Sequence[int]]) -> None:
        """Move the given rows behind each context, from slot `first` on, to its end in layers [start, stop)."""
        for slot, local in enumerate(rows, first):
            done = next((i for i, row in enumerate(local) if row != i), len(local))  # rows already in place
            if done == len(local):
                continue
            begin = self.prefix_length + self.lengths[slot]
            sources = torch.tensor([begin + row for row in local[done:]], dtype=torch.long, device="cpu")
            for held in self._held(start, stop):
                sources = sources.to(held.device)
                of_slot = held[slot]
                of_slot.narrow(1, begin + done, len(sources)).copy_(of_slot.index_select(1, sources))

    def keep(self, slot: int, length: int, tail: list[int]) -> None:
        """Shorten a slot's context to its first `length` tokens and some of those behind them.

        `tail` has the ascending numbers of the latter, from 0 for the first behind `length`.
        """
        self.lengths[slot] = length
        self._move(0, len(self.keys), slot, [tail])
        self.lengths[slot] += len(tail)

    def widen(self, slots: int) -> None:
        """Have more slots, and keep the contents of the present ones."""
        self._resize(slots, self.capacity)

    def move(self, source: int, target: int, length: int | None = None) -> None:
        """Copy the first `length` tokens of slot `source`, by default all of its context, over slot `target`."""
        length = self.lengths[source] if length is None else length
        end = self.prefix_length + length
        for held in self._held():
            held[target, :, :end] = held[source, :, :end]
        self.lengths[target] = length

    def exchange(self, one: int, other: int) -> None:
        """Exchange the contents of two slots."""
        end = self.prefix_length + max(self.lengths[one], self.lengths[other])
        for held in (store[:, :, :end] for store in self._held()):
            kept = held[one].clone()
            held[one] = held[other]
            held[other] = kept
        self.lengths[one], self.lengths[other] = self.lengths[other], self.lengths[one]

    def reusable(self, slot: int, common: int) -> int:
        """Return how many of a slot's first `common` tokens another text may begin with."""
        return common

    def clear(self, slot: int) -> None:
        """Forget a slot's context."""
        self.lengths[slot] = 0

    @property
    def nbytes(self) -> int:
        """Bytes held by keys and values."""
        return sum(held.numel() * held.element_size() for held in self._held())


class GradientCache(SlotCache):
    """The cache of a training pass: deep prefix, context and rows as one differentiable tensor, with nothing kept.

    Training runs the plans of inference through the same runner; only the cache differs.

    Args:
        prefix: per-layer (keys, values) that rows may see, each [kv heads, P, head dim], or [B, ..] where they differ
            by sequence; None for none.
        context: the KV positions that the rows see before them, as many in every slot, without gradients; None for
            whole sequences.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        prefix: Sequence[tuple[Tensor, Tensor]] | None = None,
        context: SlotCache | None = None,
    ) -> None:
        super().__init__(layers, batch)
        self.prefix = list(prefix) if prefix else None
        self.prefix_length = self.prefix[0][0].shape[-2] if self.prefix else 0
        self.context = context
        if context is not None:
            self.lengths = list(context.lengths)

    def open(self, first: int, count: int, rows: int, *, bare: bool = False) -> None:
        """See `SlotCache.open`; nothing is allocated, and the prefix is always shown."""
        self._pass = OpenPass(first, count)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return rows [B, heads, n, dim] behind the deep prefix and a context of C: [B, heads, P + C + n, dim]."""
        fronts = [] if self.prefix is None else [self.prefix[layer_idx]]
        if self.context is not None:
            fronts.append(self.context.views(layer_idx, 0))
        if not fronts:
            return key_states, value_states
        keys, values = zip(*fronts, strict=True)
        return self._join(keys, key_states), self._join(values, value_states)

    def _join(self, fronts: Sequence[Tensor], rows: Tensor) -> Tensor:
        own = self._pass.slots
        parts = [(f[own] if f.dim() == 4 else f).to(rows).expand(rows.shape[0], -1, -1, -1) for f in fronts]
        return torch.cat([*parts, rows], 2)
