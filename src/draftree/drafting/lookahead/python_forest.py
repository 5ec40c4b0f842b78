"""The branches that a Python trie keeps: the twin of `forest.h`."""

from __future__ import annotations

from collections.abc import Sequence

from draftree.drafting.lookahead.twins import MAX_COUNT, NO_PARENT, ONE_HIT

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
