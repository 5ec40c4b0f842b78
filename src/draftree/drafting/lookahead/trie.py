"""The trie of Lookahead (section 4.3 of the paper): earlier text, kept to draft what comes next.

Every position of a text is a *key*; its *branch* is the key and the `branch_length` tokens that follow, and
each node on it counts one hit. Two kinds of forest hold branches. The *output* forest is shared by all
requests and lives on; generated tokens enter it as they come. A *prompt* forest belongs to one request and is
dropped whole when the request ends (branch eliminating). Retrieval looks both up at once.

How a forest is bounded (node pruning). When it holds `capacity * decoding_length` nodes per live key, or
`max_nodes`, a clock hand moves over the nodes before one more is stored: it halves the counts it passes and
frees leaves that fall under one hit, at most 64 nodes for each new one, so there is no stall and memory stays
put. A node that an open branch stands on is never freed. If the hand finds nothing in its 64 steps the new
node is refused: that one branch ends there. With `prune=False` only `max_nodes` bounds and new nodes are
refused from then on.

How a draft is made (multi-stage retrieval). The longest suffix of the context is looked up in both forests;
the paths below it are taken best first by hits (prompt hits times `prompt_weight`), among equals
the shallower and then the newer. While fewer than `min_nodes` nodes were found the suffix is shortened, and
what it adds comes after. Of a very wide node only the `SCAN` most recently touched children are looked at.

What `logp` means. Each edge has the share (hits of the child) / (hits of the parent + u), a path the product. u is
`SMOOTHING` over the square of the number of tokens that led there, those of the suffix and of the path: what
followed a long text once will follow it again. What a shorter suffix adds is first multiplied by the share that the
longer one left open, u / (hits of its match + u), as in PPM.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftree.drafting.lookahead import trie_file
from draftree.drafting.lookahead.c_trie import CTrie
from draftree.drafting.lookahead.python_trie import PythonTrie
from draftree.drafting.lookahead.twins import MAX_TOKEN, MODES, SOURCES, TrieOptions, checked_ids, chosen
from draftree.errors import check_least
from draftree.files import replacing

_BACKENDS = {"auto": "auto", "c": "c", "python": "python"}
PIECE = 1024  # tokens of a finished answer that are stored under one lock: some milliseconds


class Retrieved(NamedTuple):
    """A retrieved tree of n draft tokens. Parents come before their children.

    tokens:  int32 [n].
    parents: int32 [n], row of the parent in these arrays; -1 hangs on the root, the request's newest token.
    logp:    float32 [n], log-probability of the path from the root, as the hit counts tell it.
    source:  uint8 [n], bit 1 (value 1): seen in the prompt; bit 2 (value 2): seen in outputs.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    logp: NDArray[np.float32]
    source: NDArray[np.uint8]


