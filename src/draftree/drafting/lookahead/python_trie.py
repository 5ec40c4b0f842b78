"""The Python twin of the Lookahead trie: dicts and a heap, written to be read.

It is the fallback where no C compiler was found, and the oracle of `trie.c`: under any sequence of calls
both give the same drafts to the last element (tests/drafting/test_trie_twins.py). A change here is a change there. The
rules of the store and of retrieval are described in `trie.py`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise

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
        cursors: Cursors = []
        for token in tokens:
            cursors = self.feed(self.prompts_of(request), cursors, token)
        close(cursors)
        self.requests[slot] = request
        return slot

    def prompts_of(self, request: Request) -> Forest:
        return request.prompt if self.options.eliminate else self.shared

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

    def score(self, p: Node | None, o: Node | None) -> float:
        hits = self.options.prompt_weight * (p.count / ONE_HIT) if p else 0.0
        return hits + o.count / ONE_HIT if o else hits

    def unseen(self, path: Path) -> float:
        """Hits that a path's parent is taken to have more. Behind a long text that was seen before, less is open."""
        return twins.SMOOTHING / (path.known * path.known)

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

    def retrieve(self, slot: int, budget: int, depth: int, mode: int, sources: int) -> Arrays:
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

    @property
    def nbytes(self) -> int:
        return self.nodes * NODE_BYTES

    def dump(self) -> Dump:
        nodes = [node for node in self.output.nodes if node is not None]
        return (
            np.array([node.index for node in nodes], dtype=np.int32),
            np.array([node.token for node in nodes], dtype=np.int32),
            np.array([node.parent.index for node in nodes if node.parent], dtype=np.int32),
            np.array([node.count for node in nodes], dtype=np.uint32),
            np.array([node.stamp for node in nodes], dtype=np.uint32),
            self.tick,
        )

    def restore(self, dump: Dump) -> None:
        _, *columns, self.tick = dump
        made: list[Node] = []
        for token, parent, count, stamp in zip(*(column.tolist() for column in columns), strict=True):
            node = self.output.add(self.output.root if parent == NO_PARENT else made[parent], token)
            node.count, node.stamp = count, stamp
            made.append(node)


def emitted_before(branch: list[Path], rows: list[Path]) -> bool:
    """Is the branch the beginning of one that is already in the result?"""
    tokens = [path.token for path in branch]
    starts = [row for row, path in enumerate(rows) if path.at == NO_PARENT]
    return any(
        [path.token for path in rows[start:stop]][: len(tokens)] == tokens
        for start, stop in pairwise([*starts, len(rows)])
    )
