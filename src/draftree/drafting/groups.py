"""Groups of rows that look ahead of a node, for all nodes of a tree or only for those likely to be accepted last.

BiTA's mask groups and Hidden Transfer's pseudo states serve one node each: the one that turns out to be accepted last.
That may be any node, so the papers attach a group to every node. Where rows cost, as on a CPU, most are wasted on
siblings that are hardly ever reached; then only the likeliest nodes get a group, and a node without one uses that of
its nearest ancestor, less deep by the tokens between the two. With a group at the root alone this is BiTA's
straightforward decoding.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftree.drafting.base import Attachment, Step
from draftree.drafting.in_model import InModelDrafter
from draftree.errors import check_least
from draftree.tree import TokenTree

KEPT = 16  # layouts; each of a tree with rows at all nodes may hold a megabyte


class GroupNodes(NamedTuple):
    """The nodes that get a group of rows: G of each tree, in ascending order."""

    nodes: Tensor | None  # LongTensor [B, G], or None for all
    depth: Tensor  # LongTensor [B, G]
    ancestors: Tensor  # BoolTensor [B, G, N]


def nodes_of(trees: TokenTree, most: int | None, attach_to: int | None) -> GroupNodes:
    """Return the nodes of `trees` that get a group; the root is always one.

    Args:
        trees: of a step.
        most: nodes of a tree that the drafter gives one; None for all.
        attach_to: nodes of a tree that the shape finds worth the rows (`StepPlan.attach_to`); None for all.
    """
    count = max(1, min(n for n in (trees.width, most, attach_to) if n is not None))
    if count == trees.width:
        return GroupNodes(None, trees.depth, trees.ancestors)
    if count == 1:
        root = trees.depth[:, :1]  # which is 0, as the root's number
        return GroupNodes(root, root, trees.ancestors[:, :1])
    nodes = likeliest_ends(trees, count)
    rows = nodes[:, :, None].expand(-1, -1, trees.width)
    return GroupNodes(nodes, trees.depth.gather(1, nodes), trees.ancestors.gather(1, rows))


def serving(chosen: GroupNodes, paths: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return for each tree the group that serves the last node of a path, and its levels above that node.

    Args:
        chosen: the nodes with groups.
        paths: nodes of each tree, the root first.
    """
    if chosen.nodes is None:
        return [(path[-1], 0) for path in paths]
    if chosen.nodes.shape[1] == 1:
        return [(0, len(path) - 1) for path in paths]
    found = []
    for nodes, path in zip(chosen.nodes.tolist(), paths, strict=True):
        # The deepest on the way; the root always is among them.
        group, node = max((i, node) for i, node in enumerate(nodes) if node in path)
        found.append((group, len(path) - 1 - path.index(node)))
    return found


class GroupDrafter(InModelDrafter):
    """Base of the drafters that attach groups of rows: which nodes get one, and the rows of the node accepted last.

    Args:
        shapes, steps, options: see `InModelDrafter`.
        groups: most nodes of a tree that get a group, the root always among them; None for all, or as many as the shape
            finds worth their rows (`StepPlan.attach_to`).
    """

    def __init__(self, shapes: Mapping[str, int], steps: int, *, groups: int | None, **options: Any) -> None:
        super().__init__(shapes, steps, **options, groups=groups)
        check_least(1, groups=groups)
        self.groups = groups
        self._made: dict[tuple[Any, ...], tuple[Tensor, Attachment]] = {}  # layouts, see `attach`
        self._chosen: tuple[Tensor, int | None, GroupNodes] | None = None  # see `_nodes`

    def __getstate__(self) -> dict[str, Any]:
        """See `InModelDrafter`; layouts are found by the addresses of tensors, which a copy's are not at."""
        return super().__getstate__() | {"_made": {}, "_chosen": None}

    @abstractmethod
    def lay_out(self, chosen: GroupNodes, dtype: torch.dtype) -> Attachment:
        """Return the rows of all groups, for trees of one structure and a target of this type."""

    @abstractmethod
    def row_of(self, group: int, step: int, groups: int) -> int:
        """Return the number of row `step` (0 .. depth - 1) of a group among all rows of `groups` groups."""

    def group_count(self, nodes: Any, requests: int, attach_to: Any = None) -> Any:
        """Return how many of `nodes` nodes (a number or an array) of `requests` trees get a group; see `rows`."""
        count = nodes if attach_to is None else np.minimum(nodes, attach_to)
        return count if self.groups is None else np.minimum(count, self.groups * requests)

    def attach(self, trees: TokenTree, attach_to: int | None, dtype: torch.dtype) -> Attachment:
        """Return the layout of these trees by `lay_out`, cached by structure and by nodes with groups."""
        chosen = self._nodes(trees, attach_to)
        ancestors, nodes = trees.ancestors, chosen.nodes
        # A static tree has one structure, and what the root's rows see few.
        key: tuple[Any, ...] = (ancestors.shape, ancestors.device, dtype)
        if chosen.depth.shape[1] > 1:  # what the root's rows see is the same in all trees of a size
            key += (ancestors.data_ptr(), ancestors.stride())
            if nodes is not None:
                if not nodes.is_cpu:  # to name them would wait for the device
                    return self.lay_out(chosen, dtype)
                key += (nodes.numpy().tobytes(),)
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= KEPT:
                self._made.pop(next(iter(self._made), key), None)  # another thread may have been faster
            # The tensor is kept along, so that its memory, and with it the key, is not given to another one.
            found = self._made[key] = (ancestors, self.lay_out(chosen, dtype))
        return found[1]

    def _nodes(self, trees: TokenTree, attach_to: int | None) -> GroupNodes:
        """See `nodes_of`; the same before and after a pass, as a device may add in another order the second time."""
        last = self._chosen  # read once, as another thread may put its own
        if last is None or last[0] is not trees.logp or last[1] != attach_to:
            last = self._chosen = trees.logp, attach_to, nodes_of(trees, self.groups, attach_to)
        return last[2]

    def draft_logits(self, step: Step, paths: Sequence[Sequence[int]]) -> Tensor | None:
        """See `InModelDrafter.draft_logits`: row i of a node's group predicts the token i + 1 places after it."""
        chosen, width = self._nodes(step.trees, step.attach_to), step.trees.width
        groups = chosen.depth.shape[1]
        numbers = []
        for group, passed in serving(chosen, paths):
            # The first rows of an ancestor's group speak of the tokens between the two.
            rows = [width + self.row_of(group, i, groups) for i in range(passed, self.depth)]
            numbers.append(rows + [-1] * (self.depth - len(rows)))
        return step.own_logits(self._shapes["layers"], numbers)


def likeliest_ends(trees: TokenTree, count: int) -> Tensor:
    """Return the root and the `count` - 1 nodes likeliest to be accepted last, ascending: LongTensor [B, count].

    A node is accepted last with the probability of reaching it less that of reaching one of its children.
    """
    reached = trees.logp.exp()
    ends = reached.scatter_add(1, trees.parents[:, 1:].clamp(min=0), -reached[:, 1:])
    ends[:, 0] = torch.inf
    return ends.topk(count, -1).indices.sort(-1).values
