"""The slot cache of models with recurrent layers: one state per request and layer beside keys and values.

A pass leaves the states of its slots as they are. There are three kinds of pass:

- *prompt*: the next rows of one request's prompt, by the model's own functions for many tokens;
- *one token*: one row for each request, by its own one-token functions, on copies of the states;
- *tree*: see `operators`. The inputs of the recurrence are kept, a few numbers per head and row.

A commit puts the states of a prompt or of single tokens into the slots, and replays the accepted paths of trees.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftree.runner.kv.cache import SlotCache, rows_within
from draftree.runner.plan import Plan, Segment
from draftree.runner.recurrent.families import Recurrence
from draftree.runner.recurrent.operators import Forest, Scan, convolve_tree, replaced_operators, scan_tree

Store = dict[tuple[int, int], Tensor]  # by layer and number of the state


@dataclass(slots=True)
class Pass:
    """The recurrent side of the running pass.

    Attributes:
        trees: whether its rows form trees.
        fresh: whether no token comes before its rows.
        conv, states: next states of the pass's slots, by layer, where `trees` is False.
        inputs, scans: what the convolutions and the recurrences read, by layer, where `trees` is True.
    """

    trees: bool = False
    fresh: bool = False
    conv: Store = field(default_factory=dict)
    states: Store = field(default_factory=dict)
    inputs: Store = field(default_factory=dict)
    scans: dict[int, Scan] = field(default_factory=dict)


class RecurrentCache(SlotCache):
    """A `SlotCache` with recurrent states; it handles the replaced operators of a pass over trees.

    Attributes:
        conv: last inputs of convolutions, each [slots, channels, kernel].
        states: of recurrences, each [slots, ...].
    """

    def __init__(self, recurrence: Recurrence, layers: int, slots: int, *given: Any) -> None:
        super().__init__(layers, slots, *given)
        self.recurrence = recurrence
        self.conv: Store = {}
        self.states: Store = {}
        self._at = [0] * slots  # tokens before each slot's states
        self._marks: dict[int, tuple[int, list[Tensor]]] = {}  # by slot: number of tokens, states behind them
        self._recurrent = Pass()
        self._layer_index = 0  # The layer that runs.
        self._segments: list[Segment] = []
        self._forests: list[Forest] = []
        self._sizes: tuple[int, ...] | None = None

    # ---------------------------------------------------------------- a pass

    def begin(self, plan: Plan, segments: list[Segment]) -> AbstractContextManager[None]:
        """Prepare the states for an open pass, and return the context of its forward call.

        `segments` grows as rows leave and join.

        Raises:
            ValueError: prompt rows of several requests in one pass, or rows that see only a part of the context.
        """
        trees = not plan.prompt and plan.width > 1
        fresh = max(self.lengths[self._pass.slots]) == 0
        if plan.prompt and plan.batch > 1:
            raise ValueError("Models with recurrent layers read each prompt in passes of its own.")
        if plan.visible.shape[2] != plan.width:
            raise ValueError("Models with recurrent layers cannot leave out committed tokens.")
        self._recurrent = Pass(trees, fresh)
        self._segments, self._forests, self._sizes = segments, [], plan.sizes
        for slot in range(self._pass.slots.start, self._pass.slots.stop):
            self._restore(slot)
        return replaced_operators(self.recurrence.files, self) if trees else nullcontext()

    def _restore(self, slot: int) -> None:
        """Bring the states of a slot to its length."""
        length = self.lengths[slot]
        if not length:  # Another text begins here.
            self._marks.pop(slot, None)
        if self._at[slot] == length:
            return
        marked, states = self._marks.get(slot, (0, []))
        if length not in (0, marked):
            raise RuntimeError(f"There is no recurrent state behind {length} tokens.")
        for i, held in enumerate(self._recurrent_stores):
            held[slot] = states[i] if length else 0
        self._at[slot] = length

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a copy of the last inputs [B, channels, kernel]; None for trees and where no token comes before."""
        self._layer_index = layer_idx
        return self._copied(self.conv, self._recurrent.conv, (layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a copy of the states [B, ...]; None for trees and where no token comes before."""
        return self._copied(self.states, self._recurrent.states, (layer_idx, state_idx))

    def _copied(self, store: Store, copies: Store, key: tuple[int, int]) -> Tensor | None:
        if self._recurrent.trees or self._recurrent.fresh or key not in store:
            return None
        copies[key] = store[key][self._pass.slots].clone()  # One-token functions write in place.
        return copies[key]

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0, **_: Any
    ) -> Tensor:
        """Return the inputs [B, channels, n] behind those kept of the context, which trees get by `convolve`."""
        key, now = (layer_idx, state_idx), self._recurrent
        if now.trees:
            now.inputs[key] = conv_states
            return conv_states
        before = now.conv.get(key)
        inputs = conv_states if before is None else torch.cat([before, conv_states], 2)
        missing = max(0, conv_kernel_size - inputs.shape[2])
        now.conv[key] = torch.nn.functional.pad(inputs, (missing, 0))[:, :, -conv_kernel_size:]
        return inputs if before is not None or not missing else now.conv[key]

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Note the next states [B, ...]; those of trees follow at the commit."""
        if not self._recurrent.trees:
            self._recurrent.states[layer_idx, state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: nothing is recorded for a crop."""
        return False

    # ---------------------------------------------------------------- the replaced operators

    @property
    def _forest(self) -> Forest:
        """The ancestry of the rows that there are now."""
        while len(self._forests) < len(self._segments):
            sizes = None if self._forests else self._sizes
            self._forests.append(Forest(self._segments[len(self._forests)].visible, sizes))
        return self._forests[-1]

    def convolve(self, own: Callable[..., Any], inputs: Tensor, *given: Any, **options: Any) -> Tensor:
        """Return the convolution of each row's ancestors; see `convolve_tree`."""
        key = (self._layer_index, 0)
        kernel = (given[0] if given else options["weight"]).shape[-1]
        if key not in self.conv:
            self.conv[key] = inputs.new_zeros(self.slots, inputs.shape[1], kernel)
        options = {name: value for name, value in options.items() if name in ("weight", "bias", "activation")}
        return convolve_tree(own, inputs, self.conv[key][self._pass.slots], self._forest, *given, **options)

    def scan(self, scan: Scan) -> Any:
        """Return the recurrence along each row's ancestors; see `scan_tree`."""
        key = (self._layer_index, 0)
        self._recurrent.scans[self._layer_index] = scan
        return scan_tree(scan, self.states[key][self._pass.slots], self._forest)

    # ---------------------------------------------------------------- after a pass

    def commit(self, rows: list[list[int]], segments: list[Segment]) -> None:
        """See `SlotCache.commit`; of a prompt all rows are kept."""
        now = self._recurrent
        if now.trees:
            self._replay(rows, segments)
        else:
            going = [self._pass.first + b for b, own in enumerate(rows) if own]
            kept = [b for b, own in enumerate(rows) if own]
            for store, new in ((self.conv, now.conv), (self.states, now.states)):
                for key, tensor in new.items():
                    if key not in store:
                        store[key] = tensor.new_zeros(self.slots, *tensor.shape[1:])
                    store[key][going] = tensor[kept].to(store[key].dtype)
        self._recurrent = Pass()
        super().commit(rows, segments)
        slots = self._pass.slots
        self._at[slots] = self.lengths[slots]

    def _replay(self, rows: list[list[int]], segments: list[Segment]) -> None:
        """Move the states along the accepted paths, without reading any weight."""
        now, starts = self._recurrent, [segment.start for segment in segments]
        paths = [rows_within(segment, rows) for segment in segments]
        for (layer, state), inputs in now.inputs.items():
            own = paths[max(i for i, start in enumerate(starts) if start <= layer)]
            store = self.conv[layer, state]
            for slot, (b, path) in enumerate(enumerate(own), self._pass.first):
                store[slot] = torch.cat([store[slot], inputs[b][:, path].to(store.dtype)], 1)[:, -store.shape[2] :]
        for layer, scan in now.scans.items():
            own = paths[max(i for i, start in enumerate(starts) if start <= layer)]
            store = self.states[layer, 0]
            for depth in range(max(map(len, own))):
                going = [b for b, path in enumerate(own) if len(path) > depth]
                index = torch.tensor([own[b][depth] for b in going], dtype=torch.long, device=store.device)
                picked = [tensor[going, index] for tensor in scan.rows]
                slots = [self._pass.first + b for b in going]
                store[slots] = scan.step(store[slots], picked)[1].to(store.dtype)

    # ---------------------------------------------------------------- slots

    def mark(self, slot: int) -> None:
        """Keep a copy of a slot's states, so that its context can be cut back to its present length."""
        self._marks[slot] = self._at[slot], [held[slot].clone() for held in self._recurrent_stores]

    def reusable(self, slot: int, common: int) -> int:
        """Return how many of a slot's first `common` tokens another text may begin with: up to a state of the slot.

        None where the model's scan begins without a state.
        """
        if self.recurrence.chunk is None:
            return 0
        lengths = (self._at[slot], self._marks[slot][0] if slot in self._marks else 0)
        return max((length for length in lengths if length <= common), default=0)

    @property
    def _recurrent_stores(self) -> list[Tensor]:
        return [*self.conv.values(), *self.states.values()]

    @torch.inference_mode(False)
    def _resize(self, slots: int, capacity: int) -> None:
        for store in (self.conv, self.states):
            for key, held in store.items():
                if slots > len(held):
                    store[key] = torch.cat([held, held.new_zeros(slots - len(held), *held.shape[1:])])
        self._at += [0] * (slots - self.slots)
        super()._resize(slots, capacity)

    def keep(self, slot: int, length: int, tail: list[int]) -> None:
        """Refuse: a state cannot be shortened."""
        if length < self.lengths[slot] or tail:
            raise ValueError("A recurrent state cannot be cut back to fewer tokens.")

    def move(self, source: int, target: int, length: int | None = None) -> None:
        """See `SlotCache.move`."""
        for held in self._recurrent_stores:
            held[target] = held[source]
        self._at[target] = self._at[source]
        self._marks.pop(target, None)
        if source in self._marks:
            self._marks[target] = self._marks[source]
        super().move(source, target, length)

    def exchange(self, one: int, other: int) -> None:
        """See `SlotCache.exchange`."""
        for held in self._recurrent_stores:
            held[[one, other]] = held[[other, one]]
        self._at[one], self._at[other] = self._at[other], self._at[one]
        marks = {one: self._marks.pop(other, None), other: self._marks.pop(one, None)}
        self._marks |= {slot: mark for slot, mark in marks.items() if mark is not None}
        super().exchange(one, other)

    @property
    def nbytes(self) -> int:
        """Bytes held by keys, values and states."""
        return super().nbytes + sum(held.numel() * held.element_size() for held in self._recurrent_stores)
