"""Groups of rows that look ahead of a node, for all nodes of a tree or only for those likely to be accepted last.

BiTA's mask groups and Hidden Transfer's pseudo states serve one node each: the one that turns out to be accepted last.
That may be any node, so the papers attach a group to every node. Where rows cost, as on a CPU, most are wasted on
siblings that are hardly ever reached; then only the likeliest nodes get a group, and a node without one uses that of
its nearest ancestor, less deep by the tokens between the two. With a group at the root alone this is BiTA's
straightforward decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftree.drafting.base import Attachment, Step
from draftree.tree import TokenTree

KEPT = 512  # most layouts in the cache


class GroupNodes(NamedTuple):
    """The nodes that get a group of rows: G of each tree, in ascending order.

    Attributes:
        nodes: LongTensor [B, G], or None for all.
        depth: LongTensor [B, G].
        ancestors: BoolTensor [B, G, N].
    """

    nodes: Tensor | None
    depth: Tensor
    ancestors: Tensor


class Groups:
    """Chooses the nodes that get a group, lays out their rows, and finds the rows of the node accepted last.

    Args:
        most: most nodes of a tree that get a group, the root always among them; None for all, or as many as the shape
            finds worth their rows (`StepPlan.attach_to`).
        lay_out: makes the attachment for those nodes.
    """

    def __init__(self, most: int | None, lay_out: Callable[[GroupNodes], Attachment]) -> None:
        if most is not None and most < 1:
            raise ValueError(f"groups is {most}: let 1 node or more look ahead, or give None for all.")
        self.most = most
        self.lay_out = lay_out
        self._made: dict[tuple[Any, ...], tuple[Tensor, Attachment]] = {}
        self._last: tuple[TokenTree, int, GroupNodes] | None = None

    def clear(self) -> None:
        """Forget all layouts: what `lay_out` makes has changed."""
        self._made.clear()

    def count(self, nodes: Any, requests: int, attach_to: Any = None) -> Any:
        """How many of `nodes` nodes (a number or an array) in `requests` trees get a group, see `Drafter.rows`."""
        count = nodes if attach_to is None else np.minimum(nodes, attach_to)
        return count if self.most is None else np.minimum(count, self.most * requests)

    def layout(self, trees: TokenTree, attach_to: int | None) -> Attachment:
        """What `lay_out` makes of these trees; the same object again for the same structure and nodes with groups."""
        chosen = self.nodes_of(trees, attach_to)
        ancestors, nodes = trees.ancestors, chosen.nodes
        # Decoding meets the same few structures over and over, and those share their tensors.
        key: tuple[Any, ...] = (ancestors.shape, ancestors.device)
        if chosen.depth.shape[1] > 1:  # what the root's rows see is the same in all trees of a size
            key += (ancestors.data_ptr(), ancestors.stride())
            if nodes is not None:
                if not nodes.is_cpu:  # to name them would wait for the device
                    return self.lay_out(chosen)
                key += (nodes.numpy().tobytes(),)
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= KEPT:
                self._made.clear()
            # The tensor is kept along, so that its memory, and with it the key, is not given to another one.
            found = self._made[key] = (ancestors, self.lay_out(chosen))
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

    def find(self, step: Step, nodes: Tensor) -> tuple[Tensor, Tensor | None]:
        """Which group serves node `nodes[b]` of each tree [B, 1], and how many levels above that node it lies [B, 1].

        The second is None where every node has a group of its own.
        """
        trees = step.trees
        chosen = self.nodes_of(trees, step.attach_to)
        if chosen.nodes is None:
            return nodes[:, None], None
        if chosen.nodes.shape[1] == 1:
            return chosen.nodes, trees.depth.gather(1, nodes[:, None])
        own = trees.ancestors.gather(1, nodes[:, None, None].expand(-1, 1, trees.width))[:, 0]
        above = own.gather(1, chosen.nodes)  # the root is among them, and the deepest stands last
        group = (above * torch.arange(1, above.shape[1] + 1, device=nodes.device)).argmax(1, keepdim=True)
        return group, trees.depth.gather(1, nodes[:, None]) - chosen.depth.gather(1, group)

    def rows_ahead(self, step: Step, by_group: int, by_step: int | None, depth: int) -> list[list[int]] | None:
        """Rows of the pass [B][depth] that look ahead of the nodes accepted last, -1 where no row looks that far.

        None where rows have left in mid-stack or lie on another device, for which there are tensors (`find`), and
        where the drafter's rows were not in the pass.

        Args:
            step: what a pass brought.
            by_group: rows between the first row of a group and the first row of the next group.
            by_step: rows between one row of a group and its next row; None for as many as there are groups.
            depth: rows of a group.
        """
        trees, result = step.trees, step.result
        if not step.own_rows or result.rows is not None or not trees.tokens.is_cpu:
            return None
        chosen = self.nodes_of(trees, step.attach_to)
        nodes = None if chosen.nodes is None else chosen.nodes.tolist()
        by_step = by_step or chosen.depth.shape[1]
        found = []
        for b, accepted in enumerate(step.accepted):
            path = accepted or [0]
            group, passed = path[-1], 0
            if nodes is not None:  # the deepest on the way; the root always is among them
                group, node = max((i, node) for i, node in enumerate(nodes[b]) if node in path)
                passed = len(path) - 1 - path.index(node)
            first = step.offset + trees.width + by_group * group
            rows = [first + by_step * i for i in range(passed, depth)]
            found.append(rows + [-1] * (depth - len(rows)))
        return found


def likeliest_ends(trees: TokenTree, count: int) -> Tensor:
    """The root and the `count` - 1 nodes likeliest to be accepted last, ascending: LongTensor [B, count].

    A node is accepted last with the probability of reaching it less that of reaching one of its children.
    """
    reached = trees.logp.exp()
    ends = reached.scatter_add(1, trees.parents[:, 1:].clamp(min=0), -reached[:, 1:])
    ends[:, 0] = torch.inf
    return ends.topk(count, -1).indices.sort(-1).values


def own_logits(step: Step, layer: int, first: Tensor, stride: int, depth: int, passed: Tensor | None) -> Tensor | None:
    """Logits [B, D, V] of rows that a drafter attached, as far as they look ahead of the node accepted last.

    Args:
        step: what a pass brought.
        layer: of the tap, the number of layers.
        first: LongTensor [B, 1], number of the first of a request's rows, counted from the trees' roots as in an
            `Attachment`.
        stride: from one of them to the next.
        depth: how many there are.
        passed: LongTensor [B, 1], how many of them predict tokens that are accepted already; None for none. D is what
            they leave of `depth` for one request on the CPU, else `depth`, with -inf where nothing is left.

    Returns:
        None where the pass held no such rows.
    """
    result = step.result
    hidden = result.hidden.get(layer)
    if hidden is None or result.runner is None or not step.own_rows:
        return None
    if result.rows is None and len(first) == 1 and first.is_cpu:
        begin = step.offset + int(first)
        gone = 0 if passed is None else min(int(passed), depth)
        if gone == depth:
            return hidden.new_empty(1, 0, result.logits.shape[-1])
        return result.runner.logits(hidden[:, begin + stride * gone : begin + stride * depth : stride])
    order = torch.arange(depth, device=first.device)
    if passed is not None:
        order = passed + order
    rows = step.offset + first + stride * order.clamp(max=depth - 1)
    if result.rows is not None:  # rows have left in mid-stack: find where each one ended up
        rows = (result.rows[:, None] == rows[:, :, None]).byte().argmax(-1)
    logits = result.runner.logits(hidden.gather(1, rows[:, :, None].expand(-1, -1, hidden.shape[2])))
    return logits if passed is None else logits.masked_fill_((order >= depth)[:, :, None], -torch.inf)
