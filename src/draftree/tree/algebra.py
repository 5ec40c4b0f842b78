"""Trees from trees: the union of several drafters' trees, the best n nodes, what a pruner leaves.

`best` and `prune` stay on the device and use the ancestor mask; `merge` runs on the CPU, where
drafters that propose explicit trees build them, and names equal paths by prefix doubling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftree.tree.arrays import TreeArrays
from draftree.tree.builders import NOTHING, Fields, per_request
from draftree.tree.structure import any_above, moved, on_device, structure_of


def merge(trees: Sequence[TreeArrays], weights: Sequence[float] | None) -> Fields:
    first = trees[0]
    if any(tree.batch != first.batch or tree.device != first.device for tree in trees):
        raise ValueError("Trees to merge must have one batch size and lie on one device.")
    if weights is not None and (len(weights) != len(trees) or not all(w > 0 for w in weights)):
        raise ValueError(f"weights must hold one number > 0 for each of the {len(trees)} trees.")
    starts = np.cumsum([0, *(tree.width for tree in trees)])
    tokens, logp, source = (
        np.concatenate([getattr(tree, name).cpu().numpy() for tree in trees], 1)
        for name in ("tokens", "logp", "source")
    )
    if (tokens[:, starts[:-1]] != tokens[:, :1]).any():
        raise ValueError("Trees to merge must have the same root tokens: draft them for the same requests.")
    if weights is not None:
        shift = np.repeat(np.log(weights), [tree.width for tree in trees]).astype(np.float32)
        shift[starts[:-1]] = 0.0
        logp = np.minimum(logp + shift, 0.0)
    total = tokens.size
    row = np.arange(0, total, starts[-1])[:, None]
    parents, kept = np.full(tokens.shape, -1), np.zeros(tokens.shape, dtype=bool)
    for tree, start, stop in zip(trees, starts, starts[1:], strict=False):
        local = tree.parents.cpu().numpy()
        np.copyto(parents[:, start:stop], local + start + row, where=local >= 0)
        kept[:, start:stop] = np.arange(tree.width) < np.array(tree.sizes)[:, None]
    alive = np.flatnonzero(kept)
    names = _path_names(tokens, parents)[alive]
    _, seen_at, group = np.unique(names, return_index=True, return_inverse=True)
    # Groups in order of first appearance: a parent's first appearance precedes each of its children's.
    order = np.argsort(seen_at)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    group = place[group]
    firsts = alive[seen_at[order]]
    request = firsts // starts[-1]
    counts = np.bincount(request, minlength=first.batch)
    column = np.arange(len(firsts)) - (np.cumsum(counts) - counts)[request]
    scores = np.full(len(firsts), NOTHING, dtype=np.float32)
    np.maximum.at(scores, group, logp.reshape(-1)[alive])
    masks = np.zeros(len(firsts), dtype=np.int64)
    np.bitwise_or.at(masks, group, source.reshape(-1)[alive])
    new_id = np.full(total + 1, -1)
    new_id[alive] = column[group]
    shape = (first.batch, int(counts.max(initial=1)))

    def laid_out(values: np.ndarray, fill: float) -> Tensor:
        array = np.full(shape, fill, dtype=values.dtype)
        array[request, column] = values
        return torch.from_numpy(array)

    above = laid_out(new_id[parents.reshape(-1)[firsts]], -1)
    to = first.device
    return (
        laid_out(tokens.reshape(-1)[firsts], 0).to(to),
        above.to(to),
        laid_out(scores, NOTHING).to(to),
        laid_out(masks, 0).to(to),
        tuple(counts.tolist()),
        None if to.type == "cpu" else structure_of(above, to),
    )


def _path_names(tokens: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """A number for each node of [B, N], equal for two nodes exactly when their request and path are.

    After round k a node's name stands for the last 2^k tokens of its path, so pairs of names are all that
    is compared (prefix doubling, as for suffix arrays). parents: flat ids, -1 above a root.
    """
    total = tokens.size
    jump = np.append(parents.reshape(-1), -1)
    jump[jump < 0] = total
    kinds = np.unique(tokens, return_inverse=True)[1].reshape(tokens.shape)
    # Roots are distinguished by request, which keeps equal paths of two requests apart all the way down.
    kinds = np.where(parents < 0, total + np.arange(len(tokens))[:, None], kinds)
    names = np.append(kinds.reshape(-1), 2 * total)
    while jump.min() != total:
        names = np.unique(names * (2 * total + 1) + names[jump], return_inverse=True)[1]
        jump = jump[jump]
    return names[:total]


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
    tokens, parents = tree.tokens.narrow(1, 0, width), tree.parents.narrow(1, 0, width)
    logp, source = tree.logp.narrow(1, 0, width), tree.source.narrow(1, 0, width)
    if min(sizes, default=1) < width:
        counts = torch.tensor(sizes, dtype=torch.long, device=tree.device)[:, None]
        padding = torch.arange(width, device=tree.device) >= counts
        tokens, parents = tokens.masked_fill(padding, 0), parents.masked_fill(padding, -1)
        logp, source = logp.masked_fill(padding, float("-inf")), source.masked_fill(padding, 0)
        return tokens, parents, logp, source, sizes, None
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
