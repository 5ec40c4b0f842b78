"""How trees come to be: from flat arrays, token paths or other trees.

Each builder returns the plain fields of a `TokenTree`, whose class methods carry the documentation.
What the user hands in is checked here, once; everything after trusts the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from draftree.tree.arrays import TreeArrays
from draftree.tree.structure import Structure, structure_of

Fields = tuple[Tensor, Tensor, Tensor, Tensor, tuple[int, ...], Structure | None]
NOTHING = float("-inf")


def roots(tokens: Tensor) -> Fields:
    if tokens.ndim != 1:
        raise ValueError(f"Root tokens must be [batch], not {list(tokens.shape)}: pass one token a request.")
    parents, logp, source, structure = _bare(len(tokens), tokens.device)
    return tokens.long()[:, None], parents, logp, source, (1,) * len(tokens), structure


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def _bare(batch: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Structure]:
    """Everything but the tokens of trees of a root alone: every step of plain decoding has them."""
    parents = torch.full((batch, 1), -1, device=device, dtype=torch.long)
    certain = torch.zeros(batch, 1, dtype=torch.float32, device=device)
    return parents, certain, torch.zeros_like(parents), structure_of(parents)


def from_arrays(
    tokens: ArrayLike | Tensor,
    parents: ArrayLike | Tensor,
    logp: ArrayLike | Tensor | None,
    source: ArrayLike | Tensor | int | None,
    root: int,
) -> Fields:
    device = tokens.device if isinstance(tokens, Tensor) else None
    drafted, above = to_numpy(tokens), to_numpy(parents)
    n = drafted.shape[0] if drafted.ndim == 1 else -1
    if n < 0 or above.shape != drafted.shape:
        raise ValueError(
            f"tokens {list(drafted.shape)} and parents {list(above.shape)} must be flat and of one length: "
            "pass one tree without its root."
        )
    if n and (above.min() < -1 or (above >= np.arange(n)).any()):
        raise ValueError("A parent must be -1 (the root) or the index of an earlier node: put parents first.")
    token_row = np.empty((1, n + 1), dtype=np.int64)
    parent_row = np.empty((1, n + 1), dtype=np.int64)
    logp_row = np.zeros((1, n + 1), dtype=np.float32)
    source_row = np.empty((1, n + 1), dtype=np.int64)
    token_row[0, 0], parent_row[0, 0], source_row[0, 0] = root, -1, 0
    token_row[0, 1:] = drafted
    np.add(above, 1, out=parent_row[0, 1:], casting="unsafe")
    if logp is not None:
        logp_row[0, 1:] = _like(logp, n, "logp")
    if source is None or isinstance(source, int | np.integer):
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
        raise ValueError("logp takes one number a token and source one mask a path: give both the paths' shape.")
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
        torch.tensor([tokens], dtype=torch.long, device="cpu"),
        torch.tensor([parents], dtype=torch.long, device="cpu"),
        torch.tensor([scores], dtype=torch.float32, device="cpu"),
        torch.tensor([masks], dtype=torch.long, device="cpu"),
        (len(tokens),),
        None,
    )


def stack(trees: Sequence[TreeArrays]) -> Fields:
    if not trees:
        raise ValueError("There are no trees to stack: pass at least one.")
    if len(trees) == 1:
        one = trees[0]
        return one.tokens, one.parents, one.logp, one.source, one.sizes, one._structure
    if any(tree.device != trees[0].device for tree in trees):
        raise ValueError("The trees to stack lie on several devices: move them to one first.")
    width = max(tree.width for tree in trees)
    sizes = tuple(size for tree in trees for size in tree.sizes)
    if trees[0].tokens.is_cpu:  # numpy's slices cost a tenth of torch's, and batches are stacked every step
        columns = []
        for name, fill in (("tokens", 0), ("parents", -1), ("logp", NOTHING), ("source", 0)):
            parts = [getattr(tree, name).numpy() for tree in trees]
            held = np.full((len(sizes), width), fill, parts[0].dtype)
            row = 0
            for part in parts:
                held[row : row + len(part), : part.shape[1]] = part
                row += len(part)
            columns.append(torch.from_numpy(held))
        return columns[0], columns[1], columns[2], columns[3], sizes, None
    widened = [_widened(tree, width) for tree in trees]
    tokens, parents, logp, source = (torch.cat(column) for column in zip(*widened, strict=True))
    return tokens, parents, logp, source, sizes, None


def select(tree: TreeArrays, requests: Sequence[int]) -> Fields:
    sizes = tuple(tree.sizes[b] for b in requests)
    rows = torch.tensor(list(requests), dtype=torch.long, device=tree.device)
    width = max(sizes, default=1)
    tokens, parents, logp, source = (
        column[rows, :width] for column in (tree.tokens, tree.parents, tree.logp, tree.source)
    )
    return tokens, parents, logp, source, sizes, None


def pad(tree: TreeArrays, width: int) -> Fields:
    if width < max(tree.sizes, default=1):
        raise ValueError(f"A tree of {max(tree.sizes)} nodes does not fit {width}: pad to a larger width.")
    tokens, parents, logp, source = _widened(tree, width)
    return tokens, parents, logp, source, tree.sizes, None


def per_request(value: int | Sequence[int], batch: int, name: str) -> list[int]:
    """`value` once for each request, checked."""
    values = [int(value)] * batch if isinstance(value, int | np.integer) else [int(v) for v in value]
    if len(values) != batch or min(values, default=0) < 0:
        raise ValueError(f"{name} must be one number >= 0, or one for each of the {batch} requests.")
    return values


def _widened(tree: TreeArrays, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    columns = (tree.tokens, tree.parents, tree.logp, tree.source)
    if width <= tree.width:
        return tuple(column[:, :width] for column in columns)  # type: ignore[return-value]
    more = (0, width - tree.width)
    return tuple(  # type: ignore[return-value]
        torch.nn.functional.pad(column, more, value=fill)
        for column, fill in zip(columns, (0, -1, NOTHING, 0), strict=True)
    )


def to_numpy(values: ArrayLike | Tensor) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    array = np.asarray(values)
    # An empty list would otherwise arrive as floats.
    return array if array.size else array.astype(np.int64)


def _like(values: ArrayLike | Tensor, n: int, name: str) -> np.ndarray:
    array = to_numpy(values)
    if array.shape != (n,):
        raise ValueError(f"{name} {list(array.shape)} must hold one number for each of the {n} nodes.")
    return array
