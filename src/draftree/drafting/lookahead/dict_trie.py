"""Options of the Lookahead trie, and its store without a C compiler: nested dictionaries.

The store follows the rules of `trie.py` with three simplifications: counts are never halved (a full forest refuses new
nodes), of equal paths the one found first comes first, and "parallel" drafts are merged like "hierarchical" ones."""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from reprlib import repr
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from draftree.errors import LARGEST, check_least, did_you_mean

MODES = {"hierarchical": 0, "parallel": 1, "single": 2}
SOURCES = {"prompt": 1, "output": 2, "mix": 3}
SCAN = 256  # Children of a node that retrieval considers in each forest; it bounds the cost of frequent keys.
SMOOTHING = 2.0  # Hits added to a parent after one token before the shares of its children are taken.
MAX_TOKEN = 2**31 - 1
MOST = {  # Bounds of the integer options.
    **dict.fromkeys(("branch_length", "decoding_length", "max_query_length"), LARGEST),
    "min_nodes": MAX_TOKEN,
    "capacity": 2**20,
    "max_nodes": 2**30,
}

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class TrieOptions:
    """Options of a trie's store and retrieval.

    Attributes:
        branch_length: tokens after a key, the greatest depth of a draft (paper: 12 alone, 8 in a batch).
        decoding_length: the usual number of nodes of a draft; it only scales `capacity`.
        max_query_length: longest suffix of the context that is searched, in tokens.
        prompt_weight: hits that one prompt hit counts (the paper's branch weighting).
        min_nodes: with fewer nodes found, the suffix is shortened (N_m of Algorithm 1; default: `branch_length`).
        capacity: nodes per live key, in units of `decoding_length` (paper, table 4: 16).
        max_nodes: absolute bound of a forest; a full one takes 38 bytes per node.
        prune, eliminate: the paper's switches of table 3. Without eliminating, prompts share a forest that stays.
        eos_token_ids: a branch ends with the first of these. In a prompt none starts with one or with the token after
            it: chat templates write what follows, such as "\\n" and "<|im_start|>", and models do not.

    Raises:
        ValueError: an option is out of range.
    """

    branch_length: int = 12
    decoding_length: int = 64
    max_query_length: int = 4
    prompt_weight: float = 4.0
    min_nodes: int | None = None
    capacity: int = 16
    max_nodes: int = 2**20
    prune: bool = True
    eliminate: bool = True
    eos_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.min_nodes is None:
            object.__setattr__(self, "min_nodes", self.branch_length)
        for name, most in MOST.items():
            if getattr(self, name) is None:
                raise ValueError(f"{name} is None: give a whole number.")
            check_least(1, most, **{name: getattr(self, name)})
            object.__setattr__(self, name, int(getattr(self, name)))  # JSON does not write NumPy's numbers.
        weight = self.prompt_weight
        if not isinstance(weight, int | float | np.number) or not 1e-6 <= weight <= 1e6:
            raise ValueError(f"prompt_weight={repr(weight)} must be a number from 1e-6 to 1e6; 1 means no weighting.")
        object.__setattr__(self, "prompt_weight", float(weight))
        for name in ("prune", "eliminate"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={repr(getattr(self, name))} must be True or False.")
        object.__setattr__(self, "eos_token_ids", tuple(checked_ids(self.eos_token_ids, "eos_token_ids")))

    @property
    def per_key(self) -> int:
        """Return the bound of nodes per live key."""
        return self.capacity * self.decoding_length


def chosen(name: str, value: str, valid: dict[str, _T]) -> _T:
    """Return the meaning of `value`; a ValueError names the nearest valid one."""
    if value not in valid:
        raise ValueError(f"{name}={value!r} is unknown: choose {', '.join(valid)}.{did_you_mean(value, valid)}")
    return valid[value]


def checked_ids(tokens: Sequence[int], name: str) -> list[int]:
    """Return token ids as plain ints; a ValueError for others than whole numbers from 0 to `MAX_TOKEN`."""
    try:
        if hasattr(tokens, "tolist"):
            tokens = tokens.tolist()
        checked = [operator.index(token) for token in tokens]
    except TypeError:
        raise ValueError(f"{name} must be one flat sequence of token ids (whole numbers).") from None
    if checked and (min(checked) < 0 or max(checked) > MAX_TOKEN):
        raise ValueError(f"{name} holds an id outside 0..{MAX_TOKEN}: give ids as the tokenizer numbers them.")
    return checked


NO_PARENT = -1
ONE_HIT = 256  # Files store counts in this fixed-point unit.
NODE_BYTES = 400  # A node with its dictionary.
SINGLE = MODES["single"]

Arrays = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32], NDArray[np.uint8]]
"""tokens, parents, logp, source of a draft."""

Dump = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], int]
"""token, parent, count and stamp of each output node, and the clock."""


@dataclass(slots=True)
class Node:
    """A token on a branch, with its hits."""

    hits: float = 0.0
    children: dict[int, Node] = field(default_factory=dict)


class Forest:
    """Branches below a root without a token, of at most `most` nodes."""

    def __init__(self, most: int) -> None:
        self.root, self.live, self.most = Node(), 0, most

    def feed(self, open_: list[tuple[Node, int]], token: int, length: int, ends: bool) -> list[tuple[Node, int]]:
        """Extend the open branches by a token and open one at it; return the branches that stay open."""
        after = []
        for at, depth in open_ if ends else [*open_, (self.root, -1)]:
            node = at.children.get(token)
            if node is None and self.live < self.most:
                node = at.children[token] = Node()
                self.live += 1
            if node is not None:
                node.hits += 1
                if not ends and depth + 1 < length:
                    after.append((node, depth + 1))
        return after

    def locate(self, suffix: Sequence[int]) -> Node | None:
        """Return the node at the end of a path of tokens."""
        node: Node | None = self.root
        for token in suffix:
            node = node.children.get(token) if node else None
        return node


