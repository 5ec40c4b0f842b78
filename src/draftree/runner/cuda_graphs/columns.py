"""A cache whose accepted rows are moved in all layers by one Triton kernel.

Where an accepted branch does not lie first among the rows of a pass, its keys and values move to their places. In
torch's operations that is two kernels for the keys and two for the values of every layer, each launched by Python.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftree.runner.cuda_graphs.kernels import compare, normal
from draftree.runner.kv.cache import SlotCache

SOME = 16  # columns that a program moves at a time
OFFSETS = "offsets of stores"  # key of a cache's notes


@triton.jit(do_not_specialize=["first_layer", "layers", "width"])
def _move(
    stores, offsets, moves, slot_stride, head_stride, first_layer, layers, width,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """The columns of one head of a request in the keys or values of a layer, to columns that are no higher.

    A row of `moves` is a slot, the first column to write, how many there are, and where they come from, ascending. So
    no column is written before all that stood there have been read.
    """
    layer, pair = tl.program_id(0) + first_layer, tl.program_id(1)
    move = moves + pair // HEADS * width
    slot, to, count = tl.load(move), tl.load(move + 1), tl.load(move + 2).to(tl.int32)
    store = stores + tl.load(offsets + tl.program_id(2) * layers + layer)
    store += slot * slot_stride + (pair % HEADS).to(tl.int64) * head_stride
    entry = tl.arange(0, BLOCK)
    for begin in range(0, count, SOME):
        number = begin + tl.arange(0, SOME)
        there = (number < count)[:, None] & (entry < DIM)[None, :]
        source = tl.load(move + 3 + number, mask=number < count, other=0)
        held = tl.load(store + source[:, None] * DIM + entry[None, :], mask=there, other=0.0)
        tl.debug_barrier()  # other threads of the program may not have read yet
        tl.store(store + (to + number)[:, None] * DIM + entry[None, :], held, mask=there)


class KernelCache(SlotCache):
    """The same cache, which moves rows by the kernel; by torch where layers have stores of several shapes."""

    def _move(self, start: int, stop: int, first: int, rows: Sequence[Sequence[int]]) -> None:
        moves = list(self._moves(first, rows))
        if not moves:
            return
        keys, offsets = self._keys[0], self._offsets()
        if keys is None or offsets is None or not all(columns == sorted(columns) for _, _, columns in moves):
            super()._move(start, stop, first, rows)
            return
        most = max(len(columns) for _, _, columns in moves)
        table = [[slot, to, len(columns), *columns, *[0] * (most - len(columns))] for slot, to, columns in moves]
        _, heads, _, dim = keys.shape
        with torch.cuda.device_of(keys):  # Triton runs on the present device; without GPUs nothing is done
            _move[(stop - start, len(moves) * heads, 2)](
                keys, offsets, torch.tensor(table, dtype=torch.long, device="cpu").to(keys.device),
                keys.stride(0), keys.stride(1), start, len(self._keys), most + 3,
                HEADS=heads, DIM=dim, BLOCK=triton.next_power_of_2(dim), SOME=SOME,
            )  # fmt: skip

    def _offsets(self) -> Tensor | None:
        """LongTensor [2 * layers]: how many numbers the keys, then the values of each layer lie behind the first keys.

        None where a layer has none yet, or other ones than the first.
        """
        if OFFSETS not in self.notes:
            stores = [store for store in (*self._keys, *self._values) if store is not None]
            alike = len({(store.shape, store.stride(), store.dtype) for store in stores}) == 1
            offsets = None
            if alike and len(stores) == 2 * len(self._keys):
                behind = [(store.data_ptr() - stores[0].data_ptr()) // stores[0].element_size() for store in stores]
                offsets = torch.tensor(behind, dtype=torch.long, device="cpu").to(stores[0].device)
            self.notes[OFFSETS] = offsets
        found: Tensor | None = self.notes[OFFSETS]
        return found


def check(kv: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Move some columns by the kernel and by torch.

    Raises:
        Exception: whatever Triton raises where it cannot compile or run the kernel.
        RuntimeError: they are not where torch has them.
    """
    random = normal(dtype, device)
    caches = [kind(2, 2, 64) for kind in (KernelCache, SlotCache)]
    rows = [[0, 2, 3, *range(5, 40)], [0, 4]]
    for layer in range(2):
        like = random(1)
        held = random(2, kv, 256, dim), random(2, kv, 256, dim)
        for cache in caches:
            for store, given in zip(cache.stores(layer, kv, (dim, dim), like), held, strict=True):
                store.copy_(given)
    for cache in caches:
        cache.lengths = [7, 100]
        cache._move(0, 2, 0, rows)
    for layer in range(2):
        ours, expected = (torch.stack(cache.stores(layer, kv, (dim, dim), like)) for cache in caches)
        compare("moving columns", ours, expected)
