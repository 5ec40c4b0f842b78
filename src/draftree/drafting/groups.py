"""Groups of rows that look ahead of a node, for all nodes of a tree or only for those likely to be accepted last.

BiTA's mask groups and Hidden Transfer's pseudo states serve one node each: the one that turns out to be accepted last.
That may be any node, so the papers attach a group to every node. Where rows cost, as on a CPU, most are wasted on
siblings that are hardly ever reached; then only the likeliest nodes get a group, and a node without one uses that of
its nearest ancestor, less deep by the tokens between the two. With a group at the root alone this is BiTA's
straightforward decoding.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftree.drafting.base import Attachment, Step
from draftree.drafting.in_model import InModelDrafter
from draftree.errors import check_least
from draftree.tree import TokenTree

KEPT = 512  # most layouts in the cache


class GroupNodes(NamedTuple):
    """The nodes that get a group of rows: G of each tree, in ascending order."""

    nodes: Tensor | None  # LongTensor [B, G], or None for all
    depth: Tensor  # LongTensor [B, G]
    ancestors: Tensor  # BoolTensor [B, G, N]


class Groups:
    """Chooses the nodes that get a group, lays out their rows, and finds the group of the node accepted last.

    Args:
        most: most nodes of a tree that get a group, the root always among them; None for all, or as many as the shape
            finds worth their rows (`StepPlan.attach_to`).
        lay_out: makes the attachment for those nodes, in the target's type.
    """

    def __init__(self, most: int | None, lay_out: Callable[[GroupNodes, torch.dtype], Attachment]) -> None:
        check_least(1, groups=most)
        self.most = most
        self.lay_out = lay_out
        self._made: dict[tuple[Any, ...], tuple[Tensor, Attachment]] = {}
        self._last: tuple[TokenTree, int, GroupNodes] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Options alone: layouts are found by the addresses of tensors, which a copy's are not at."""
        return vars(self) | {"_made": {}, "_last": None}

    def clear(self) -> None:
        """Forget all layouts: what `lay_out` makes has changed."""
        self._made.clear()

    def count(self, nodes: Any, requests: int, attach_to: Any = None) -> Any:
        """How many of `nodes` nodes (a number or an array) in `requests` trees get a group, see `Drafter.rows`."""
        count = nodes if attach_to is None else np.minimum(nodes, attach_to)
        return count if self.most is None else np.minimum(count, self.most * requests)

    def layout(self, trees: TokenTree, attach_to: int | None, dtype: torch.dtype) -> Attachment:
        """What `lay_out` makes of these trees; the same object again for the same structure and nodes with groups."""
        chosen = self.nodes_of(trees, attach_to)
        ancestors, nodes = trees.ancestors, chosen.nodes
        # Decoding meets the same few structures over and over, and those share their tensors.
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
                self._made.clear()
            # The tensor is kept along, so that its memory, and with it the key, is not given to another one.
            found = self._made[key] = (ancestors, self.lay_out(chosen, dtype))
        return found[1]

    def nodes_of(self, trees: TokenTree, attach_to: int | None) -> GroupNodes:
        """The nodes of `trees` that get a group; called before and after a pass, computed once."""
        most = self._most(attach_to, trees.width)
        last = self._last  # read once: another thread may put its own
        if last is not None and last[0] is trees and last[1] == most:
            return last[2]
        if most >= trees.width:
            found = GroupNodes(None, trees.depth, trees.ancestors)
        elif most == 1:
            root = trees.depth[:, :1]  # which is 0, as the root's number
            found = GroupNodes(root, root, trees.ancestors[:, :1])
        else:
            nodes = likeliest_ends(trees, most)
            rows = nodes[:, :, None].expand(-1, -1, trees.width)
            found = GroupNodes(nodes, trees.depth.gather(1, nodes), trees.ancestors.gather(1, rows))
        self._last = (trees, most, found)
        return found

    def _most(self, attach_to: int | None, width: int) -> int:
        most = width if attach_to is None else attach_to
        return max(1, most if self.most is None else min(most, self.most))

    def serving(self, step: Step, paths: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """For each tree which group serves the last node of a path from the root, and how many levels above that node.

        Args:
            step: what a pass brought.
            paths: nodes of each tree, the root first.
        """
        chosen = self.nodes_of(step.trees, step.attach_to)
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
        groups: see `Groups`.
    """

    def __init__(self, shapes: Mapping[str, int], steps: int, *, groups: int | None, **options: Any) -> None:
        super().__init__(shapes, steps, **options, groups=groups)
        self._groups = Groups(groups, self.lay_out)

    @abstractmethod
    def lay_out(self, chosen: GroupNodes, dtype: torch.dtype) -> Attachment:
        """The rows of all groups, for trees of one structure and a target of this type."""

    @abstractmethod
    def row_of(self, group: int, step: int, groups: int) -> int:
        """Number of row `step` (0 .. depth - 1) of a group among all rows of `groups` groups."""

    def attach(self, trees: TokenTree, attach_to: int | None, dtype: torch.dtype) -> Attachment:
        return self._groups.layout(trees, attach_to, dtype)

    def draft_logits(self, step: Step, paths: Sequence[Sequence[int]]) -> Tensor | None:
        """See `InModelDrafter.draft_logits`: row i of a node's group predicts the token i + 1 places after it."""
        width = step.trees.width
        groups = self._groups.nodes_of(step.trees, step.attach_to).depth.shape[1]
        numbers = []
        for group, passed in self._groups.serving(step, paths):
            # The first rows of an ancestor's group speak of the tokens between the two.
            rows = [width + self.row_of(group, i, groups) for i in range(passed, self.depth)]
            numbers.append(rows + [-1] * (self.depth - len(rows)))
        return step.own_logits(self._shapes["layers"], numbers)


def likeliest_ends(trees: TokenTree, count: int) -> Tensor:
    """The root and the `count` - 1 nodes most likely to be the last accepted, ascending: LongTensor [B, count].

    A node is accepted last with the probability of reaching it less that of reaching one of its children.
    """
    reached = trees.logp.exp()
    ends = reached.scatter_add(1, trees.parents[:, 1:].clamp(min=0), -reached[:, 1:])
    ends[:, 0] = torch.inf
    return ends.topk(count, -1).indices.sort(-1).values