class DictTrie:
    """Prompts and outputs in dictionaries; the methods are those of the compiled store."""

    def __init__(self, options: TrieOptions) -> None:
        self.options, self.eos = options, frozenset(options.eos_token_ids)
        self.output, self.shared = Forest(options.max_nodes), Forest(options.max_nodes)
        self.requests: dict[int, dict[str, Any]] = {}

    def begin(self, tokens: Sequence[int]) -> int:
        slot = next(i for i in itertools.count() if i not in self.requests)
        forest = Forest(self.options.max_nodes) if self.options.eliminate else self.shared
        branches: list[tuple[Node, int]] = []
        for i, token in enumerate(tokens):
            branches = forest.feed(branches, token, self.options.branch_length, self._breaks(tokens, i))
        self.requests[slot] = {"prompt": forest, "context": list(tokens), "open": [], "started": False, "ended": False}
        return slot

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        r, length = self.requests[slot], self.options.branch_length
        if tokens and not r["started"]:
            for i in range(max(0, len(r["context"]) - length), len(r["context"])):
                r["open"] = self.output.feed(r["open"], r["context"][i], length, self._breaks(r["context"], i))
            r["started"] = True
        for token in tokens:
            if not r["ended"]:
                r["open"] = self.output.feed(r["open"], token, length, token in self.eos)
            r["ended"] = r["ended"] or token in self.eos
        r["context"] = [*r["context"], *tokens][-max(length, self.options.max_query_length) - 1 :]

    def _breaks(self, tokens: Sequence[int], i: int) -> bool:
        return not self.eos.isdisjoint(tokens[max(0, i - 1) : i + 1])

    def end(self, slot: int) -> None:
        del self.requests[slot]

    def retrieve(self, slot: int, budget: int, depth: int, mode: int, sources: int) -> Arrays:
        r, order = self.requests[slot], itertools.count()
        rows: list[tuple[int, int, float, int]] = []
        known: dict[tuple[int, int], int] = {}
        seen, escape = 0, 0.0
        for q in range(min(len(r["context"]), self.options.max_query_length), 0, -1):
            if seen >= (self.options.min_nodes or 0) or len(rows) >= budget or (rows and mode == SINGLE):
                break
            suffix = r["context"][-q:]
            p = r["prompt"].locate(suffix) if sources & 1 else None
            o = self.output.locate(suffix) if sources & 2 else None
            score = self._score(p, o)
            heap: list[Any] = []

            def push(p: Any, o: Any, score: float, logp: float, level: int, parent: int, q: int = q) -> None:
                unseen = SMOOTHING / (q + level) ** 2
                for token in dict.fromkeys([*(p.children if p else ()), *(o.children if o else ())]):
                    pc, oc = p and p.children.get(token), o and o.children.get(token)
                    own = min(self._score(pc, oc), score)
                    child = logp + math.log(own / (score + unseen))
                    heapq.heappush(heap, (-own, level + 1, next(order), token, pc, oc, child, parent))  # noqa: B023

            push(p, o, score, escape, 0, NO_PARENT)
            if not heap:
                continue
            escape += math.log(SMOOTHING / q**2 / (score + SMOOTHING / q**2))
            seen = 0
            while heap and len(rows) < budget:
                own, level, _, token, pc, oc, logp, parent = heapq.heappop(heap)
                seen += 1
                row = known.setdefault((parent, token), len(rows))
                if row == len(rows):
                    rows.append((token, parent, logp, bool(pc) + 2 * bool(oc)))
                if mode == SINGLE:
                    heap.clear()
                if level < depth:
                    push(pc, oc, -own, rows[row][2], level, row)
        columns = list(zip(*rows, strict=True)) or [()] * 4
        kinds = np.int32, np.int32, np.float32, np.uint8
        tokens, parents, logps, marks = (np.array(c, dtype=k) for c, k in zip(columns, kinds, strict=True))
        return tokens, parents, logps, marks

    def _score(self, p: Node | None, o: Node | None) -> float:
        return (self.options.prompt_weight * p.hits if p else 0.0) + (o.hits if o else 0.0)

    @property
    def nodes(self) -> int:
        own = sum(r["prompt"].live for r in self.requests.values()) if self.options.eliminate else 0
        return self.output.live + self.shared.live + own

    @property
    def nbytes(self) -> int:
        return self.nodes * NODE_BYTES

    def dump(self) -> tuple[Any, ...]:
        rows: list[tuple[int, int, int]] = []
        queue = [(self.output.root, NO_PARENT)]
        for node, row in queue:  # The queue grows: breadth first.
            for token, child in node.children.items():
                queue.append((child, len(rows)))
                rows.append((token, row, int(child.hits * ONE_HIT)))
        columns = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        place = np.arange(len(rows), dtype=np.int32)
        counts, stamps = columns[2].astype(np.uint32), (place + 1).astype(np.uint32)
        return place, columns[0].astype(np.int32), columns[1].astype(np.int32), counts, stamps, len(rows) + 1

    def restore(self, dump: Dump) -> None:
        made: list[Node] = []
        for token, parent, count in zip(*(column.tolist() for column in dump[:3]), strict=True):
            above = self.output.root if parent == NO_PARENT else made[parent]
            node = above.children[token] = Node(count / ONE_HIT)
            made.append(node)
        self.output.live = len(made)
