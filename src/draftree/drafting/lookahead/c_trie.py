"""The C twin of the Lookahead trie, loaded through ctypes.

The functions are those of `native/trie.c`; a call costs about a microsecond.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int, c_int32, c_int64, c_uint32, c_void_p
from typing import Any

import numpy as np

from draftree.drafting.lookahead import twins
from draftree.drafting.lookahead.twins import Arrays, Dump, TrieOptions
from draftree.native import LIBRARY, library
from draftree.native.addresses import array_address

ABI = 8

_INTS = POINTER(c_int32)
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "trie_abi": (c_int32, []),
    "trie_new": (c_void_p, [*[c_int32] * 4, c_double, c_double, c_int64, c_int64, c_int, c_int, _INTS, c_int32]),
    "trie_free": (None, [c_void_p]),
    "trie_nodes": (c_int64, [c_void_p, c_int]),
    "trie_bytes": (c_int64, [c_void_p]),
    "trie_tick": (c_uint32, [c_void_p]),
    "trie_begin": (c_int32, [c_void_p, _INTS, c_int64]),
    "trie_extend": (None, [c_void_p, c_int32, _INTS, c_int64]),
    "trie_end": (None, [c_void_p, c_int32]),
    "trie_retrieve": (
        c_int32,
        [c_void_p, c_int32, c_int32, c_int32, c_int, c_int, c_void_p, c_void_p, c_void_p, c_void_p],
    ),
    "trie_dump": (c_int32, [c_void_p, c_int32, *[c_void_p] * 5]),
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

    def __init__(self, options: TrieOptions) -> None:
        self._lib = load_library()
        self._trie = self._lib.trie_new(
            options.branch_length,
            options.max_query_length,
            options.min_nodes,
            twins.SCAN,
            options.prompt_weight,
            twins.SMOOTHING,
            options.per_key,
            options.max_nodes,
            options.prune,
            options.eliminate,
            _ints(options.eos_token_ids),
            len(options.eos_token_ids),
        )
        if not self._trie:
            raise MemoryError("there is no memory left for a trie; lower max_nodes")

    def __del__(self) -> None:
        if getattr(self, "_trie", None):
            self._lib.trie_free(self._trie)

    def begin(self, tokens: Sequence[int]) -> int:
        slot: int = self._lib.trie_begin(self._trie, _ints(tokens), len(tokens))
        if slot < 0:
            raise MemoryError("there is no memory left for this prompt; end other requests or lower max_nodes")
        return slot

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        self._lib.trie_extend(self._trie, slot, _ints(tokens), len(tokens))

    def retrieve(self, slot: int, budget: int, depth: int, mode: int, sources: int) -> Arrays:
        tokens, parents = np.empty(budget, np.int32), np.empty(budget, np.int32)
        logp, source = np.empty(budget, np.float32), np.empty(budget, np.uint8)
        found = [array_address(column, column.dtype) for column in (tokens, parents, logp, source)]
        n = self._lib.trie_retrieve(self._trie, slot, budget, depth, mode, sources, *found)
        return tokens[:n], parents[:n], logp[:n], source[:n]

    def end(self, slot: int) -> None:
        self._lib.trie_end(self._trie, slot)

    @property
    def nodes(self) -> int:
        return int(self._lib.trie_nodes(self._trie, 0))

    @property
    def nbytes(self) -> int:
        return int(self._lib.trie_bytes(self._trie))

    def dump(self) -> Dump:
        live, room = self._lib.trie_nodes(self._trie, 1), -1
        while live != room:  # collecting garbage between two calls may end a request, which adds nodes
            room = live
            at, tokens, parents = (np.empty(room, np.int32) for _ in range(3))
            counts, stamps = (np.empty(room, np.uint32) for _ in range(2))
            columns = (at, tokens, parents, counts, stamps)
            live = self._lib.trie_dump(self._trie, room, *(array_address(c, c.dtype) for c in columns))
        return at, tokens, parents, counts, stamps, int(self._lib.trie_tick(self._trie))

    def restore(self, dump: Dump) -> None:
        *columns, tick = dump
        kept = [np.ascontiguousarray(column) for column in columns[1:]]
        kinds = np.int32, np.int32, np.uint32, np.uint32
        pointers = [array_address(column, kind) for column, kind in zip(kept, kinds, strict=True)]
        if not self._lib.trie_restore(self._trie, len(kept[0]), *pointers, tick):
            raise MemoryError("there is no memory left for this trie file")
