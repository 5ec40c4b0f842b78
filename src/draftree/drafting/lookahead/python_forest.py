"""The branches that a Python trie keeps: the twin of `forest.h`."""

from __future__ import annotations

from collections.abc import Sequence

from draftree.drafting.lookahead.twins import MAX_COUNT, ONE_HIT

HAND_STEPS = 64


class Node:
    """One token on a branch. `children` is in order of touch: the last key is the newest."""

    __slots__ = ("children", "count", "index", "parent", "pins", "stamp", "token")

    def __init__(self, token: int, parent: Node | None, index: int) -> None:
        self.token = token
        self.parent = parent
        self.index = index
        self.children: dict[int, Node] = {}
        self.count = 0
        self.stamp = 0
        self.pins = 0


Cursors = list[tuple[Node, int]]  # open branches: where each stands, and how deep


class Forest:
    """Key trees with hit counts, bounded by a clock hand that halves and frees."""

    def __init__(self, max_nodes: int, per_key: int, prune: bool) -> None:
        self.max_nodes, self.per_key, self.prune = max_nodes, per_key, prune
        self.clear()

    def clear(self) -> None:
        self.roots: dict[int, Node] = {}
        self.nodes: list[Node | None] = []
        self.free: list[int] = []
        self.hand = 0

    @property
    def live(self) -> int:
        return len(self.nodes) - len(self.free)

    def find(self, parent: Node | None, token: int) -> Node | None:
        return (self.roots if parent is None else parent.children).get(token)

    def locate(self, suffix: Sequence[int]) -> Node | None:
        node = None
        for token in suffix:
            node = self.find(node, token)
            if node is None:
                break
        return node

    def add(self, parent: Node | None, token: int) -> Node:
        if self.free:
            node = Node(token, parent, self.free.pop())
            self.nodes[node.index] = node
        else:
            node = Node(token, parent, len(self.nodes))
            self.nodes.append(node)
        (self.roots if parent is None else parent.children)[token] = node
        return node

    def hit(self, parent: Node | None, token: int, tick: int) -> Node | None:
        siblings = self.roots if parent is None else parent.children
        node = siblings.get(token)
        if node is None:
            if not self.make_room(new_key=parent is None):
                return None
            node = self.add(parent, token)
        else:
            siblings[token] = siblings.pop(token)
        if node.count < MAX_COUNT:
            node.count += ONE_HIT
        node.stamp = tick
        return node

    def make_room(self, new_key: bool) -> bool:
        for step in range(HAND_STEPS + 1):
            limit = self.max_nodes
            if self.prune and self.per_key:
                limit = min(limit, self.per_key * (len(self.roots) + new_key))
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

    def remove(self, node: Node | None) -> None:
        while node is not None and not node.children and not node.pins and node.count < ONE_HIT:
            del (self.roots if node.parent is None else node.parent.children)[node.token]
            self.nodes[node.index] = None
            self.free.append(node.index)
            node = node.parent

    def feed(self, cursors: Cursors, token: int, tick: int, branch_length: int, ends: bool) -> Cursors:
        kept: Cursors = []
        for at, depth in cursors:
            node = self.hit(at, token, tick)
            at.pins -= 1
            if node is not None and not ends and depth + 1 < branch_length:
                node.pins += 1
                kept.append((node, depth + 1))
        if not ends and (root := self.hit(None, token, tick)) is not None:
            root.pins += 1
            kept.append((root, 0))
        return kept


def close(cursors: Cursors) -> None:
    for node, _ in cursors:
        node.pins -= 1
