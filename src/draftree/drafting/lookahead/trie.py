"""The trie of Lookahead (section 4.3 of the paper): earlier text, stored to draft the tokens that follow.

Each position of a text is a *key*. Its *branch* is the key and the `branch_length` tokens after it, and each node on
the branch counts one hit. There are two kinds of forest. The *output* forest is shared by all requests and stays;
generated tokens enter it as they come. A *prompt* forest belongs to one request and is dropped when the request ends
(branch eliminating). Retrieval searches both at once.

**Bounds (node pruning).** When a forest holds `capacity * decoding_length` nodes per live key, or `max_nodes`, a clock
hand moves over the nodes before another one is stored. It halves the counts it passes and frees leaves with less than
one hit, at most 64 nodes for each new one, so there are no long pauses. A node of an open branch is never freed. If
the hand frees nothing in 64 steps, the new node is refused and its branch ends. With `prune=False` only `max_nodes` is
a bound, and new nodes are refused from then on.

**Drafts (multi-stage retrieval).** The longest suffix of the context is searched in both forests. The paths below it
are taken best first by hits (prompt hits times `prompt_weight`), among equals the shallower and then the newer one.
While fewer than `min_nodes` nodes were found, the suffix is shortened, and its paths follow. Of a very wide node only
the `SCAN` most recently touched children are considered.

**Log-probabilities.** Each edge has the share (hits of the child) / (hits of the parent + u), a path the product. u is
`SMOOTHING` over the square of the number of tokens that led there, in the suffix and the path: a text that followed a
long context once is likely to follow it again. The paths of a shorter suffix are first multiplied by the share that the
longer one left open, u / (hits of its match + u), as in PPM.

The store is compiled (`native/trie.c`). Without a compiler `dict_trie.py` takes its place.
"""

from __future__ import annotations

import ctypes
import json
import os
import warnings
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int, c_int32, c_int64, c_uint32, c_void_p
from dataclasses import asdict
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from draftree.drafting.lookahead.dict_trie import (
    MAX_TOKEN,
    MODES,
    NO_PARENT,
    SCAN,
    SMOOTHING,
    SOURCES,
    Arrays,
    DictTrie,
    Dump,
    TrieOptions,
    checked_ids,
    chosen,
)
from draftree.errors import brief, check_least
from draftree.files import replacing
from draftree.native import LIBRARY, library
from draftree.native.structures import array_address

PIECE = 1024  # Tokens of a finished answer stored under one lock, which takes some milliseconds.
ABI = 8
HEADER = "draftree_trie"  # Key of the JSON header in a trie file's metadata.

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
    "trie_retrieve": (c_int32, [c_void_p, c_int32, c_int32, c_int32, c_int, c_int, *[c_void_p] * 4]),
    "trie_dump": (c_int32, [c_void_p, c_int32, *[c_void_p] * 5]),
    "trie_restore": (c_int, [c_void_p, c_int32, *[c_void_p] * 4, c_uint32]),
}


