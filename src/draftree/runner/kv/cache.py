"""The slot cache: preallocated keys and values, written in place, one slot a request, lengths ragged.

Layout of a slot in every layer, along the sequence axis: [deep prefix | committed context | rows of this
pass]. A pass writes its rows behind the context; `commit` keeps the accepted ones. Layers before a pruning hold
other rows than layers after it, so a commit maps row numbers through each layer's segment. Window limits are
a matter of positions in the mask, so sliding layers keep full length (a trimmed cache is silently wrong for
trees).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from draftree.runner.kv.room import with_room
from draftree.runner.plan import Segment

BLOCK = 256  # columns; growing by blocks keeps reallocations rare and memory close to what is used


def finite(states: Tensor) -> Tensor:
    """Keys or values with 0 for infinities and for what is no number.

    Rows that must not see a column give it the weight 0, and 0 times those would be no number: a draft token on which
    the model overflows would change its neighbours, and what is left of one request the next one in its slot.
    """
    return torch.nan_to_num(states, nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(slots=True)
class OpenPass:
    """What the present pass reads and writes of a cache.

    Attributes:
        first: its first slot.
        count: how many slots.
        hidden: columns of the deep prefix that it leaves out.
        columns: by number of rows, the slot and the column of each, where slots begin at different columns.
    """

    first: int
    count: int
    hidden: int = 0
    columns: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def slots(self) -> slice:
        """Its slots."""
        return slice(self.first, self.first + self.count)


class SlotCache(Cache):
    """Keys/values of `slots` requests for every layer; accepted by any Hugging Face `forward`.

    Args:
        layers: number of decoder layers.
        slots: number of requests held at once.
        capacity: columns to allocate at first use (grows by blocks when needed).
        prefix: per-layer (keys, values), each [kv heads, P, head dim], the deep prefix; None for none.
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
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers
        self._pass = OpenPass(0, 1)
        self.notes: dict[Any, Any] = {}  # what runners know of where the stores lie; forgotten when they are laid anew

    @staticmethod
    def _round(columns: int) -> int:
        return -(-columns // BLOCK) * BLOCK

    # ---------------------------------------------------------------- a pass

    def open(self, first: int, count: int, rows: int, *, bare: bool = False) -> None:
        """Point the next pass at slots [first, first + count) and make room for `rows` more columns.

        With `bare` the views of the pass begin behind the deep prefix, which none of its rows sees.
        """
        self._pass = OpenPass(first, count, self.prefix_length if bare else 0)
        need = self.prefix_length + max(self.lengths[first : first + count]) + rows
        if need > self.capacity:
            self._resize(self.slots, self._round(max(need, self.capacity + self.capacity // 2)))

    # Tensors born in inference mode could not be written outside it, and passes may run either way.
    @torch.inference_mode(False)
    def _resize(self, slots: int, capacity: int) -> None:
        """Have so many slots of so many columns; further slots are empty."""

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
        """Put other stores in the places of all, or of none where there is no memory for them."""
        self.notes.clear()  # recordings hold the old ones
        stores = self._keys, self._values
        made = [[None if old is None else with_room(partial(make, old)) for old in store] for store in stores]
        for store, new in zip(stores, made, strict=True):
            store[:] = new

    @torch.inference_mode(False)
    def _allocate(self, layer: int, heads: int, widths: tuple[int, int], like: Tensor) -> None:
        for which, store in enumerate((self._keys, self._values)):
            new = with_room(partial(like.new_zeros, (self.slots, heads, self.capacity, widths[which])))
            held = store[layer]
            if held is not None:  # in another type
                new[:] = held
            if self.prefix is not None:
                new[:, :, : self.prefix_length] = finite(self.prefix[layer][which].to(new))
            store[layer] = new
        self.notes.clear()

    @property
    def stores_and_notes(self) -> tuple[list[Tensor | None], list[Tensor | None], dict[Any, Any]]:
        """Keys and values by layer, and what is known of where they lie: the cache's own lists, which it changes."""
        return self._keys, self._values, self.notes

    def take_over(self, keys: list[Tensor | None], values: list[Tensor | None], notes: dict[Any, Any]) -> None:
        """Use the stores of a cache that is gone; what they hold lies behind all contexts and is not seen."""
        self._keys, self._values, self.notes = keys, values, notes
        some = keys[0]
        assert some is not None
        self.capacity = some.shape[2]

    @property
    def shown_prefix(self) -> int:
        """Columns of the deep prefix in the views of the current pass."""
        return self.prefix_length - self._pass.hidden

    @property
    def first(self) -> int:
        """First slot of the current pass."""
        return self._pass.first

    @property
    def starts(self) -> list[int]:
        """Column at which the rows of the current pass begin, per request."""
        return [self.prefix_length + n for n in self.lengths[self._pass.slots]]

    def stores(self, layer: int, heads: int, widths: tuple[int, int], like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all slots, each [slots, heads, capacity, its width], to be written in place."""
        keys, values = self._keys[layer], self._values[layer]
        # Those of a pass under autocast may be narrower than the model's own, in which other passes compute.
        other = keys is not None and keys.dtype != like.dtype and not torch.is_autocast_enabled(like.device.type)
        if keys is None or values is None or other:
            self._allocate(layer, heads, widths, like)
            return self.stores(layer, heads, widths, like)
        return keys, values

    def views(self, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the current pass [count, heads, K, dim], K up to the longest end of its `rows` rows."""
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None
        assert values is not None
        slots, begin = self._pass.slots, self._pass.hidden
        end = self.prefix_length + max(self.lengths[slots]) + rows
        return keys[slots, :, begin:end], values[slots, :, begin:end]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write rows [count, heads, n, dim] behind each slot's context; give views up to the longest end."""
        _, heads, rows, width = key_states.shape
        key_states, value_states = finite(key_states), finite(value_states)
        keys, values = self.stores(layer_idx, heads, (width, value_states.shape[3]), key_states)
        slots, starts = self._pass.slots, self.starts
        if min(starts) == max(starts):
            keys[slots, :, starts[0] : starts[0] + rows] = key_states
            values[slots, :, starts[0] : starts[0] + rows] = value_states
        else:
            slot, column = self._ragged_columns(rows, keys.device)
            # Under autocast keys and values may come in types of their own; the branch above casts by itself.
            keys[slot, :, column] = key_states.transpose(1, 2).to(keys.dtype)
            values[slot, :, column] = value_states.transpose(1, 2).to(values.dtype)
        return self.views(layer_idx, rows)

    def _ragged_columns(self, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        known = self._pass.columns.get(rows)
        if known is None:
            slots = self._pass.slots
            starts = torch.tensor(self.starts, dtype=torch.long, device=device)[:, None]
            column = starts + torch.arange(rows, device=device)
            slot = torch.arange(slots.start, slots.stop, device=device)[:, None].expand_as(column)
            known = self._pass.columns[rows] = (slot, column)
        return known

    # Models ask these for shapes and for positions of their own; the positions are replaced, the shapes must
    # agree.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before the rows of the current pass, the prefix that it sees included, in its longest slot."""
        return self.shown_prefix + max(self.lengths[self._pass.slots])

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Column at which the rows of the current pass start."""
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """(key length, key offset) of the current pass."""
        rows = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + rows, 0

    # ---------------------------------------------------------------- after a pass

    def commit(self, rows: list[list[int]], segments: list[Segment]) -> None:
        """Keep, per request of the current pass, the original rows `rows[b]`, in this order, as context.

        Every layer takes them from where its segment holds them. Rows already in place are not moved.
        """
        first, count = self._pass.first, self._pass.count
        starts = [s.start for s in segments] + [len(self._keys)]
        for segment, start, stop in zip(segments, starts, starts[1:], strict=False):
            local = rows
            if segment.rows is not None:
                wheres = ({row: i for i, row in enumerate(of_one)} for of_one in segment.rows.tolist())
                local = [[where[row] for row in of_one] for where, of_one in zip(wheres, rows, strict=False)]
            self._move(start, stop, first, local)
        for b in range(count):
            self.lengths[first + b] += len(rows[b])

    def _moves(self, first: int, rows: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, list[int]]]:
        """Of each request whose rows do not all lie where they belong: slot, first column to write, and which to read.

        Args:
            first: slot of the first request.
            rows: of each request, which rows behind its context are to follow it.
        """
        for slot, local in enumerate(rows, first):
            done = next((i for i, row in enumerate(local) if row != i), len(local))  # rows that lie where they belong
            if done < len(local):
                begin = self.prefix_length + self.lengths[slot]
                yield slot, begin + done, [begin + row for row in local[done:]]

    def _move(self, start: int, stop: int, first: int, rows: Sequence[Sequence[int]]) -> None:
        """Move the rows of requests behind their contexts, see `_moves`, in layers [start, stop)."""
        for slot, to, sources in self._moves(first, rows):
            columns = torch.tensor(sources, dtype=torch.long, device="cpu")
            for held in (*self._keys[start:stop], *self._values[start:stop]):
                if held is not None:
                    columns = columns.to(held.device)
                    of_slot = held[slot]
                    of_slot.narrow(1, to, len(columns)).copy_(of_slot.index_select(1, columns))

    def keep(self, slot: int, length: int, tail: list[int]) -> None:
        """Of a slot's context keep the first `length` columns and, in this order, of those behind them `tail`.

        Args:
            slot: which request.
            length: columns that stay as they are.
            tail: ascending numbers of columns, from 0 for the first behind `length`.
        """
        self.lengths[slot] = length
        self._move(0, len(self._keys), slot, [tail])
        self.lengths[slot] += len(tail)

    def widen(self, slots: int) -> None:
        """Have more slots; those that there are keep what they hold."""
        self._resize(slots, self.capacity)

    def move(self, source: int, target: int, length: int | None = None) -> None:
        """Copy the first `length` tokens of slot `source`, by default all of its context, over slot `target`."""
        length = self.lengths[source] if length is None else length
        end = self.prefix_length + length
        for store in (self._keys, self._values):
            for held in store:
                if held is not None:
                    held[target, :, :end] = held[source, :, :end]
        self.lengths[target] = length

    def exchange(self, one: int, other: int) -> None:
        """Let two slots change their contents."""
        end = self.prefix_length + max(self.lengths[one], self.lengths[other])
        stores = [held[:, :, :end] for held in (*self._keys, *self._values) if held is not None]
        # Taken before anything moves, as there may be no memory; one for all layers that are alike.
        spare = {(held.shape, held.dtype, held.device): torch.empty_like(held[one]) for held in stores}
        for held in stores:
            kept = spare[held.shape, held.dtype, held.device].copy_(held[one])
            held[one] = held[other]
            held[other] = kept
        self.lengths[one], self.lengths[other] = self.lengths[other], self.lengths[one]

    def clear(self, slot: int) -> None:
        """Forget a slot's context."""
        self.lengths[slot] = 0

    @property
    def nbytes(self) -> int:
        """Bytes held by keys and values."""
        held = [t for store in (self._keys, self._values) for t in store if t is not None]
        return sum(t.numel() * t.element_size() for t in held)


class GradientCache(SlotCache):
    """Gives a layer the deep prefix and the rows of the pass, as one differentiable tensor.

    Args:
        layers: number of decoder layers.
        batch: number of sequences.
        prefix: per-layer (keys, values) that rows may see, each [kv heads, P, head dim], or [B, ..] where they differ
            by sequence; None for none.
        context: holds what the rows see before them, the same number of columns in every slot; no gradients go there.
            None for whole sequences.
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
        """See `SlotCache.open`; there is nothing to make room for, and the prefix is always there."""
        self._pass = OpenPass(first, count)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Rows [B, heads, n, dim] behind the deep prefix and the context of C columns: [B, heads, P + C + n, dim]."""
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
