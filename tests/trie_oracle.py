"""The oracle of `trie.c`: the same store in plain Python. Both give the same drafts under any sequence of calls."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Any

import numpy as np

from draftree.drafting.lookahead import Trie
from draftree.drafting.lookahead import dict_trie as options_module
from draftree.drafting.lookahead.dict_trie import MODES, NO_PARENT, ONE_HIT, TrieOptions

FROM_PROMPT, FROM_OUTPUT = 1, 2
MAX_COUNT = 1 << 31
HAND_STEPS = 64


class Node:
    """One token on a branch. `children` is in order of touch: the last key is the newest."""

    __slots__ = ("children", "count", "index", "parent", "pins", "stamp", "token")

    def __init__(self, token: int, parent: Node | None, index: int) -> None:
        self.token, self.parent, self.index = token, parent, index
        self.children: dict[int, Node] = {}
        self.count = self.stamp = self.pins = 0


Cursors = list[tuple[Node, int]]  # open branches: where each stands, and how deep


class Forest:
    """Key trees with hit counts below a root without a token, bounded by a clock hand that halves and frees."""

    def __init__(self, max_nodes: int, per_key: int, prune: bool) -> None:
        self.max_nodes, self.per_key, self.prune = max_nodes, per_key, prune
        self.root = Node(-1, None, NO_PARENT)
        self.nodes: list[Node | None] = []
        self.free: list[int] = []
        self.hand = 0

    @property
    def live(self) -> int:
        return len(self.nodes) - len(self.free)

    def locate(self, suffix: Sequence[int]) -> Node | None:
        node: Node | None = self.root
        for token in suffix:
            node = node.children.get(token) if node else None
        return node

    def add(self, parent: Node, token: int) -> Node:
        if not self.free:
            self.free.append(len(self.nodes))
            self.nodes.append(None)
        index = self.free.pop()
        node = self.nodes[index] = parent.children[token] = Node(token, parent, index)
        return node

    def hit(self, parent: Node, token: int, tick: int) -> Node | None:
        node = parent.children.pop(token, None)
        if node is not None:
            parent.children[token] = node
        elif self.make_room(new_key=parent is self.root):
            node = self.add(parent, token)
        else:
            return None
        if node.count < MAX_COUNT:
            node.count += ONE_HIT
        node.stamp = tick
        return node

    def make_room(self, new_key: bool) -> bool:
        for step in range(HAND_STEPS + 1):
            limit = self.max_nodes
            if self.prune and self.per_key:
                limit = min(limit, self.per_key * (len(self.root.children) + new_key))
            if self.live < limit:
                return True
            if not self.prune or step == HAND_STEPS:
                break
            if self.hand >= len(self.nodes):
                self.hand = 0
            node = self.nodes[self.hand]
            if node is not None:
                node.count = max(1, node.count // 2)  # a share of nothing has no logarithm
                self.remove(node)
            self.hand += 1
        return False

    def remove(self, node: Node) -> None:
        while node.parent is not None and not node.children and not node.pins and node.count < ONE_HIT:
            del node.parent.children[node.token]
            self.nodes[node.index] = None
            self.free.append(node.index)
            node = node.parent

    def feed(self, cursors: Cursors, token: int, tick: int, branch_length: int, ends: bool) -> Cursors:
        kept: Cursors = []
        for at, depth in cursors if ends else [*cursors, (self.root, -1)]:
            node = self.hit(at, token, tick)
            at.pins -= 1  # the root is never freed, so its own do not matter
            if node is not None and not ends and depth + 1 < branch_length:
                node.pins += 1
                kept.append((node, depth + 1))
        return kept


def close(cursors: Cursors) -> None:
    for node, _ in cursors:
        node.pins -= 1


@dataclass
class Request:
    prompt: Forest
    context: list[int]
    cursors: Cursors = field(default_factory=list)
    started: bool = False
    ended: bool = False


@dataclass(slots=True)
class Path:
    """A path below the match: its nodes in the two forests, and the row of its parent in the result."""

    score: float
    logp: float
    depth: int
    known: int  # tokens of the suffix that was found, and of the path below it
    p: Node | None
    o: Node | None
    token: int = 0
    at: int = NO_PARENT
    up: Path | None = None

    def __lt__(self, other: Path) -> bool:
        return self.rank() < other.rank()

    def rank(self) -> tuple[float, int, int, int, int]:
        o_stamp = self.o.stamp if self.o else 0
        p_stamp = self.p.stamp if self.p else 0
        return (-self.score, self.depth, -o_stamp, -p_stamp, self.token)


class Oracle:
    """A store with the methods of the compiled one."""

    def __init__(self, options: TrieOptions) -> None:
        self.options, self.scan = options, options_module.SCAN
        self.min_nodes = options.min_nodes or options.branch_length
        self.eos = frozenset(options.eos_token_ids)
        self.n_context = max(options.branch_length, options.max_query_length) + 1
        self.output = Forest(options.max_nodes, options.per_key, options.prune)
        self.shared = Forest(options.max_nodes, options.per_key, options.prune)
        self.requests: dict[int, Request] = {}
        self.tick = 0

    def feed(self, forest: Forest, cursors: Cursors, token: int, before: int | None = None) -> Cursors:
        self.tick += 1
        ends = token in self.eos or before in self.eos
        return forest.feed(cursors, token, self.tick, self.options.branch_length, ends)

    def begin(self, tokens: Sequence[int]) -> int:
        slot = next(i for i in range(len(self.requests) + 1) if i not in self.requests)
        request = Request(Forest(self.options.max_nodes, 0, False), list(tokens[-self.n_context :]))
        cursors: Cursors = []
        for before, token in pairwise([None, *tokens]):
            cursors = self.feed(self.prompts_of(request), cursors, token, before)
        close(cursors)
        self.requests[slot] = request
        return slot

    def prompts_of(self, request: Request) -> Forest:
        return request.prompt if self.options.eliminate else self.shared

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        r = self.requests[slot]
        if tokens and not r.started:
            for before, token in list(pairwise([None, *r.context]))[-self.options.branch_length :]:
                r.cursors = self.feed(self.output, r.cursors, token, before)
            r.started = True
        for token in tokens:
            if not r.ended:
                r.cursors = self.feed(self.output, r.cursors, token)
            r.ended = r.ended or token in self.eos
            r.context = [*r.context, token][-self.n_context :]

    def end(self, slot: int) -> None:
        close(self.requests.pop(slot).cursors)

    def score(self, p: Node | None, o: Node | None) -> float:
        hits = self.options.prompt_weight * (p.count / ONE_HIT) if p else 0.0
        return hits + o.count / ONE_HIT if o else hits

    def unseen(self, path: Path) -> float:
        """Hits that a path's parent is taken to have more. Behind a long text that was seen before, less is open."""
        return options_module.SMOOTHING / (path.known * path.known)

    def expand(self, path: Path, at: int) -> list[Path]:
        """The merged children of a path as a heap, of each forest the `scan` most recently touched ones."""
        tokens: dict[int, None] = {}
        for node in (path.p, path.o):
            if node is not None:
                tokens.update(dict.fromkeys(islice(reversed(node.children), self.scan)))
        kids = []
        for token in tokens:
            p = path.p.children.get(token) if path.p else None
            o = path.o.children.get(token) if path.o else None
            score = min(self.score(p, o), path.score)
            logp = path.logp + math.log(score / (path.score + self.unseen(path)))
            kids.append(Path(score, logp, path.depth + 1, path.known + 1, p, o, token, at, path))
        heapq.heapify(kids)
        return kids

    def retrieve(self, slot: int, budget: int, depth: int, mode: int, sources: int) -> Any:
        r = self.requests[slot]
        rows: list[Path] = []
        seen = 0
        escape = 0.0  # log-probability that no longer suffix knew the next token, as in PPM
        for q in range(min(len(r.context), self.options.max_query_length), 0, -1):
            if seen >= self.min_nodes or len(rows) >= budget or (rows and mode == MODES["single"]):
                break
            suffix = r.context[-q:]
            p = self.prompts_of(r).locate(suffix) if sources & FROM_PROMPT else None
            o = self.output.locate(suffix) if sources & FROM_OUTPUT else None
            match = Path(self.score(p, o), escape, 0, q, p, o)
            heap = self.expand(match, NO_PARENT)
            if not heap:
                continue
            escape += math.log(self.unseen(match) / (match.score + self.unseen(match)))
            if mode == MODES["hierarchical"]:
                seen = self.take_tree(heap, budget, depth, rows)
            else:
                seen = self.take_branches(heap, budget, depth, rows, most=1 if mode == MODES["single"] else budget)
        return (
            np.array([path.token for path in rows], dtype=np.int32),
            np.array([path.at for path in rows], dtype=np.int32),
            np.array([path.logp for path in rows], dtype=np.float32),
            np.array([FROM_PROMPT * bool(path.p) + FROM_OUTPUT * bool(path.o) for path in rows], dtype=np.uint8),
        )

    def take_tree(self, heap: list[Path], budget: int, depth: int, rows: list[Path]) -> int:
        """Adds the best paths below the match; how many nodes of it were seen."""
        seen = 0
        known = {(path.at, path.token): row for row, path in enumerate(rows)}
        while heap and len(rows) < budget:
            path = heapq.heappop(heap)
            seen += 1
            row = known.get((path.at, path.token), len(rows))
            if row == len(rows):
                rows.append(path)
            else:
                path.logp = float(np.float32(rows[row].logp))
            if path.depth < depth:
                for kid in self.expand(path, row):
                    heapq.heappush(heap, kid)
        return seen

    def take_branches(self, heap: list[Path], budget: int, depth: int, rows: list[Path], most: int) -> int:
        """Adds at most `most` whole branches, best first, each followed down its best children."""
        seen = 0
        while heap and len(rows) < budget and most:
            path = heapq.heappop(heap)
            seen += 1
            while path.depth < depth and (kids := self.expand(path, NO_PARENT)):
                path, *others = kids
                for kid in others:
                    heapq.heappush(heap, kid)
                seen += 1
            branch = [path]
            while branch[-1].up is not None and branch[-1].up.depth:
                branch.append(branch[-1].up)
            branch = branch[::-1][: budget - len(rows)]
            if not emitted_before(branch, rows):
                parents = [NO_PARENT, *range(len(rows), len(rows) + len(branch) - 1)]
                rows += [replace(step, at=parent) for step, parent in zip(branch, parents, strict=True)]
            most -= 1
        return seen

    @property
    def nodes(self) -> int:
        return self.output.live + self.shared.live + sum(r.prompt.live for r in self.requests.values())

    def dump(self) -> Any:
        nodes = [node for node in self.output.nodes if node is not None]
        return (
            np.array([node.index for node in nodes], dtype=np.int32),
            np.array([node.token for node in nodes], dtype=np.int32),
            np.array([node.parent.index for node in nodes if node.parent], dtype=np.int32),
            np.array([node.count for node in nodes], dtype=np.uint32),
            np.array([node.stamp for node in nodes], dtype=np.uint32),
            self.tick,
        )


def emitted_before(branch: list[Path], rows: list[Path]) -> bool:
    """Is the branch the beginning of one that is already in the result?"""
    tokens = [path.token for path in branch]
    starts = [row for row, path in enumerate(rows) if path.at == NO_PARENT]
    return any(
        [path.token for path in rows[start:stop]][: len(tokens)] == tokens
        for start, stop in pairwise([*starts, len(rows)])
    )


def oracle(**given: Any) -> Trie:
    """Return a `Trie` on the oracle's store."""
    trie = Trie(**given, compiled=False)
    trie._store = Oracle(trie.options)  # type: ignore[assignment]
    return trie
