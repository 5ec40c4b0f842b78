"""The token tree: the draft tokens of one step for a batch of requests, and all that is done with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from draftree.tree import algebra, builders
from draftree.tree import candidates as fills
from draftree.tree.arrays import TreeArrays
from draftree.tree.builders import Draft
from draftree.tree.candidates import Choices
from draftree.tree.structure import moved, structure_of


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree(TreeArrays):
    """B trees of up to N nodes: how they are made and cut; see `TreeArrays` for what they hold."""

    def to(self, device: torch.device | str) -> TokenTree:
        """The same trees on `device`; the structure goes along through the cache (no rebuild there)."""
        if device == self.tokens.device:  # no string is: called every step, with a device
            return self
        # An index makes "cuda" mean one device also in the cache, whatever becomes current later.
        device = torch.empty(0, device=device, dtype=torch.float32).device
        if device == self.device:
            return self
        tokens, parents, source = moved(torch.stack([self.tokens, self.parents, self.source]), device)
        structure = structure_of(self.parents, device)
        return TokenTree(tokens, parents, moved(self.logp, device), source, self.sizes, structure)

    # ---- builders

    @classmethod
    def roots(cls, tokens: Tensor) -> TokenTree:
        """Trees of a root alone; tokens: LongTensor [B]."""
        return cls(*builders.roots(tokens))

    @classmethod
    def from_arrays(
        cls,
        tokens: ArrayLike | Tensor,
        parents: ArrayLike | Tensor,
        logp: ArrayLike | Tensor | None = None,
        source: ArrayLike | Tensor | int | None = None,
        *,
        root: int,
    ) -> TokenTree:
        """One tree from flat arrays [n] that leave the root out; in them parent -1 is a child of the root.

        logp: path log-probabilities [n] (None: 0.0, no opinion). source: bit mask [n] or one for all
        (None: 1). Equal paths are kept apart. Lives on the device of `tokens`.
        ValueError when shapes differ or a parent does not come before its child.
        """
        tree = cls(*builders.from_arrays(tokens, parents, logp, source, root))
        return tree.to(tokens.device) if isinstance(tokens, Tensor) else tree

    @classmethod
    def from_drafts(cls, roots: Sequence[int], drafts: Sequence[Draft], budgets: Sequence[int]) -> TokenTree:
        """A tree for each request, of its `budgets[b]` likeliest draft tokens in falling order of probability.

        roots: the requests' newest tokens. drafts: for each the tokens [n], parents [n] (-1: the root), path
        log-probabilities [n] and sources ([n], or one mask for all) of its draft tokens, in which a parent comes before
        its children and is no less likely. Those of log-probability -inf are left out. Lives on the CPU.
        """
        return cls(*builders.best_first(roots, drafts, budgets))

    @classmethod
    def from_paths(
        cls,
        root: int,
        paths: Sequence[Sequence[int]],
        logp: Sequence[Sequence[float]] | None = None,
        source: int | Sequence[int] = 1,
    ) -> TokenTree:
        """One tree of token paths below `root`, equal prefixes merged; nodes in order of appearance.

        logp: log-probability of each token given those before it, shaped like `paths` (None: 0.0); where
        paths share a node it keeps its best value. source: one bit mask, or one a path.
        ValueError when logp or source does not fit the paths.
        """
        return cls(*builders.from_paths(root, paths, logp, source))

    @classmethod
    def from_choices(
        cls,
        roots: Tensor,
        candidates: Tensor,
        choices: Choices,
        logp: Tensor | None = None,
        source: int = 1,
    ) -> TokenTree:
        """The Medusa / EAGLE choice list `choices` filled from per-depth candidates.

        roots: LongTensor [B]; candidates: LongTensor [B, D, K], best first, those of one depth all different, as `topk`
        gives them; choices: tuples of child ranks from the root; logp: FloatTensor [B, D, K], log-probability at each
        depth (None: 0.0). Nodes are ordered by depth, then ranks.
        ValueError when a prefix is missing from the list or a rank or depth is beyond the candidates.
        """
        return cls(*fills.from_choices(roots, candidates, choices, logp, source))

    @classmethod
    def from_candidates(
        cls,
        roots: Tensor,
        candidates: Tensor | np.ndarray,
        logp: Tensor | np.ndarray,
        node_budget: int | Sequence[int],
        source: int = 1,
        off_path: float = 1.0,
    ) -> TokenTree:
        """The most probable subtree of the full product tree of per-depth candidates, best node first.

        roots: LongTensor [B]; candidates: LongTensor [B, D, K]; logp: FloatTensor [B, D, K], taken as
        independent of the path and capped at 0; node_budget: nodes besides the root, one number or one a
        request; off_path: factor on the probability for each step below a candidate that was not the best of its
        depth. Candidates of log-probability -inf or NaN are never used. Lives on the device of `roots`. ValueError on
        shapes.
        """
        made = cls(*fills.from_candidates(roots, candidates, logp, node_budget, source, off_path))
        return made.to(roots.device)

    @classmethod
    def stack(cls, trees: Sequence[TokenTree]) -> TokenTree:
        """One ragged batch of all the trees, in order, padded to the widest. ValueError when empty."""
        return cls(*builders.stack(trees))

    # ---- algebra

    def best(self, n: int | Sequence[int]) -> TokenTree:
        """The n most probable draft tokens of each tree (fewer where it has fewer) and the root, connected.

        n: draft tokens of a tree, one number or one for each request. A child counts for no more than its parent (and
        keeps that capped logp); on a tie the lower index wins. Order of the nodes is kept. No device sync.
        """
        return TokenTree(*algebra.best(self, n))

    def first(self, n: Sequence[int]) -> TokenTree:
        """The root and the first n[b] draft tokens of each tree; the best ones where logp falls from node to node."""
        return TokenTree(*algebra.first(self, n))

    def prune(self, keep: Tensor) -> tuple[TokenTree, Tensor]:
        """Without the nodes that `keep` (BoolTensor [B, N]) drops and all below them; the root stays.

        Returns the tree [B, N'] and index, LongTensor [B, N']: the old id of each node, -1 in padding.
        One device sync (the new sizes).
        """
        arrays, index = algebra.prune(self, keep)
        return TokenTree(*arrays), index

    def paths(self, nodes: Sequence[int]) -> list[list[int]]:
        """The nodes from the root of each tree to `nodes[b]`, both included."""
        found = []
        for node, parents in zip(nodes, self.parents.tolist(), strict=True):
            path = [node]
            while path[-1] > 0:
                path.append(parents[path[-1]])
            found.append(path[::-1])
        return found

    # ---- one tree, on the CPU

    def path(self, b: int, node: int) -> list[int]:
        """Token ids from the root of tree b to `node`, both included."""
        if not 0 <= node < self.sizes[b]:
            raise IndexError(f"Tree {b} has nodes 0..{self.sizes[b] - 1}, not {node}.")
        tokens, parents = self.tokens[b].tolist(), self.parents[b].tolist()
        found = []
        while node >= 0:
            found.append(tokens[node])
            node = parents[node]
        return found[::-1]

    def children(self, b: int, node: int) -> list[int]:
        """Node ids of the children of `node` in tree b, ascending."""
        return [i for i, parent in enumerate(self.parents[b, : self.sizes[b]].tolist()) if parent == node >= 0]

    def walk(self, b: int, tokens: Sequence[int]) -> list[int]:
        """The longest path (node ids, root first) of tree b that the continuation `tokens` confirms."""
        known, parents = self.tokens[b, : self.sizes[b]].tolist(), self.parents[b, : self.sizes[b]].tolist()
        # Siblings may share a token, so several paths can be confirmed at once.
        reached = {0: [0]}
        for token in tokens:
            below = {
                i: [*reached[parent], i] for i, parent in enumerate(parents) if parent in reached and known[i] == token
            }
            if not below:
                break
            reached = below
        return reached[min(reached)]