class Trie:
    """Branches of prompts and outputs, and the drafts they give. Safe under threads: one lock a trie.

    backend: "c", "python", or "auto": C where it was built, Python with one warning elsewhere.
    fields: those of `TrieOptions`, by name.

    Every bad argument, here and in the methods, is a ValueError raised before anything was changed.
    """

    def __init__(self, *, backend: str = "auto", **fields: Any) -> None:
        self.options = TrieOptions(**fields)
        self._lock = RLock()  # collecting garbage may end a request in the middle of another call
        self._slots: dict[int, int] = {}
        self._backend: CTrie | PythonTrie = _make(self.options, backend)

    def begin(self, request: int, prompt: Sequence[int]) -> None:
        """A prompt arrives: stores its branches and starts to track the request's context.

        prompt: token ids, oldest first; list, array or tensor of one dimension; may be empty.
        """
        tokens = checked_ids(prompt, "prompt")
        with self._lock:
            if request in self._slots:
                raise ValueError(f"request {request} has begun already: end it first or number it anew.")
            self._slots[request] = self._backend.begin(tokens)

    def extend(self, request: int, tokens: Sequence[int]) -> None:
        """Tokens were committed: they enter the output forest, stitched to the prompt's last branches.

        After an end-of-sequence token nothing more of this request is stored; its context still moves on.
        """
        checked = checked_ids(tokens, "tokens")
        with self._lock:
            self._backend.extend(self._slot(request), checked)

    def retrieve(
        self, request: int, budget: int, *, depth: int | None = None, mode: str = "hierarchical", sources: str = "mix"
    ) -> Retrieved:
        """The best `budget` draft tokens below the request's newest token (section 4.3.2).

        budget: most nodes of the draft. depth: its most levels, at most `branch_length` (the default).
        mode: "hierarchical" merges shared prefixes, "parallel" repeats them in each branch (section 4.2),
        "single" is one branch. sources: "prompt", "output" or "mix" (table 3).
        """
        most = self.options.branch_length
        depth = most if depth is None else depth
        if budget is None:
            raise ValueError("budget is None: give a whole number.")
        check_least(1, MAX_TOKEN, budget=budget, depth=depth)
        how = chosen("mode", mode, MODES), chosen("sources", sources, SOURCES)
        with self._lock:
            return Retrieved(*self._backend.retrieve(self._slot(request), budget, min(depth, most), *how))

    def end(self, request: int) -> None:
        """The request is over: its prompt's branches go, its output's stay (branch eliminating)."""
        with self._lock:
            self._backend.end(self._slot(request))
            del self._slots[request]

    def warm(self, tokens: Sequence[int]) -> None:
        """Stores a finished answer as output, up to its first end-of-sequence token (appendix C).

        As if it were written piece by piece, so that nobody else waits for all of a long one.
        """
        checked = checked_ids(tokens, "tokens")
        with self._lock:
            slot = self._backend.begin(checked[:0])
        try:
            for begin in range(0, len(checked), PIECE):
                with self._lock:
                    self._backend.extend(slot, checked[begin : begin + PIECE])
        finally:
            with self._lock:
                self._backend.end(slot)

    @property
    def nodes(self) -> int:
        """Nodes stored now, prompts of live requests included."""
        with self._lock:
            return self._backend.nodes

    @property
    def nbytes(self) -> int:
        """Bytes held for nodes and their index; the Python twin estimates."""
        with self._lock:
            return self._backend.nbytes

    @property
    def live_requests(self) -> int:
        """Requests that have begun and not ended."""
        return len(self._slots)

    @property
    def backend(self) -> str:
        """The twin at work, "c" or "python"."""
        return "c" if isinstance(self._backend, CTrie) else "python"

    def save(self, path: str | os.PathLike[str], tokenizer_fingerprint: str) -> None:
        """Writes options and output forest to a flat file, whole or not at all. Prompts are not saved."""
        data = self._packed(tokenizer_fingerprint)
        with replacing(path) as temporary:
            temporary.write_bytes(data)

    @classmethod
    def load(cls, path: str | os.PathLike[str], tokenizer_fingerprint: str, *, backend: str = "auto") -> Trie:
        """The trie that `save` wrote; it drafts the same.

        ValueError when the file is not a trie, is damaged, of a newer version or of another tokenizer.
        """
        return _unpacked(trie_file.read(path), tokenizer_fingerprint, backend, path)

    def __reduce__(self) -> Any:
        """A copy, also in another process, has options and outputs, and no live requests."""
        return _unpacked, (self._packed(""), "", "python" if self.backend == "python" else "auto")

    def _packed(self, tokenizer_fingerprint: str) -> bytes:
        with self._lock:
            dump = self._backend.dump()
        return trie_file.packed(tokenizer_fingerprint, self.options, dump)

    def _slot(self, request: int) -> int:
        try:
            return self._slots[request]
        except KeyError:
            raise ValueError(f"request {request} is not live: begin({request}, prompt) comes first.") from None


def _unpacked(data: bytes, tokenizer_fingerprint: str, backend: str, path: object = "the copy") -> Trie:
    options, dump = trie_file.unpacked(data, tokenizer_fingerprint, path)
    trie = Trie(**vars(options), backend=backend)
    trie._backend.restore(dump)
    return trie


def _make(options: TrieOptions, backend: str) -> CTrie | PythonTrie:
    if chosen("backend", backend, _BACKENDS) == "python":
        return PythonTrie(options)
    try:
        return CTrie(options)
    except OSError as error:
        if backend == "c":
            raise ValueError(
                f'backend="c" needs the compiled trie ({error}): install a C compiler and reinstall '
                'draftree, or use backend="python".'
            ) from error
        warnings.warn(
            "draftree uses the slower Python trie because its compiled twin is missing: "
            "install a C compiler and reinstall draftree.",
            RuntimeWarning,
            stacklevel=3,
        )
        return PythonTrie(options)
