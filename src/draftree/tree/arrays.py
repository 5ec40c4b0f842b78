"""What a batch of token trees is: flat arrays, what follows from them, and how they are cut; see `TokenTree`.

Node 0 of each tree is the root, the newest certain token, which is not yet in the KV cache; every other node is a
draft token that may follow its parent. Parents come before their children, so one array of parents is the whole shape,
and drafters, masks and acceptance rules work on it without visiting nodes one by one. Cuts are made on the trees'
device, which waits for their sizes and, for depths and ancestors, for the parents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from draftree.tree.layout import NOTHING, PADDING, per_request
from draftree.tree.structure import Structure, any_above, moved, structure_of


@dataclass(frozen=True, slots=True, eq=False)
class TreeArrays:
    """B trees of up to N nodes, padded; immutable, all tensors on one device.

    tokens: LongTensor [B, N], token ids (0 in padding).
    parents: LongTensor [B, N], `parents[b, i] < i`; -1 for the root and in padding.
    logp: FloatTensor [B, N], natural log-probability of the path root..node (0.0 root, -inf padding).
    source: LongTensor [B, N], bit mask of the drafters that proposed the node (0 for root and padding).
    sizes: real nodes of each tree, root included, on the CPU; nodes >= sizes[b] are padding.

    The plain constructor trusts its arguments; use the builders of `TokenTree`. Siblings with the same token are
    legal (unshared branches of a trie).
    """

    tokens: Tensor
    parents: Tensor
    logp: Tensor
    source: Tensor
    sizes: tuple[int, ...]
    _structure: Structure | None = field(default=None, repr=False)

    # ---- shape

    @property
    def batch(self) -> int:
        """B, the number of trees."""
        return len(self.sizes)

    @property
    def width(self) -> int:
        """N, the nodes of the largest tree (more when padded to a bucket)."""
        return self.tokens.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.tokens.device

    @property
    def structure(self) -> Structure:
        """Depth, ancestors and height, worked out once; shared between trees of equal shape: read-only."""
        if self._structure is None:
            object.__setattr__(self, "_structure", structure_of(self.parents))
        assert self._structure is not None
        return self._structure

    @property
    def depth(self) -> Tensor:
        """LongTensor [B, N], steps below the root; 0 for the root and in padding. Read-only."""
        return self.structure.depth

    @property
    def ancestors(self) -> Tensor:
        """BoolTensor [B, N, N]: row i sees j when j is i or above it; padding sees itself. Read-only."""
        return self.structure.ancestors

    @property
    def height(self) -> int:
        """The largest depth in the batch."""
        return self.structure.height

    @property
    def real(self) -> Tensor:
        """BoolTensor [B, N], False in padding."""
        # From the parents, as the sizes are on the CPU and would have to be copied over.
        real = self.parents >= 0
        real[:, 0] = True
        return real

    def to(self, device: torch.device | str) -> Self:
        """The same trees on `device`; the structure goes along through the cache (no rebuild there)."""
        if device == self.tokens.device:  # no string is: called every step, with a device
            return self
        # An index makes "cuda" mean one device also in the cache, whatever becomes current later.
        device = torch.empty(0, device=device, dtype=torch.float32).device
        if device == self.device:
            return self
        tokens, parents, source = moved(torch.stack([self.tokens, self.parents, self.source]), device)
        structure = structure_of(self.parents, device)
        return type(self)(tokens, parents, moved(self.logp, device), source, self.sizes, structure)

    # ---- cutting

    def best(self, n: int | Sequence[int]) -> Self:
        """The n most probable draft tokens of each tree (fewer where it has fewer) and the root, connected.

        n: draft tokens of a tree, one number or one for each request. A child counts for no more than its parent (and
        keeps that capped logp); on a tie the lower index wins. Order of the nodes is kept.
        """
        limits = per_request(n, self.batch, "n")
        if self.tokens.is_cpu and bool((self.logp[:, 1:] <= self.logp[:, :-1]).all()):
            return self.first(limits)
        structure = self.structure
        capped = self.logp[:, None, :].masked_fill(~structure.ancestors, float("inf")).amin(-1)
        sizes = self._sizes_with(limits)
        if sizes == self.sizes:
            return type(self)(self.tokens, self.parents, capped, self.source, sizes, structure)
        # Stable, so that a parent precedes a child that ties with it, and real nodes precede padding.
        order = capped.sort(dim=1, descending=True, stable=True).indices
        most = moved(torch.tensor(limits, dtype=torch.long, device="cpu"), self.device)[:, None]
        chosen = torch.arange(self.width, device=self.device) <= most
        keep = torch.zeros_like(structure.ancestors[:, 0]).scatter_(1, order, chosen) & self.real
        return self._compact(capped, keep, sizes)[0]

    def first(self, n: Sequence[int]) -> Self:
        """The root and the first n[b] draft tokens of each tree; the best ones where logp falls from node to node."""
        sizes = self._sizes_with(n)
        width = max(sizes, default=1)
        # Connected, since parents come before their children.
        columns = [column[:, :width] for column in (self.tokens, self.parents, self.logp, self.source)]
        if min(sizes, default=1) < width:
            counts = torch.tensor(sizes, dtype=torch.long, device=self.device)[:, None]
            padding = torch.arange(width, device=self.device) >= counts
            columns = [column.masked_fill(padding, fill) for column, fill in zip(columns, PADDING, strict=True)]
        tokens, parents, logp, source = columns
        return type(self)(tokens, parents, logp, source, sizes)

    def _sizes_with(self, n: Sequence[int]) -> tuple[int, ...]:
        """Sizes of the trees with at most n[b] draft tokens each."""
        return tuple(min(count + 1, size) for count, size in zip(n, self.sizes, strict=True))

    def prune(self, keep: Tensor) -> tuple[Self, Tensor]:
        """Without the nodes that `keep` (BoolTensor [B, N]) drops and all below them; the root stays.

        Returns the tree [B, N'] and index, LongTensor [B, N']: the old id of each node, -1 in padding.
        """
        if keep.shape != self.tokens.shape:
            raise ValueError(f"keep {list(keep.shape)} must have the tree's shape {list(self.tokens.shape)}.")
        dropped = ~keep
        dropped[:, 0] = False
        keep = self.real & ~any_above(self.structure, dropped)
        return self._compact(self.logp, keep, tuple(keep.sum(1).tolist()))

    def _compact(self, logp: Tensor, keep: Tensor, sizes: tuple[int, ...]) -> tuple[Self, Tensor]:
        """The nodes of `keep`, closed upwards, in their order, and their old ids; `sizes` are its row sums."""
        width = max(sizes, default=1)
        place = keep.cumsum(1) - 1
        ids = torch.arange(self.width, device=self.device).expand(self.batch, -1)
        index = torch.full((self.batch, width + 1), -1, dtype=torch.long, device=self.device)
        index.scatter_(1, torch.where(keep, place, width), ids)
        index = index[:, :width]
        gap = index < 0
        old = index.clamp(min=0)
        parents = place.gather(1, self.parents.gather(1, old).clamp(min=0)).masked_fill_(gap, -1)
        parents[:, 0] = -1
        tree = type(self)(
            self.tokens.gather(1, old).masked_fill_(gap, 0),
            parents,
            logp.gather(1, old).masked_fill_(gap, NOTHING),
            self.source.gather(1, old).masked_fill_(gap, 0),
            sizes,
        )
        return tree, index

    # ---- ways through the trees, on the CPU

    def paths(self, nodes: Sequence[int]) -> list[list[int]]:
        """The nodes from the root of each tree to `nodes[b]`, both included."""
        found = []
        for node, parents in zip(nodes, self.parents.tolist(), strict=True):
            path = [node]
            while path[-1] > 0:
                path.append(parents[path[-1]])
            found.append(path[::-1])
        return found

    def walk(self, b: int, tokens: Sequence[int]) -> list[int]:
        """The longest path (node ids, root first) of tree b that the continuation `tokens` confirms."""
        known, parents = self.tokens[b, : self.sizes[b]].tolist(), self.parents[b, : self.sizes[b]].tolist()
        last = 0
        for _, found in follow(known, parents, tokens):
            last = min(found, default=last)
        path = [last]
        while path[-1] > 0:
            path.append(parents[path[-1]])
        return path[::-1]


def follow(tokens: Sequence[int], parents: Sequence[int], text: Iterable[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Follow a text from the root through a tree of these nodes, as far as it agrees.

    Yields:
        for each token of the text, the nodes that might be it, for their parents were found, and those that are it:
        several where siblings share a token. The last ones found have no children, or the text is at its end.
    """
    found = [0]
    for token in text:
        below = [node for node, parent in enumerate(parents) if parent in found]
        if not below:
            return
        found = [node for node in below if tokens[node] == token]
        yield below, found
