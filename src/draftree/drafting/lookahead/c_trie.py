"""The C twin of the Lookahead trie, loaded through ctypes.

The functions are those of `native/trie.c`; a call costs about a microsecond.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int, c_int32, c_int64, c_uint32, c_void_p
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draftree.drafting.lookahead._backend import Arrays, Dump, Settings
from draftree.native import LIBRARY, library
from draftree.native.addresses import address, array_address
from draftree.tree import TokenTree

ABI = 6

_INTS = POINTER(c_int32)
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "trie_abi": (c_int32, []),
    "trie_new": (
        c_void_p,
        [
            c_int32,
            c_int32,
            c_int32,
            c_int32,
            c_double,
            c_double,
            c_int64,
            c_int64,
            c_int,
            c_int,
            _INTS,
            c_int32,
        ],
    ),
    "trie_free": (None, [c_void_p]),
    "trie_clear": (None, [c_void_p]),
    "trie_nodes": (c_int64, [c_void_p, c_int]),
    "trie_bytes": (c_int64, [c_void_p]),
    "trie_tick": (c_uint32, [c_void_p]),
    "trie_begin": (c_int32, [c_void_p, _INTS, c_int64]),
    "trie_extend": (None, [c_void_p, c_int32, _INTS, c_int64]),
    "trie_end": (None, [c_void_p, c_int32]),
    "trie_warm": (None, [c_void_p, _INTS, c_int64, c_void_p]),
    "trie_retrieve": (
        c_int32,
        [c_void_p, c_int32, c_int32, c_int32, c_int, c_int, c_void_p, c_void_p, c_void_p, c_void_p],
    ),
    "trie_collect": (
        c_int32,
        [c_void_p, c_int32, *[c_void_p] * 5, c_int, c_int, c_int32, *[c_void_p] * 6],
    ),
    "trie_stack": (None, [c_int32, c_int32, c_int32, *[c_void_p] * 10]),
    "trie_dump": (None, [c_void_p] * 6),
    "trie_restore": (c_int, [c_void_p, c_int32, *[c_void_p] * 4, c_uint32]),
}


def load_library() -> ctypes.CDLL:
    """The compiled twin with its signatures set; OSError when it was not built, is stale or does not load."""
    found = library()
    if not hasattr(found, "trie_abi") or found.trie_abi() != ABI:
        raise OSError(f"{LIBRARY.name} was built from an older source")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


def _ints(tokens: Sequence[int]) -> Any:
    return (c_int32 * len(tokens))(*tokens)


class CTrie:
    """Same calls as `PythonTrie`; arguments were checked by `Trie`, which also holds the lock."""

    def __init__(self, settings: Settings) -> None:
        self._lib = load_library()
        s = settings
        self._trie = self._lib.trie_new(
            s.branch_length,
            s.max_query_length,
            s.min_nodes,
            s.scan,
            s.prompt_weight,
            s.smoothing,
            s.per_key,
            s.max_nodes,
            s.prune,
            s.eliminate,
            _ints(s.eos_token_ids),
            len(s.eos_token_ids),
        )
        if not self._trie:
            raise MemoryError("there is no memory left for a trie; lower max_nodes")
        self._scratch = (c_int32 * (2 * s.branch_length + 2))()
        self._room = 0
        self._make_room(256)
        self._arrays: dict[int, tuple[Any, ...]] = {}  # by requests of a draft: to make them takes as long as to draft

    def __del__(self) -> None:
        if getattr(self, "_trie", None):
            self._lib.trie_free(self._trie)

    def _make_room(self, budget: int) -> None:
        """Room for the columns of drafts: `budget` nodes in all."""
        if budget > self._room:
            self._room = budget
            dtypes: tuple[Any, ...] = (np.int32, np.int32, np.float32, np.uint8)
            self._out: tuple[NDArray[Any], ...] = tuple(np.empty(budget, dtype) for dtype in dtypes)
            self._out_at = [array_address(column, column.dtype) for column in self._out]
            self._place, self._where = (c_int32 * budget)(), (c_int32 * budget)()

    def begin(self, tokens: Sequence[int]) -> int:
        slot: int = self._lib.trie_begin(self._trie, _ints(tokens), len(tokens))
        if slot < 0:
            raise MemoryError("there is no memory left for this prompt; end other requests or lower max_nodes")
        return slot

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        self._lib.trie_extend(self._trie, slot, _ints(tokens), len(tokens))

    def retrieve(self, slot: int, budget: int, depth: int, mode: int, sources: int) -> Arrays:
        self._make_room(budget)
        n = self._lib.trie_retrieve(self._trie, slot, budget, depth, mode, sources, *self._out_at)
        tokens, parents, logp, source = (column[:n].copy() for column in self._out)
        return tokens, parents, logp, source

    def draft(
        self,
        slots: Sequence[int],
        news: Sequence[Sequence[int]],
        roots: Sequence[int],
        budgets: Sequence[int],
        depths: Sequence[int],
        mode: int,
        sources: int,
    ) -> TokenTree:
        batch, room = len(slots), max(budgets)
        self._make_room(batch * room)
        held = self._arrays.get(batch)
        if held is None:
            held = self._arrays[batch] = tuple((c_int32 * batch)() for _ in range(5))
        at, news_counts, most_of, deep, counts = held
        at[:], news_counts[:], most_of[:], deep[:] = slots, [len(part) for part in news], budgets, depths
        came = news[0] if batch == 1 else [token for part in news for token in part]
        most = self._lib.trie_collect(
            *(self._trie, batch, at, _ints(came), news_counts, most_of, deep),
            *(mode, sources, room, *self._out_at, self._place, counts),
        )
        if not most:
            return TokenTree.roots(torch.tensor(roots, dtype=torch.long, device="cpu"))
        width = most + 1
        ids = torch.empty(3, batch, width, dtype=torch.long, device="cpu")
        logp = torch.empty(batch, width, dtype=torch.float32, device="cpu")
        to = address(ids, torch.long), address(logp, torch.float32)
        first = (c_int64 * batch)(*roots)
        self._lib.trie_stack(batch, room, width, first, *self._out_at, counts, self._place, self._where, *to)
        tokens, parents, source = ids.unbind()
        return TokenTree(tokens, parents, logp, source, tuple([count + 1 for count in counts]))

    def end(self, slot: int) -> None:
        self._lib.trie_end(self._trie, slot)

    def warm(self, tokens: Sequence[int]) -> None:
        self._lib.trie_warm(self._trie, _ints(tokens), len(tokens), ctypes.addressof(self._scratch))

    def clear(self) -> None:
        self._lib.trie_clear(self._trie)

    @property
    def nodes(self) -> int:
        return int(self._lib.trie_nodes(self._trie, 0))

    @property
    def nbytes(self) -> int:
        return int(self._lib.trie_bytes(self._trie))

    def dump(self) -> Dump:
        n = self._lib.trie_nodes(self._trie, 1)
        at, tokens, parents = (np.empty(n, np.int32) for _ in range(3))
        counts, stamps = (np.empty(n, np.uint32) for _ in range(2))
        columns = (at, tokens, parents, counts, stamps)
        self._lib.trie_dump(self._trie, *(array_address(column, column.dtype) for column in columns))
        return at, tokens, parents, counts, stamps, int(self._lib.trie_tick(self._trie))

    def restore(self, dump: Dump) -> None:
        *columns, tick = dump
        kept = [np.ascontiguousarray(column) for column in columns[1:]]
        kinds = np.int32, np.int32, np.uint32, np.uint32
        pointers = [array_address(column, kind) for column, kind in zip(kept, kinds, strict=True)]
        if not self._lib.trie_restore(self._trie, len(kept[0]), *pointers, tick):
            raise MemoryError("there is no memory left for this trie file")
