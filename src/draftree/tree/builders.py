"""How trees come to be: from flat arrays, token paths, choice lists, per-depth candidates, other trees.

Each builder returns the plain fields of a `TokenTree`, whose class methods carry the documentation.
What the user hands in is checked here, once; everything after trusts the arrays.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from draftree.tree.structure import Structure, structure_of

if TYPE_CHECKING:
    from draftree.tree.token_tree import TokenTree

Fields = tuple[Tensor, Tensor, Tensor, Tensor, tuple[int, ...], Structure | None]
Choices = Sequence[Sequence[int]]
NOTHING = float("-inf")


def roots(tokens: Tensor) -> Fields:
    if tokens.ndim != 1:
        raise ValueError(f"Root tokens must be [batch], not {list(tokens.shape)}: pass one token a request.")
    tokens = tokens.long()[:, None]
    return (
        tokens,
        torch.full_like(tokens, -1),
        torch.zeros(tokens.shape, device=tokens.device),
        torch.zeros_like(tokens),
        (1,) * len(tokens),
        None,
    )


def from_arrays(
    tokens: ArrayLike | Tensor,
    parents: ArrayLike | Tensor,
    logp: ArrayLike | Tensor | None,
    source: ArrayLike | Tensor | int | None,
    root: int,
) -> Fields:
    device = tokens.device if isinstance(tokens, Tensor) else None
    guesses, above = _host(tokens), _host(parents)
    n = guesses.shape[0] if guesses.ndim == 1 else -1
    if n < 0 or above.shape != guesses.shape:
        raise ValueError(
            f"tokens {list(guesses.shape)} and parents {list(above.shape)} must be flat and of one length: "
            "pass one tree without its root."
        )
    if n and (above.min() < -1 or (above >= np.arange(n)).any()):
        raise ValueError("A parent must be -1 (the root) or the index of an earlier node: put parents first.")
    token_row = np.empty((1, n + 1), dtype=np.int64)
    parent_row = np.empty((1, n + 1), dtype=np.int64)
    logp_row = np.zeros((1, n + 1), dtype=np.float32)
    source_row = np.empty((1, n + 1), dtype=np.int64)
    token_row[0, 0], parent_row[0, 0], source_row[0, 0] = root, -1, 0
    token_row[0, 1:] = guesses
    np.add(above, 1, out=parent_row[0, 1:], casting="unsafe")
    if logp is not None:
        logp_row[0, 1:] = _like(logp, n, "logp")
    if source is None or isinstance(source, int):
        source_row[0, 1:] = 1 if source is None else source
    else:
        source_row[0, 1:] = _like(source, n, "source")
    rows = [torch.from_numpy(row) for row in (token_row, parent_row, logp_row, source_row)]
    if device is None or device.type == "cpu":
        return rows[0], rows[1], rows[2], rows[3], (n + 1,), None
    return (*(row.to(device) for row in rows), (n + 1,), structure_of(rows[1], device))  # type: ignore[return-value]


def from_paths(
    root: int,
    paths: Sequence[Sequence[int]],
    logp: Sequence[Sequence[float]] | None,
    source: int | Sequence[int],
) -> Fields:
    sources = [source] * len(paths) if isinstance(source, int) else list(source)
    if len(sources) != len(paths) or (logp is not None and [len(p) for p in logp] != [len(p) for p in paths]):
        raise ValueError(
            "logp takes one number a token and source one mask a path: give both the paths' shape."
        )
    ids: dict[tuple[int, int], int] = {}
    tokens, parents, scores, masks = [int(root)], [-1], [0.0], [0]
    for p, path in enumerate(paths):
        node, score = 0, 0.0
        for d, token in enumerate(path):
            score += 0.0 if logp is None else float(logp[p][d])
            parent, node = node, ids.setdefault((node, int(token)), len(tokens))
            if node == len(tokens):
                tokens.append(int(token))
                parents.append(parent)
                scores.append(score)
                masks.append(0)
            scores[node] = max(scores[node], score)
            masks[node] |= sources[p]
    return (
        torch.tensor([tokens]),
        torch.tensor([parents]),
        torch.tensor([scores], dtype=torch.float32),
        torch.tensor([masks]),
        (len(tokens),),
        None,
    )


@lru_cache(maxsize=256)
def _choice_structure(
    choices: tuple[tuple[int, ...], ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Structure, int]:
    """Depth index, rank and parent of each node of a choice list, with its structure and largest rank."""
    order = sorted(set(choices), key=lambda c: (len(c), c))
    place = {(): 0} | {choice: i for i, choice in enumerate(order, 1)}
    for choice in order:
        if not choice or min(choice) < 0:
            raise ValueError(
                f"{choice} is no choice: name a node by its ranks (>= 0) from the root, as (0, 2)."
            )
        if choice[:-1] not in place:
            raise ValueError(
                f"The choice list has {choice} but not its prefix {choice[:-1]}: add the prefix."
            )
    depths = torch.tensor([len(c) - 1 for c in order], dtype=torch.long, device=device)
    ranks = torch.tensor([c[-1] for c in order], dtype=torch.long, device=device)
    parents = torch.tensor([[-1, *(place[c[:-1]] for c in order)]], dtype=torch.long)
    last = max((c[-1] for c in order), default=-1)
    return depths, ranks, parents.to(device), structure_of(parents, device), last


def from_choices(
    roots: Tensor, candidates: Tensor, choices: Choices, logp: Tensor | None, source: int
) -> Fields:
    _check_candidates(roots, candidates, logp)
    batch, depth, count = candidates.shape
    depths, ranks, parents, structure, last = _choice_structure(tuple(map(tuple, choices)), candidates.device)
    if (structure.height or 0) > depth or last >= count:
        raise ValueError(
            f"The choice list needs {structure.height} depths of {last + 1} candidates but there are "
            f"{depth} of {count}: draft more candidates or shorten the list."
        )
    nodes = parents.shape[1]
    tokens = torch.cat([roots[:, None].long(), candidates[:, depths, ranks].long()], 1)
    scores = torch.zeros(tokens.shape, device=tokens.device)
    if logp is not None:
        # A masked sum, since a product with the mask would turn -inf into NaN.
        scores[:, 1:] = logp[:, depths, ranks]
        scores = scores[:, None, :].masked_fill(~structure.ancestors, 0.0).sum(-1)
    masks = torch.full_like(tokens, source)
    masks[:, 0] = 0
    spread = Structure(
        structure.depth.expand(batch, -1), structure.ancestors.expand(batch, -1, -1), structure.height
    )
    return tokens, parents.expand(batch, -1), scores, masks, (nodes,) * batch, spread


def from_candidates(
    roots: Tensor, candidates: Tensor, logp: Tensor, node_budget: int | Sequence[int], source: int
) -> Fields:
    _check_candidates(roots, candidates, logp)
    budgets = per_request(node_budget, len(roots), "node_budget")
    scores = np.minimum(_host(logp).astype(np.float64), 0.0)
    if np.isnan(scores).any():
        raise ValueError("Candidate log-probabilities hold NaN: check the drafter's logits.")
    ids = _host(candidates)
    order = np.argsort(-scores, axis=-1, kind="stable")
    ids, scores = np.take_along_axis(ids, order, -1).tolist(), np.take_along_axis(scores, order, -1).tolist()
    firsts = _host(roots).tolist()
    trees = [_best_first(*request) for request in zip(firsts, ids, scores, budgets, strict=True)]
    width = max((len(tree[0]) for tree in trees), default=1)
    tokens = torch.zeros(len(trees), width, dtype=torch.long)
    parents = torch.full((len(trees), width), -1)
    logps = torch.full((len(trees), width), NOTHING)
    masks = torch.zeros(len(trees), width, dtype=torch.long)
    for b, (token, parent, score) in enumerate(trees):
        n = len(token)
        tokens[b, :n] = torch.tensor(token)
        parents[b, :n] = torch.tensor(parent)
        logps[b, :n] = torch.tensor(score)
        masks[b, 1:n] = source
    sizes = tuple(len(tree[0]) for tree in trees)
    device = candidates.device
    structure = None if device.type == "cpu" else structure_of(parents, device)
    return tokens.to(device), parents.to(device), logps.to(device), masks.to(device), sizes, structure


def _best_first(
    root: int, ids: list[list[int]], scores: list[list[float]], budget: int
) -> tuple[list[int], list[int], list[float]]:
    """A heap of the best node not yet taken below each taken parent: n nodes cost n pops and 2 n pushes."""
    levels = []
    for row_ids, row_scores in zip(ids, scores, strict=True):
        # dict keeps the first, hence best, of equal tokens.
        best: dict[int, float] = {}
        for token, score in zip(row_ids, row_scores, strict=True):
            if score > NOTHING:
                best.setdefault(token, score)
        levels.append(list(best.items()))
    levels.append([])
    tokens, parents, paths = [root], [-1], [0.0]
    heap: list[tuple[float, int, int, int]] = []
    if levels[0] and budget:
        heap.append((-levels[0][0][1], 0, 0, 0))
    while heap and len(tokens) <= budget:
        cost, depth, parent, rank = heapq.heappop(heap)
        tokens.append(levels[depth][rank][0])
        parents.append(parent)
        paths.append(-cost)
        if rank + 1 < len(levels[depth]):
            heapq.heappush(heap, (-paths[parent] - levels[depth][rank + 1][1], depth, parent, rank + 1))
        if levels[depth + 1]:
            heapq.heappush(heap, (cost - levels[depth + 1][0][1], depth + 1, len(tokens) - 1, 0))
    return tokens, parents, paths


def stack(trees: Sequence[TokenTree]) -> Fields:
    if not trees:
        raise ValueError("There are no trees to stack: pass at least one.")
    if len(trees) == 1:
        one = trees[0]
        return one.tokens, one.parents, one.logp, one.source, one.sizes, one._structure
    if any(tree.device != trees[0].device for tree in trees):
        raise ValueError("The trees to stack lie on several devices: move them to one first.")
    width = max(tree.width for tree in trees)
    parts = [_widened(tree, width) for tree in trees]
    tokens, parents, logp, source = (torch.cat(column) for column in zip(*parts, strict=True))
    return tokens, parents, logp, source, tuple(size for tree in trees for size in tree.sizes), None


def select(tree: TokenTree, requests: Sequence[int]) -> Fields:
    sizes = tuple(tree.sizes[b] for b in requests)
    rows = torch.tensor(list(requests), dtype=torch.long, device=tree.device)
    width = max(sizes, default=1)
    tokens, parents, logp, source = (
        column[rows, :width] for column in (tree.tokens, tree.parents, tree.logp, tree.source)
    )
    return tokens, parents, logp, source, sizes, None


def pad(tree: TokenTree, width: int) -> Fields:
    if width < max(tree.sizes, default=1):
        raise ValueError(f"A tree of {max(tree.sizes)} nodes does not fit {width}: pad to a larger width.")
    tokens, parents, logp, source = _widened(tree, width)
    return tokens, parents, logp, source, tree.sizes, None


def real_mask(sizes: tuple[int, ...], width: int, device: torch.device) -> Tensor:
    lengths = torch.tensor(sizes, device=device)
    return torch.arange(width, device=device) < lengths[:, None]


def all_distinct(candidates: Tensor) -> bool:
    """Whether the candidates [B, D, K] of each depth differ; one device sync."""
    if candidates.shape[-1] < 2:
        return True
    ordered = candidates.sort(-1).values
    return not bool((ordered[..., 1:] == ordered[..., :-1]).any())


def per_request(value: int | Sequence[int], batch: int, name: str) -> list[int]:
    """`value` once for each request, checked."""
    values = [value] * batch if isinstance(value, int) else [int(v) for v in value]
    if len(values) != batch or min(values, default=0) < 0:
        raise ValueError(f"{name} must be one number >= 0, or one for each of the {batch} requests.")
    return values


def _widened(tree: TokenTree, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    columns = (tree.tokens, tree.parents, tree.logp, tree.source)
    if width <= tree.width:
        return tuple(column[:, :width] for column in columns)  # type: ignore[return-value]
    more = (0, width - tree.width)
    return tuple(  # type: ignore[return-value]
        torch.nn.functional.pad(column, more, value=fill)
        for column, fill in zip(columns, (0, -1, NOTHING, 0), strict=True)
    )


def _check_candidates(roots: Tensor, candidates: Tensor, logp: Tensor | None) -> None:
    if candidates.ndim != 3 or roots.shape != candidates.shape[:1]:
        raise ValueError(
            f"candidates {list(candidates.shape)} must be [batch, depth, k] with one root a request, "
            f"not {list(roots.shape)}: check the drafter's output."
        )
    if logp is not None and logp.shape != candidates.shape:
        raise ValueError(f"logp {list(logp.shape)} must have the candidates' shape {list(candidates.shape)}.")


def _host(values: ArrayLike | Tensor) -> np.ndarray:
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    array = np.asarray(values)
    # An empty list would otherwise arrive as floats.
    return array if array.size else array.astype(np.int64)


def _like(values: ArrayLike | Tensor, n: int, name: str) -> np.ndarray:
    array = _host(values)
    if array.shape != (n,):
        raise ValueError(f"{name} {list(array.shape)} must hold one number for each of the {n} nodes.")
    return array