class Retrieved(NamedTuple):
    """A retrieved tree of n draft tokens; parents come before their children.

    Attributes:
        tokens: int32 [n].
        parents: int32 [n], row of the parent in these arrays; -1 for children of the root, the newest token.
        logp: float32 [n], log-probability of the path from the root by hit counts.
        source: uint8 [n]; 1 is set if the node is in the prompt, 2 if it is in outputs.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    logp: NDArray[np.float32]
    source: NDArray[np.uint8]


class Trie:
    """Branches of prompts and outputs, and drafts from them. Calls are safe in several threads.

    Args:
        compiled: False uses the plain store of `dict_trie.py`. By default it is used, with a warning, if the compiled
            one is missing.
        fields: those of `TrieOptions`, by name.

    Each method raises a ValueError for bad arguments before it changes anything.
    """

    def __init__(self, *, compiled: bool = True, **fields: Any) -> None:
        self.options = TrieOptions(**fields)
        self._lock = RLock()  # Garbage collection may end a request inside another call.
        self._slots: dict[int, int] = {}
        self._store: _Compiled | DictTrie = _new_store(self.options) if compiled else DictTrie(self.options)

    def begin(self, request: int, prompt: Sequence[int]) -> None:
        """Store the branches of a prompt (token ids, oldest first) and follow the request's context."""
        tokens = checked_ids(prompt, "prompt")
        with self._lock:
            if request in self._slots:
                raise ValueError(f"request {request} has begun already: end it first or number it anew.")
            self._slots[request] = self._store.begin(tokens)

    def extend(self, request: int, tokens: Sequence[int]) -> None:
        """Store committed tokens in the output forest, joined to the last branches of the prompt.

        After an end-of-sequence token nothing more of this request is stored.
        """
        checked = checked_ids(tokens, "tokens")
        with self._lock:
            self._store.extend(self._slot(request), checked)

    def retrieve(
        self, request: int, budget: int, *, depth: int | None = None, mode: str = "hierarchical", sources: str = "mix"
    ) -> Retrieved:
        """Return the best `budget` draft tokens after the request's newest token (section 4.3.2).

        Args:
            depth: limit of levels, at most `branch_length` (the default).
            mode: "hierarchical" merges shared prefixes, "parallel" repeats them in each branch (section 4.2), "single"
                is one branch.
            sources: "prompt", "output" or "mix" (table 3).
        """
        most = self.options.branch_length
        depth = most if depth is None else depth
        if budget is None:
            raise ValueError("budget is None: give a whole number.")
        check_least(1, MAX_TOKEN, budget=budget, depth=depth)
        how = chosen("mode", mode, MODES), chosen("sources", sources, SOURCES)
        with self._lock:
            return Retrieved(*self._store.retrieve(self._slot(request), budget, min(depth, most), *how))

    def end(self, request: int) -> None:
        """End a request: drop its prompt's branches and keep its output's (branch eliminating)."""
        with self._lock:
            self._store.end(self._slot(request))
            del self._slots[request]

    def warm(self, tokens: Sequence[int]) -> None:
        """Store a finished answer as output, up to its first end-of-sequence token (appendix C)."""
        checked = checked_ids(tokens, "tokens")
        with self._lock:
            slot = self._store.begin(checked[:0])
        try:
            for begin in range(0, len(checked), PIECE):
                with self._lock:  # Other threads get their turn between pieces of a long answer.
                    self._store.extend(slot, checked[begin : begin + PIECE])
        finally:
            with self._lock:
                self._store.end(slot)

    @property
    def nodes(self) -> int:
        """Return the number of stored nodes, prompts of live requests included."""
        with self._lock:
            return self._store.nodes

    @property
    def nbytes(self) -> int:
        """Return the bytes of nodes and index; without the compiled store this is an estimate."""
        with self._lock:
            return self._store.nbytes

    @property
    def live_requests(self) -> int:
        """Return the number of requests that have begun and not ended."""
        return len(self._slots)

    @property
    def compiled(self) -> bool:
        """Return whether the compiled store is in use."""
        return isinstance(self._store, _Compiled)

    def save(self, path: str | os.PathLike[str], tokenizer_fingerprint: str) -> None:
        """Write options and output forest to a safetensors file. Prompts are not saved."""
        data = self._packed(tokenizer_fingerprint)
        with replacing(path) as temporary:
            temporary.write_bytes(data)

    @classmethod
    def load(cls, path: str | os.PathLike[str], tokenizer_fingerprint: str, *, compiled: bool = True) -> Trie:
        """Read a trie that `save` wrote; it gives the same drafts."""
        if not os.path.isfile(path):
            raise ValueError(f"There is no trie file {os.fspath(path)!r}: give one that Lookahead.save wrote.")
        try:
            with safe_open(path, framework="np") as file:
                header = json.loads((file.metadata() or {}).get(HEADER, "null"))
                columns = [file.get_tensor(name) for name in ("tokens", "parents", "counts", "stamps")]
            options = TrieOptions(**header["options"])
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            reason = "it has no header of one" if isinstance(error, TypeError | KeyError) else brief(error)
            raise ValueError(f"{path} is not a trie that draftree saved ({reason}): save the trie again.") from None
        if header["tokenizer"] != tokenizer_fingerprint:
            raise ValueError(
                f"{path} was saved with tokenizer {header['tokenizer']!r}, not {tokenizer_fingerprint!r}: "
                "load it with that one or start a new trie."
            )
        parents = columns[1]
        if len(parents) and (min(columns[0].min(), columns[2].min()) < 0 or (parents >= np.arange(len(parents))).any()):
            raise ValueError(f"{path} is damaged: save the trie again.")
        trie = cls(**vars(options), compiled=compiled)
        trie._store.restore((*columns, header["tick"]))
        return trie

    def __reduce__(self) -> Any:
        """Copy options and outputs, without live requests, also to another process."""
        with self._lock:
            return _copied, (asdict(self.options), self.compiled, self._ordered())

    def _packed(self, tokenizer_fingerprint: str) -> bytes:
        with self._lock:
            *columns, tick = self._ordered()
        header = {"tokenizer": tokenizer_fingerprint, "options": asdict(self.options), "tick": tick}
        tensors = dict(zip(("tokens", "parents", "counts", "stamps"), columns, strict=True))
        return save(tensors, {HEADER: json.dumps(header)})

    def _ordered(self) -> Dump:
        """Return the output nodes by depth, siblings oldest first, so that a reader only appends."""
        at, tokens, parents, counts, stamps, tick = self._store.dump()
        order = np.argsort(at)
        at, tokens, parents, counts, stamps = (column[order] for column in (at, tokens, parents, counts, stamps))
        rows = np.where(parents == NO_PARENT, NO_PARENT, np.searchsorted(at, parents)).astype(np.int32)
        depth, above = (rows != NO_PARENT).astype(np.int32), rows
        while (above != NO_PARENT).any():  # Each round doubles the distance, so long branches are cheap.
            depth = depth + np.where(above == NO_PARENT, 0, depth[above])
            above = np.where(above == NO_PARENT, NO_PARENT, above[above])
        order = np.lexsort((stamps, depth))
        place = np.empty(len(order), np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        renumbered = np.where(rows == NO_PARENT, NO_PARENT, place[rows]).astype(np.int32) if len(rows) else rows
        return tokens[order], renumbered[order], counts[order], stamps[order], tick

    def _slot(self, request: int) -> int:
        try:
            return self._slots[request]
        except KeyError:
            raise ValueError(f"request {request} is not live: begin({request}, prompt) comes first.") from None


class _Compiled:
    """The store of `native/trie.c`. `Trie` has checked the arguments and holds the lock."""

    def __init__(self, options: TrieOptions) -> None:
        self._lib = load_library()
        o = options
        sizes = o.branch_length, o.max_query_length, o.min_nodes, SCAN, o.prompt_weight, SMOOTHING, o.per_key
        ends = _ints(o.eos_token_ids), len(o.eos_token_ids)
        self._trie = self._lib.trie_new(*sizes, o.max_nodes, o.prune, o.eliminate, *ends)
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

    def dump(self) -> tuple[Any, ...]:
        live, room = self._lib.trie_nodes(self._trie, 1), -1
        while live != room:  # Garbage collection between two calls may end a request, which adds nodes.
            room = live
            at, tokens, parents = (np.empty(room, np.int32) for _ in range(3))
            counts, stamps = (np.empty(room, np.uint32) for _ in range(2))
            columns = (at, tokens, parents, counts, stamps)
            live = self._lib.trie_dump(self._trie, room, *(array_address(c, c.dtype) for c in columns))
        return *columns, int(self._lib.trie_tick(self._trie))

    def restore(self, dump: Dump) -> None:
        *columns, tick = dump
        kinds = np.int32, np.int32, np.uint32, np.uint32
        kept = [np.ascontiguousarray(column, kind) for column, kind in zip(columns, kinds, strict=True)]
        pointers = [array_address(column, kind) for column, kind in zip(kept, kinds, strict=True)]
        if not self._lib.trie_restore(self._trie, len(kept[0]), *pointers, tick):
            raise MemoryError("there is no memory left for this trie file")


def load_library() -> ctypes.CDLL:
    """Return the compiled library with the trie's signatures; OSError if it is missing or older than this file."""
    found = library()
    if not hasattr(found, "trie_abi") or found.trie_abi() != ABI:
        raise OSError(f"{LIBRARY.name} was built from an older source")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


def _new_store(options: TrieOptions) -> _Compiled | DictTrie:
    try:
        return _Compiled(options)
    except OSError:
        warnings.warn(
            "draftree's compiled trie is missing, and a slower one is used: install a C compiler and reinstall it.",
            RuntimeWarning,
            stacklevel=4,
        )
        return DictTrie(options)


def _copied(options: dict[str, Any], compiled: bool, dump: Dump) -> Trie:
    trie = Trie(**options, compiled=compiled)
    trie._store.restore(dump)
    return trie


def _ints(tokens: Sequence[int]) -> Any:
    return (c_int32 * len(tokens))(*tokens)
