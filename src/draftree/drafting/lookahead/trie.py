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

import operator
import os
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from draftree.drafting.lookahead import trie_file
from draftree.drafting.lookahead._backend import MODES, SOURCES, Backend, Settings
from draftree.drafting.lookahead.c_trie import CTrie
from draftree.drafting.lookahead.python_trie import PythonTrie
from draftree.tree import TokenTree

SCAN = 256
"""Children of one node that retrieval looks at, in each forest: bounds the cost of a key like the comma."""

SMOOTHING = 2.0
"""Hits added to a parent behind one token before its children's share is taken: one of one is not certainty."""

MAX_TOKEN = 2**31 - 1
_BACKENDS = ("auto", "c", "python")
_T = TypeVar("_T")


class Draft(NamedTuple):
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

    branch_length: tokens after a key, the greatest depth of a draft (paper: 12 alone, 8 in a batch).
    decoding_length: the usual number of nodes of a draft; only scales `capacity`.
    max_query_length: longest context suffix that is looked up, in tokens.
    prompt_weight: hits that one prompt hit is worth (the paper's branch weighting).
    min_nodes: fewer found nodes than this shorten the suffix (N_m of Algorithm 1; default: `branch_length`).
    capacity: nodes per live key, in units of `decoding_length` (paper, table 4: 16).
    max_nodes: absolute bound of a forest; 38 bytes a node in the C twin once it is full.
    prune, eliminate: the paper's table 3 switches; without eliminating, prompts share a forest that stays.
    eos_token_ids: a branch ends with the first of these; none starts with one.
    backend: "c", "python", or "auto": C where it was built, Python with one warning elsewhere.

    Every bad argument, here and in the methods, is a ValueError raised before anything was changed.
    """

    def __init__(
        self,
        *,
        branch_length: int = 12,
        decoding_length: int = 64,
        max_query_length: int = 4,
        prompt_weight: float = 4.0,
        min_nodes: int | None = None,
        capacity: int = 16,
        max_nodes: int = 2**20,
        prune: bool = True,
        eliminate: bool = True,
        eos_token_ids: Sequence[int] = (),
        backend: str = "auto",
    ) -> None:
        for name, number in (
            ("branch_length", branch_length),
            ("decoding_length", decoding_length),
            ("max_query_length", max_query_length),
            ("min_nodes", branch_length if min_nodes is None else min_nodes),
            ("capacity", capacity),
            ("max_nodes", max_nodes),
        ):
            _check_count(name, number)
        if max_nodes > 2**30:
            raise ValueError(f"max_nodes={max_nodes} is more than a trie can index: give at most 2**30.")
        if not 0 < prompt_weight <= 1e6:
            raise ValueError(f"prompt_weight={prompt_weight} must be over 0 and at most 1e6; 1 means no weighting.")
        self.options: dict[str, Any] = {
            "branch_length": branch_length,
            "decoding_length": decoding_length,
            "max_query_length": max_query_length,
            "prompt_weight": float(prompt_weight),
            "min_nodes": branch_length if min_nodes is None else min_nodes,
            "capacity": capacity,
            "max_nodes": max_nodes,
            "prune": bool(prune),
            "eliminate": bool(eliminate),
            "eos_token_ids": checked_ids(eos_token_ids, "eos_token_ids"),
        }
        settings = Settings(
            branch_length=branch_length,
            min_nodes=self.options["min_nodes"],
            max_query_length=max_query_length,
            prompt_weight=float(prompt_weight),
            smoothing=SMOOTHING,
            scan=SCAN,
            per_key=capacity * decoding_length,
            max_nodes=max_nodes,
            prune=bool(prune),
            eliminate=bool(eliminate),
            eos_token_ids=tuple(self.options["eos_token_ids"]),
        )
        self._lock = Lock()
        self._slots: dict[int, int] = {}
        self._backend: Backend = _make(settings, backend)

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
        self,
        request: int,
        budget: int,
        *,
        depth: int | None = None,
        mode: str = "hierarchical",
        sources: str = "mix",
    ) -> Draft:
        """The best `budget` draft tokens below the request's newest token (section 4.3.2).

        budget: most nodes of the draft. depth: its most levels, at most `branch_length` (the default).
        mode: "hierarchical" merges shared prefixes, "parallel" repeats them in each branch (section 4.2),
        "single" is one branch. sources: "prompt", "output" or "mix" (table 3).
        """
        query = self._query(budget, depth, mode, sources)
        with self._lock:
            return Draft(*self._backend.retrieve(self._slot(request), *query))

    def draft(
        self,
        requests: Sequence[int],
        roots: Sequence[int],
        budgets: Sequence[int],
        *,
        news: Sequence[Sequence[int]] = (),
        depths: Sequence[int] = (),
        mode: str = "hierarchical",
        sources: str = "mix",
    ) -> TokenTree:
        """The drafts of a batch as trees below `roots`, nodes in falling order of probability: cutting is cheap.

        For a decoder's every step: trusts that ids are ids.

        requests: live ones. roots: their newest tokens. budgets: most draft tokens of each; 0 for none.
        news: tokens committed since, which all enter before the first look-up, as by `extend`; none by default.
        depths: most levels of each, at most `branch_length` (the default); 0 for no draft tokens.
        mode, sources: see `retrieve`.
        """
        most: int = self.options["branch_length"]
        chosen = _chosen("mode", mode, MODES), _chosen("sources", sources, SOURCES)
        deep = [min(depth, most) for depth in depths] if depths else [most] * len(requests)
        with self._lock:
            slots = [self._slot(request) for request in requests]
            return self._backend.draft(slots, news or [()] * len(slots), roots, budgets, deep, *chosen)

    def _query(self, budget: int, depth: int | None, mode: str, sources: str) -> tuple[int, int, int, int]:
        _check_count("budget", budget)
        branch_length: int = self.options["branch_length"]
        if depth is None:
            depth = branch_length
        _check_count("depth", depth)
        return budget, min(depth, branch_length), _chosen("mode", mode, MODES), _chosen("sources", sources, SOURCES)

    def end(self, request: int) -> None:
        """The request is over: its prompt's branches go, its output's stay (branch eliminating)."""
        with self._lock:
            self._backend.end(self._slot(request))
            del self._slots[request]

    def warm(self, tokens: Sequence[int]) -> None:
        """Stores a finished answer as output, up to its first end-of-sequence token (appendix C)."""
        checked = checked_ids(tokens, "tokens")
        with self._lock:
            self._backend.warm(checked)

    def clear(self) -> None:
        """Forgets all outputs. Live requests go on with their own prompts."""
        with self._lock:
            self._backend.clear()

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
        with self._lock:
            dump = self._backend.dump()
        trie_file.write(path, tokenizer_fingerprint, self.options, dump)

    @classmethod
    def load(cls, path: str | os.PathLike[str], tokenizer_fingerprint: str, *, backend: str = "auto") -> Trie:
        """The trie that `save` wrote; it drafts the same.

        ValueError when the file is not a trie, is damaged, of a newer version or of another tokenizer.
        """
        options, dump = trie_file.read(path, tokenizer_fingerprint)
        trie = cls(**options, backend=backend)
        trie._backend.restore(dump)
        return trie

    def _slot(self, request: int) -> int:
        try:
            return self._slots[request]
        except KeyError:
            raise ValueError(f"request {request} is not live: begin({request}, prompt) comes first.") from None


def _make(settings: Settings, backend: str) -> Backend:
    if _chosen("backend", backend, {name: name for name in _BACKENDS}) == "python":
        return PythonTrie(settings)
    try:
        return CTrie(settings)
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
        return PythonTrie(settings)


def _check_count(name: str, number: int) -> None:
    if not isinstance(number, int | np.integer) or not 1 <= number < 2**31:
        raise ValueError(f"{name}={number!r} must be a whole number of at least 1.")


def _chosen(name: str, value: str, valid: dict[str, _T]) -> _T:
    if value in valid:
        return valid[value]
    near = get_close_matches(str(value), valid, n=1, cutoff=0.0)
    raise ValueError(f"{name}={value!r} is unknown: did you mean {near[0]!r}? Valid are {', '.join(valid)}.")


def checked_ids(tokens: Sequence[int], name: str) -> list[int]:
    """Plain ints within what a node can hold."""
    try:
        if hasattr(tokens, "tolist"):
            tokens = tokens.tolist()
        checked = [operator.index(token) for token in tokens]
    except TypeError:
        raise ValueError(f"{name} must be one flat sequence of token ids (whole numbers).") from None
    if checked and (min(checked) < 0 or max(checked) > MAX_TOKEN):
        raise ValueError(f"{name} holds an id outside 0..{MAX_TOKEN}: give ids as the tokenizer numbers them.")
    return checked
