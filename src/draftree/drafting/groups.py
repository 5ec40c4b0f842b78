"""Rows that a node spawns to look ahead of it, for all nodes of a tree or only for those likely to be accepted last.

BiTA's mask groups and Hidden Transfer's pseudo states serve one node each: the one that turns out to be accepted last.
That may be any node, so the papers let every node spawn. Where rows cost, as on a CPU, most are wasted on siblings
that are hardly ever reached; then only the likeliest nodes spawn, and below a node without rows the rows of its
nearest ancestor that has some speak, less deep by what was passed. With the root's alone this is BiTA's
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

KEPT = 512  # layouts that are remembered


class Spawners(NamedTuple):
    """The nodes that spawn, G of each tree, ascending.

    Attributes:
        nodes: LongTensor [B, G], or None for all.
        depth: LongTensor [B, G].
        ancestors: BoolTensor [B, G, N].
    """

    nodes: Tensor | None
    depth: Tensor
    ancestors: Tensor


class Groups:
    """Chooses the nodes that spawn, lays out their rows, and finds the rows of the node accepted last.

    Args:
        most: nodes of a tree that spawn, the root always among them; None for all, or as many as the shape finds worth
            their rows (`StepPlan.attach_to`).
        lay_out: the attachment for spawning nodes.
    """

    def __init__(self, most: int | None, lay_out: Callable[[Spawners], Attachment]) -> None:
        if most is not None and most < 1:
            raise ValueError(f"groups is {most}: let 1 node or more look ahead, or give None for all.")
        self.most = most
        self.lay_out = lay_out
        self._made: dict[tuple[Any, ...], tuple[Tensor, Attachment]] = {}
        self._last: tuple[TokenTree, int, Spawners] | None = None

    def clear(self) -> None:
        """Forget all layouts: what `lay_out` makes has changed."""
        self._made.clear()

    def count(self, nodes: Any, requests: int, spawning: Any = None) -> Any:
        """How many of `nodes` nodes (a number or an array) in `requests` trees spawn, see `Drafter.rows`."""
        count = nodes if spawning is None else np.minimum(nodes, spawning)
        return count if self.most is None else np.minimum(count, self.most * requests)

    def layout(self, trees: TokenTree, attach_to: int | None) -> Attachment:
        """What `lay_out` makes of these trees; the same again for trees of the same structure and spawning nodes."""
        spawners = self.spawners(trees, attach_to)
        ancestors, nodes = trees.ancestors, spawners.nodes
        # Decoding meets the same few structures over and over, and those share their tensors.
        key: tuple[Any, ...] = (ancestors.shape, ancestors.device)
        if spawners.depth.shape[1] > 1:  # what the root's rows see is the same in all trees of a size
            key += (ancestors.data_ptr(), ancestors.stride())
            if nodes is not None:
                if not nodes.is_cpu:  # to name them would wait for the device
                    return self.lay_out(spawners)
                key += (nodes.numpy().tobytes(),)
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= KEPT:
                self._made.clear()
            # The tensor is kept along, so that its memory, and with it the key, is not given to another one.
            found = self._made[key] = (ancestors, self.lay_out(spawners))
        return found[1]

    def spawners(self, trees: TokenTree, attach_to: int | None) -> Spawners:
        """The nodes of `trees` that spawn; asked before and after a pass, worked out once."""
        most = self._most(attach_to, trees.width)
        last = self._last  # read once: another thread may put its own
        if last is not None and last[0] is trees and last[1] == most:
            return last[2]
        if most >= trees.width:
            found = Spawners(None, trees.depth, trees.ancestors)
        elif most == 1:
            root = trees.depth[:, :1]  # which is 0, as the root's number
            found = Spawners(root, root, trees.ancestors[:, :1])
        else:
            nodes = likeliest_ends(trees, most)
            rows = nodes[:, :, None].expand(-1, -1, trees.width)
            found = Spawners(nodes, trees.depth.gather(1, nodes), trees.ancestors.gather(1, rows))
        self._last = (trees, most, found)
        return found

    def _most(self, attach_to: int | None, width: int) -> int:
        most = width if attach_to is None else attach_to
        return max(1, most if self.most is None else min(most, self.most))

    def find(self, step: Step, nodes: Tensor) -> tuple[Tensor, Tensor | None]:
        """Which spawning node speaks for node `nodes[b]` of each tree [B, 1], and how far above it that is [B, 1].

        None for how far where every node speaks for itself.
        """
        trees = step.trees
        spawners = self.spawners(trees, step.attach_to)
        if spawners.nodes is None:
            return nodes[:, None], None
        if spawners.nodes.shape[1] == 1:
            return spawners.nodes, trees.depth.gather(1, nodes[:, None])
        own = trees.ancestors.gather(1, nodes[:, None, None].expand(-1, 1, trees.width))[:, 0]
        above = own.gather(1, spawners.nodes)  # the root is among them, and the deepest stands last
        group = (above * torch.arange(1, above.shape[1] + 1, device=nodes.device)).argmax(1, keepdim=True)
        return group, trees.depth.gather(1, nodes[:, None]) - spawners.depth.gather(1, group)

    def rows_ahead(self, step: Step, by_group: int, by_step: int | None, depth: int) -> list[list[int]] | None:
        """Rows of the pass [B][depth] that look ahead of the nodes accepted last, -1 where none does so far.

        None where rows have left in mid-stack or lie on another device, for which there are tensors (`find`), and
        where the drafter's rows were not in the pass.

        Args:
            step: what a pass brought.
            by_group: rows from the first of one spawning node's to the next one's.
            by_step: rows from one of a node's to the next; None for as many as there are spawning nodes.
            depth: how many of them a node has.
        """
        trees, result = step.trees, step.result
        if not step.own_rows or result.rows is not None or not trees.tokens.is_cpu:
            return None
        spawners = self.spawners(trees, step.attach_to)
        nodes = None if spawners.nodes is None else spawners.nodes.tolist()
        by_step = by_step or spawners.depth.shape[1]
        found = []
        for b, walked in enumerate(step.accepted):
            path = walked or [0]
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

    A walk ends at a node with the probability of reaching it less that of reaching its children.
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
        passed: LongTensor [B, 1], how many of them speak of tokens that are accepted by now; None for none. D is what
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
    wanted = step.offset + first + stride * order.clamp(max=depth - 1)
    if result.rows is not None:  # rows have left in mid-stack: find where each one ended up
        wanted = (result.rows[:, None] == wanted[:, :, None]).byte().argmax(-1)
    logits = result.runner.logits(hidden.gather(1, wanted[:, :, None].expand(-1, -1, hidden.shape[2])))
    return logits if passed is None else logits.masked_fill_((order >= depth)[:, :, None], -torch.inf)
