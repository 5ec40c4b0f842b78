"""Trees from trees: the best n nodes, and what a pruner leaves. Both stay on the trees' device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftree.tree.arrays import TreeArrays
from draftree.tree.builders import NOTHING, PADDING, Fields, per_request
from draftree.tree.structure import any_above, moved, on_device


def best(tree: TreeArrays, n: int | Sequence[int]) -> Fields:
    limits = per_request(n, tree.batch, "n")
    sizes = tuple(min(limit + 1, size) for limit, size in zip(limits, tree.sizes, strict=True))
    if tree.tokens.is_cpu and best_first(tree):
        return _beginning(tree, sizes)
    structure = tree.structure
    capped = tree.logp[:, None, :].masked_fill(~structure.ancestors, float("inf")).amin(-1)
    if sizes == tree.sizes:
        return tree.tokens, tree.parents, capped, tree.source, sizes, structure
    # Stable, so that a parent precedes a child that ties with it, and real nodes precede padding.
    order = capped.sort(dim=1, descending=True, stable=True).indices
    ranks = torch.arange(tree.width, device=tree.device)
    if len(set(limits)) == 1:
        chosen = (ranks <= limits[0]).expand(tree.batch, -1)
    else:
        chosen = ranks <= moved(torch.tensor(limits, dtype=torch.long, device="cpu"), tree.device)[:, None]
    keep = torch.zeros_like(structure.ancestors[:, 0]).scatter_(1, order, chosen) & tree.real
    return _compact(tree, capped, keep, sizes, None)[0]


def best_first(tree: TreeArrays) -> bool:
    """Whether nodes (on the CPU) come in falling order of log-probability; then the best n are the first n."""
    logp = tree.logp.numpy()
    return bool((logp[:, 1:] <= logp[:, :-1]).all())


def first(tree: TreeArrays, n: Sequence[int]) -> Fields:
    return _beginning(tree, tuple(min(count + 1, size) for count, size in zip(n, tree.sizes, strict=True)))


def _beginning(tree: TreeArrays, sizes: tuple[int, ...]) -> Fields:
    """The first nodes of each tree: connected, since parents come before their children."""
    width = max(sizes, default=1)
    columns = [column[:, :width] for column in (tree.tokens, tree.parents, tree.logp, tree.source)]
    if min(sizes, default=1) < width:
        counts = torch.tensor(sizes, dtype=torch.long, device=tree.device)[:, None]
        padding = torch.arange(width, device=tree.device) >= counts
        columns = [column.masked_fill(padding, fill) for column, fill in zip(columns, PADDING, strict=True)]
    tokens, parents, logp, source = columns
    return tokens, parents, logp, source, sizes, None


def prune(tree: TreeArrays, keep: Tensor) -> tuple[Fields, Tensor]:
    if keep.shape != tree.tokens.shape:
        raise ValueError(f"keep {list(keep.shape)} must have the tree's shape {list(tree.tokens.shape)}.")
    structure = tree.structure
    dropped = ~keep
    dropped[:, 0] = False
    keep = tree.real & ~any_above(structure, dropped)
    # Sizes and height in one copy: the only synchronisation.
    counts, heights = torch.stack([keep.sum(1), (structure.depth * keep).amax(1)]).tolist()
    return _compact(tree, tree.logp, keep, tuple(counts), max(heights, default=0))


def _compact(
    tree: TreeArrays, logp: Tensor, keep: Tensor, sizes: tuple[int, ...], height: int | None
) -> tuple[Fields, Tensor]:
    """The nodes of `keep`, closed upwards, in their order; `sizes` are its row sums."""
    width = max(sizes, default=1)
    place = keep.cumsum(1) - 1
    ids = torch.arange(tree.width, device=tree.device).expand(tree.batch, -1)
    index = torch.full((tree.batch, width + 1), -1, dtype=torch.long, device=tree.device)
    index.scatter_(1, torch.where(keep, place, width), ids)
    index = index[:, :width]
    gap = index < 0
    old = index.clamp(min=0)
    parents = place.gather(1, tree.parents.gather(1, old).clamp(min=0))
    parents.masked_fill_(gap, -1)
    parents[:, 0] = -1
    fields = (
        tree.tokens.gather(1, old).masked_fill_(gap, 0),
        parents,
        logp.gather(1, old).masked_fill_(gap, NOTHING),
        tree.source.gather(1, old).masked_fill_(gap, 0),
        sizes,
    )
    structure = None
    if height is not None and tree.device.type != "cpu":
        # Computed later, the height would cost a synchronisation of its own.
        structure = on_device(parents)._replace(height=height)
    return (*fields, structure), index
