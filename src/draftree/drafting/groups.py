"""Rows that a node spawns to look ahead of it, for all nodes of a tree or only for those likely to be accepted last.

BiTA's mask groups and Hidden Transfer's pseudo states serve one node each: the one that turns out to be accepted last.
That may be any node, so the papers let every node spawn. Where rows cost, as on a CPU, most are wasted on siblings
that are hardly ever reached; then only the likeliest nodes spawn, and below a node without rows the rows of its
nearest ancestor that has some speak, less deep by what was passed. With the root's alone this is BiTA's
straightforward decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from draftree.drafting.base import Step
from draftree.tree import TokenTree

T = TypeVar("T")
KEPT = 64  # structures whose layout is remembered


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


class Groups(Generic[T]):
    """Chooses the nodes that spawn, lays out their rows, and finds the rows of the node accepted last.

    Args:
        most: nodes of a tree that spawn, the root always among them; None for all.
        lay_out: from depth [B, G] and ancestors [B, G, N] of the spawning nodes to whatever an attachment needs.
    """

    def __init__(self, most: int | None, lay_out: Callable[[Tensor, Tensor], T]) -> None:
        if most is not None and most < 1:
            raise ValueError(f"groups is {most}: let 1 node or more look ahead, or give None for all.")
        self.most = most
        self.lay_out = lay_out
        self._made: dict[tuple[Any, ...], tuple[Tensor, T]] = {}
        self._last: tuple[TokenTree, Spawners] | None = None

    def count(self, nodes: Any, requests: int) -> Any:
        """How many of `nodes` nodes (a number or an array) in `requests` trees spawn."""
        return nodes if self.most is None else np.minimum(nodes, self.most * requests)

    def layout(self, trees: TokenTree) -> T:
        """What `lay_out` makes of these trees."""
        spawners = self.spawners(trees)
        if spawners.nodes is not None:  # they go by the guesses' probability, and seldom come back
            return self.lay_out(spawners.depth, spawners.ancestors)
        # Decoding meets the same few structures over and over, and those share their tensors.
        ancestors = spawners.ancestors
        key = (ancestors.data_ptr(), ancestors.shape, ancestors.stride(), ancestors.device)
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= KEPT:
                self._made.clear()
            # The tensor is kept along, so that its memory, and with it the key, is not given to another one.
            found = self._made[key] = (ancestors, self.lay_out(spawners.depth, ancestors))
        return found[1]

    def spawners(self, trees: TokenTree) -> Spawners:
        """The nodes of `trees` that spawn; asked before and after a pass, worked out once."""
        last = self._last  # read once: another thread may put its own
        if last is not None and last[0] is trees:
            return last[1]
        if self.most is None or self.most >= trees.width:
            found = Spawners(None, trees.depth, trees.ancestors)
        else:
            nodes = likeliest_ends(trees, self.most)
            rows = nodes[:, :, None].expand(-1, -1, trees.width)
            found = Spawners(nodes, trees.depth.gather(1, nodes), trees.ancestors.gather(1, rows))
        self._last = (trees, found)
        return found

    def find(self, trees: TokenTree, nodes: Tensor) -> tuple[Tensor, Tensor | None]:
        """Which spawning node speaks for node `nodes[b]` of each tree [B, 1], and how far above it that is [B, 1].

        None for how far where every node speaks for itself.
        """
        spawners = self.spawners(trees)
        if spawners.nodes is None:
            return nodes[:, None], None
        own = trees.ancestors.gather(1, nodes[:, None, None].expand(-1, 1, trees.width))[:, 0]
        above = own.gather(1, spawners.nodes)  # the root is among them, and the deepest stands last
        group = (above * torch.arange(1, above.shape[1] + 1, device=nodes.device)).argmax(1, keepdim=True)
        return group, trees.depth.gather(1, nodes[:, None]) - spawners.depth.gather(1, group)


def likeliest_ends(trees: TokenTree, count: int) -> Tensor:
    """The root and the `count` - 1 nodes likeliest to be accepted last, ascending: LongTensor [B, count].

    A walk ends at a node with the probability of reaching it less that of reaching its children.
    """
    reached = trees.logp.exp()
    ends = reached.scatter_add(1, trees.parents[:, 1:].clamp(min=0), -reached[:, 1:])
    ends[:, 0] = torch.inf
    return ends.topk(count, -1).indices.sort(-1).values


def logits_of(step: Step, first: Tensor, stride: int, depth: int, passed: Tensor | None) -> Tensor:
    """Logits [B, depth, V] of a node's own rows, as far as they look ahead of the node accepted last.

    Args:
        step: what a pass brought.
        first: LongTensor [B, 1], number of the first of the rows, counted from the trees' roots as in an `Attachment`.
        stride: from one of them to the next.
        depth: how many there are.
        passed: LongTensor [B, 1], how many of them speak of tokens that are accepted by now; the depths that this
            leaves without a row read -inf everywhere. None for no such rows.
    """
    order = torch.arange(depth, device=first.device)
    if passed is not None:
        order = passed + order
    wanted = first + stride * (order if passed is None else order.clamp(max=depth - 1))
    result = step.result
    if result.rows is not None:  # rows have left or joined in mid-stack: find where each one ended up
        standing = result.rows[:, None, step.offset :] - step.offset
        wanted = (standing == wanted[:, :, None]).byte().argmax(-1)
    logits = result.logits.gather(1, wanted[:, :, None].expand(-1, -1, result.logits.shape[2]))
    return logits if passed is None else logits.masked_fill((order >= depth)[:, :, None], -torch.inf)
