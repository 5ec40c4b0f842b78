"""What a batch of token trees is: flat arrays, and what follows from them; `TokenTree` adds how they are made.

Node 0 of each tree is the root, the newest certain token, which is not yet in the KV cache; every other node is a
draft token that may follow its parent. Parents come before their children, so one array of parents is the whole shape,
and drafters, masks and acceptance rules work on it without visiting nodes one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftree.tree.structure import Structure, structure_of


@dataclass(frozen=True, slots=True, eq=False)
class TreeArrays:
    """B trees of up to N nodes, padded; immutable, all tensors on one device.

    tokens: LongTensor [B, N], token ids (0 in padding).
    parents: LongTensor [B, N], `parents[b, i] < i`; -1 for the root and in padding.
    logp: FloatTensor [B, N], natural log-probability of the path root..node (0.0 root, -inf padding).
    source: LongTensor [B, N], bit mask of the drafters that proposed the node (0 for root and padding).
    sizes: real nodes of each tree, root included, on the CPU; nodes >= sizes[b] are padding.

    The plain constructor trusts its arguments; use the builders of `TokenTree`. Siblings with the same token are
    legal (unshared branches of a trie), but only `from_arrays` makes them.
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
        """The largest depth in the batch. One device sync if the tree's shape was born off the runner."""
        structure = self.structure
        if structure.height is None:
            structure = structure._replace(height=int(structure.depth.max()))
            object.__setattr__(self, "_structure", structure)
        assert structure.height is not None
        return structure.height

    @property
    def real(self) -> Tensor:
        """BoolTensor [B, N], False in padding."""
        # From the parents, as the sizes are on the CPU and would have to be copied over.
        real = self.parents >= 0
        real[:, 0] = True
        return real
