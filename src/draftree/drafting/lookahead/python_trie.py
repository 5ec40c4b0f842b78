"""The Python twin of the Lookahead trie: dicts and a heap, written to be read.

It is the fallback where no C compiler was found, and the oracle of `trie.c`: under any sequence of calls
both give the same drafts to the last element (tests/test_trie_twins.py). A change here is a change there. The
rules of the store and of retrieval are described in `trie.py`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from draftree.drafting.lookahead import twins
from draftree.drafting.lookahead.python_forest import ONE_HIT, Cursors, Forest, Node, close
from draftree.drafting.lookahead.twins import FROM_OUTPUT, FROM_PROMPT, MODES, NO_PARENT, Arrays, Dump, TrieOptions

NODE_BYTES = 400  # a node, its dict and its share of the tables, as sys.getsizeof adds them up


@dataclass
class Request:
    prompt: Forest
    context: list[int]
    cursors: Cursors = field(default_factory=list)
    started: bool = False
    ended: bool = False


@dataclass
class Path:
    """A path below the match: its nodes in the two forests, and where its parent is in the result."""

    score: float
    logp: float
    depth: int
    known: int  # tokens of the suffix that was found, and of the path below it
    p: Node | None
    o: Node | None
    token: int = 0
    at: int = NO_PARENT
    up: Path | None = None

    def rank(self) -> tuple[float, int, int, int, int]:
        o_stamp = self.o.stamp if self.o else 0
        p_stamp = self.p.stamp if self.p else 0
        return (-self.score, self.depth, -o_stamp, -p_stamp, self.token)

    def __lt__(self, other: Path) -> bool:
        return self.rank() < other.rank()


class PythonTrie:
    """Same calls as `CTrie`; arguments were checked by `Trie`."""

    def __init__(self, options: TrieOptions) -> None:
        self.options, self.scan = options, twins.SCAN
        self.min_nodes = options.min_nodes or options.branch_length
        self.eos = frozenset(options.eos_token_ids)
        self.n_context = max(options.branch_length, options.max_query_length)
        self.output = Forest(options.max_nodes, options.per_key, options.prune)
        self.shared = Forest(options.max_nodes, options.per_key, options.prune)
        self.requests: dict[int, Request] = {}
        self.tick = 0

    def feed(self, forest: Forest, cursors: Cursors, token: int) -> Cursors:
        self.tick += 1
        return forest.feed(cursors, token, self.tick, self.options.branch_length, token in self.eos)

    def begin(self, tokens: Sequence[int]) -> int:
        slot = next(i for i in range(len(self.requests) + 1) if i not in self.requests)
        request = Request(Forest(self.options.max_nodes, 0, False), list(tokens[-self.n_context :]))
        forest = request.prompt if self.options.eliminate else self.shared
        cursors: Cursors = []
        for token in tokens:
            cursors = self.feed(forest, cursors, token)
        close(cursors)
        self.requests[slot] = request
        return slot

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        r = self.requests[slot]
        if tokens and not r.started:
            for token in r.context[-self.options.branch_length :]:
                r.cursors = self.feed(self.output, r.cursors, token)
            r.started = True
        for token in tokens:
            if not r.ended:
                r.cursors = self.feed(self.output, r.cursors, token)
            r.ended = r.ended or token in self.eos
            r.context = [*r.context, token][-self.n_context :]

    def end(self, slot: int) -> None:
        close(self.requests.pop(slot).cursors)

    def warm(self, tokens: Sequence[int]) -> None:
        cursors: Cursors = []
        for token in tokens:
            cursors = self.feed(self.output, cursors, token)
            if token in self.eos:
                break
        close(cursors)

    def clear(self) -> None:
        for request in self.requests.values():
            request.cursors = []
        self.output.clear()
        self.shared.clear()

    def score(self, p: Node | None, o: Node | None) -> float:
        hits = 0.0
        if p is not None:
            hits += self.options.prompt_weight * (p.count / ONE_HIT)
        if o is not None:
            hits += o.count / ONE_HIT
        return hits

    def unseen(self, path: Path) -> float:
        """Hits that a path's parent is taken to have more. Behind a long text that was seen before, less is open."""
        return twins.SMOOTHING / (path.known * path.known)

    def expand(self, path: Path, at: int) -> list[Path]:
        """The merged children of a path, of each forest the `scan` most recently touched ones."""
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
        return kids

    def retrieve(self, slot: int, budget: int, depth: int, mode: int, sources: int) -> Arrays:
        r = self.requests[slot]
        prompt = r.prompt if self.options.eliminate else self.shared
        rows: list[tuple[Path, int]] = []
        seen = 0
        escape = 0.0  # log-probability that no longer suffix knew the next token, as in PPM
        for q in range(min(len(r.context), self.options.max_query_length), 0, -1):
            if seen >= self.min_nodes or len(rows) >= budget:
                break
            suffix = r.context[-q:]
            p = prompt.locate(suffix) if sources & FROM_PROMPT else None
            o = self.output.locate(suffix) if sources & FROM_OUTPUT else None
            match = Path(self.score(p, o), escape, 0, q, p, o)
            if not any(node and node.children for node in (p, o)):
                continue
            escape += math.log(self.unseen(match) / (match.score + self.unseen(match)))
            if mode == MODES["single"]:
                while len(rows) < budget and match.depth < depth and (kids := self.expand(match, len(rows) - 1)):
                    match = min(kids)
                    rows.append((match, match.at))
                break
            elif mode == MODES["parallel"]:
                seen = self.take_branches(match, budget, depth, rows)
            else:
                seen = self.take_tree(match, budget, depth, rows)
        return (
            np.array([path.token for path, _ in rows], dtype=np.int32),
            np.array([parent for _, parent in rows], dtype=np.int32),
            np.array([path.logp for path, _ in rows], dtype=np.float32),
            np.array([FROM_PROMPT * bool(path.p) + FROM_OUTPUT * bool(path.o) for path, _ in rows], dtype=np.uint8),
        )

    def take_tree(self, match: Path, budget: int, depth: int, rows: list[tuple[Path, int]]) -> int:
        """Adds the best paths below the match; how many nodes of it were seen."""
        seen = 0
        known = {(parent, path.token): row for row, (path, parent) in enumerate(rows)}
        heap = self.expand(match, NO_PARENT)
        heapq.heapify(heap)
        while heap and len(rows) < budget:
            path = heapq.heappop(heap)
            seen += 1
            row = known.get((path.at, path.token))
            if row is None:
                row = len(rows)
                rows.append((path, path.at))
            else:
                path.logp = float(np.float32(rows[row][0].logp))
            if path.depth < depth:
                for kid in self.expand(path, row):
                    heapq.heappush(heap, kid)
        return seen

    def take_branches(self, match: Path, budget: int, depth: int, rows: list[tuple[Path, int]]) -> int:
        """Adds whole branches, best first, each followed down its best children."""
        seen = 0
        heap = self.expand(match, NO_PARENT)
        heapq.heapify(heap)
        while heap and len(rows) < budget:
            path = heapq.heappop(heap)
            seen += 1
            while path.depth < depth and (kids := self.expand(path, NO_PARENT)):
                best = min(kids)
                for kid in kids:
                    if kid is not best:
                        heapq.heappush(heap, kid)
                path = best
                seen += 1
            branch: list[Path] = []
            step: Path | None = path
            while step is not None and step.depth > 0:
                branch.append(step)
                step = step.up
            branch = branch[::-1][: budget - len(rows)]
            if not emitted_before(branch, rows):
                first = len(rows)
                rows += [(step, first + i - 1 if i else NO_PARENT) for i, step in enumerate(branch)]
        return seen

    @property
    def nodes(self) -> int:
        return self.output.live + self.shared.live + sum(r.prompt.live for r in self.requests.values())

    @property
    def nbytes(self) -> int:
        return self.nodes * NODE_BYTES

    def dump(self) -> Dump:
        nodes = [node for node in self.output.nodes if node is not None]
        return (
            np.array([node.index for node in nodes], dtype=np.int32),
            np.array([node.token for node in nodes], dtype=np.int32),
            np.array([node.parent.index if node.parent else NO_PARENT for node in nodes], dtype=np.int32),
            np.array([node.count for node in nodes], dtype=np.uint32),
            np.array([node.stamp for node in nodes], dtype=np.uint32),
            self.tick,
        )

    def restore(self, dump: Dump) -> None:
        _, tokens, parents, counts, stamps, self.tick = dump
        made: list[Node] = []
        columns = (tokens.tolist(), parents.tolist(), counts.tolist(), stamps.tolist())
        for token, parent, count, stamp in zip(*columns, strict=True):
            node = self.output.add(None if parent < 0 else made[parent], token)
            node.count, node.stamp = count, stamp
            made.append(node)


def emitted_before(branch: list[Path], rows: list[tuple[Path, int]]) -> bool:
    """Is the branch the beginning of one that is already in the result?"""
    tokens = [path.token for path in branch]
    starts = [row for row, (_, parent) in enumerate(rows) if parent == NO_PARENT]
    stops = [*starts[1:], len(rows)]
    return any(
        [path.token for path, _ in rows[start:stop]][: len(tokens)] == tokens
        for start, stop in zip(starts, stops, strict=False)
    )
