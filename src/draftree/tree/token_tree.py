"""The token tree: the draft tokens of one step for a batch of requests, as flat arrays, how they are made and cut.

Node 0 of each tree is the root, the newest certain token, which is not yet in the KV cache; every other node is a
draft token that may follow its parent. Parents come before their children, so one array of parents is the whole shape,
and drafters, masks and acceptance rules work on it without visiting nodes one by one. Trees are made from token paths,
drafts of many requests, candidates of each depth, or other trees. Cuts are made on the trees' device, which waits for
their sizes and, for depths and ancestors, for the parents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from draftree.tree.static import best_first, choice_structure
from draftree.tree.structure import (
    NOTHING,
    PADDING,
    Draft,
    Structure,
    any_above,
    laid_out,
    likeliest,
    moved,
    per_request,
    structure_of,
)


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """B trees of up to N nodes, padded; immutable, all tensors on one device.

    tokens: LongTensor [B, N], token ids (0 in padding).
    parents: LongTensor [B, N], `parents[b, i] < i`; -1 for the root and in padding.
    logp: FloatTensor [B, N], natural log-probability of the path root..node (0.0 root, -inf padding).
    source: LongTensor [B, N], bit mask of the drafters that proposed the node (0 for root and padding).
    sizes: real nodes of each tree, root included, on the CPU; nodes >= sizes[b] are padding.

    The plain constructor trusts its arguments; use the builders. Siblings with the same token are
    legal (unshared branches of a trie).
    """

    tokens: Tensor
    parents: Tensor
    logp: Tensor
    source: Tensor
    sizes: tuple[int, ...]
    _structure: Structure | None = field(default=None, repr=False)

    # ---- making

    @classmethod
    def roots(cls, tokens: Tensor) -> TokenTree:
        """Return trees of a root alone; tokens: LongTensor [B]."""
        if tokens.ndim != 1:
            raise ValueError(f"Root tokens must be [batch], not {list(tokens.shape)}: pass one token a request.")
        tokens = tokens.long()[:, None]
        zero = torch.zeros_like(tokens)
        # Every step of plain decoding has these trees; their structure is in the cache.
        structure = structure_of(torch.full(tokens.shape, -1, dtype=torch.long, device="cpu"), tokens.device)
        return cls(tokens, zero - 1, zero.float(), zero, (1,) * len(tokens), structure)

    @classmethod
    def from_drafts(cls, roots: Sequence[int], drafts: Sequence[Draft], budgets: Sequence[int]) -> TokenTree:
        """Build a tree for each request, of its `budgets[b]` likeliest draft tokens in falling order of probability.

        roots: the requests' newest tokens. drafts: for each the tokens [n], parents [n] (-1: the root), path
        log-probabilities [n] and sources ([n], or one mask for all) of its draft tokens, in which a parent comes before
        its children and is no less likely. Those of log-probability -inf are left out. Lives on the CPU.
        """
        return cls(*laid_out(roots, [likeliest(*each) for each in zip(drafts, budgets, strict=True)]))

    @classmethod
    def from_paths(
        cls, root: int, paths: Sequence[Sequence[int]], logp: Sequence[Sequence[float]] | None = None, source: int = 1
    ) -> TokenTree:
        """Build one tree of token paths below `root`, equal prefixes merged; nodes in order of appearance.

        logp: log-probability of each token given those before it, shaped like `paths` (None: 0.0); where
        paths share a node it keeps its best value. source: the bit mask of all nodes.
        ValueError when logp does not fit the paths.
        """
        if logp is not None and [len(p) for p in logp] != [len(p) for p in paths]:
            raise ValueError("logp takes one number a token: give it the paths' shape.")
        ids: dict[tuple[int, int], int] = {}
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        for p, path in enumerate(paths):
            node, score = -1, 0.0
            for d, token in enumerate(path):
                score += 0.0 if logp is None else float(logp[p][d])
                parent, node = node, ids.setdefault((node, int(token)), len(tokens))
                if node == len(tokens):
                    tokens.append(int(token))
                    parents.append(parent)
                    scores.append(score)
                scores[node] = max(scores[node], score)
        return cls(*laid_out([int(root)], [(tokens, parents, scores, source)]))

    @classmethod
    def from_choices(
        cls, roots: Tensor, candidates: Tensor, choices: Sequence[Sequence[int]], logp: Tensor, source: int = 1
    ) -> TokenTree:
        """Fill the Medusa / EAGLE choice list `choices` from per-depth candidates, all on the CPU.

        roots: LongTensor [B]; candidates: LongTensor [B, D, K], best first, those of one depth all different, as `topk`
        gives them; choices: tuples of child ranks from the root, of depth at most D and ranks below K; logp:
        FloatTensor [B, D, K], log-probability at each depth. Nodes are ordered by depth, then ranks.
        ValueError when a prefix is missing from the list.
        """
        depths, ranks, parents, structure, last = choice_structure(tuple(map(tuple, choices)))
        _, depth, count = candidates.shape
        if structure.height > depth or last >= count:
            raise ValueError(
                f"The choice list needs {structure.height} depths of {last + 1} candidates but there are "
                f"{depth} of {count}: draft more candidates or shorten the list."
            )
        batch, nodes = len(roots), parents.shape[1]
        tokens = torch.cat([roots[:, None], candidates[:, depths, ranks]], 1)
        steps = F.pad(logp[:, depths, ranks], (1, 0))
        # A masked sum, since a product with the mask would turn -inf into NaN.
        scores = steps[:, None].masked_fill(~structure.ancestors, 0.0).sum(-1)
        masks = torch.full_like(tokens, source)
        masks[:, 0] = 0
        spread = Structure(
            structure.depth.expand(batch, -1), structure.ancestors.expand(batch, -1, -1), structure.height
        )
        return cls(tokens, parents.expand(batch, -1), scores, masks, (nodes,) * batch, spread)

    @classmethod
    def from_candidates(
        cls,
        roots: Tensor,
        candidates: np.ndarray,
        logp: np.ndarray,
        node_budget: int | Sequence[int],
        source: int = 1,
        off_path: float = 1.0,
    ) -> TokenTree:
        """Return the most probable subtree of the product of per-depth candidates, best node first, on the CPU.

        roots: LongTensor [B]; candidates: int64 [B, D, K]; logp: float32 [B, D, K], taken as independent of the path
        and capped at 0; node_budget: nodes besides the root, one number or one a request; off_path: factor on the
        probability for each step below a candidate that was not the best of its depth. Candidates of log-probability
        -inf or NaN are never used. ValueError when the budgets do not fit the requests.
        """
        budgets = per_request(node_budget, len(roots), "node_budget")
        scores = np.minimum(np.nan_to_num(logp.astype(np.float64), nan=-np.inf, neginf=-np.inf), 0.0).tolist()
        each = zip(candidates.tolist(), scores, budgets, strict=True)
        return cls(*laid_out(roots.tolist(), [(*best_first(*one, off_path), source) for one in each]))

    @classmethod
    def stack(cls, trees: Sequence[TokenTree]) -> TokenTree:
        """Join all the trees into one ragged batch, in order, padded to the widest. ValueError when empty."""
        if not trees:
            raise ValueError("There are no trees to stack: pass at least one.")
        if len(trees) == 1:
            return trees[0]
        if any(tree.device != trees[0].device for tree in trees):
            raise ValueError("The trees to stack lie on several devices: move them to one first.")
        width = max(tree.width for tree in trees)
        tokens, parents, logp, source = (
            torch.cat([F.pad(getattr(tree, name), (0, width - tree.width), value=fill) for tree in trees])
            for name, fill in zip(("tokens", "parents", "logp", "source"), PADDING, strict=True)
        )
        return cls(tokens, parents, logp, source, tuple(size for tree in trees for size in tree.sizes))

    # ---- shape

    @property
    def batch(self) -> int:
        """Return B, the number of trees."""
        return len(self.sizes)

    @property
    def width(self) -> int:
        """Return N, the nodes of the largest tree (more when padded to a bucket)."""
        return self.tokens.shape[1]

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors."""
        return self.tokens.device

    @property
    def structure(self) -> Structure:
        """Return depth, ancestors and height, computed once and shared between trees of equal shape; read-only."""
        if self._structure is None:
            object.__setattr__(self, "_structure", structure_of(self.parents))
        assert self._structure is not None
        return self._structure

    @property
    def depth(self) -> Tensor:
        """Return LongTensor [B, N], steps below the root; 0 for the root and in padding. Read-only."""
        return self.structure.depth

    @property
    def ancestors(self) -> Tensor:
        """Return BoolTensor [B, N, N]: row i sees j when j is i or above it; padding sees itself. Read-only."""
        return self.structure.ancestors

    @property
    def height(self) -> int:
        """Return the largest depth in the batch."""
        return self.structure.height

    @property
    def real(self) -> Tensor:
        """Return BoolTensor [B, N], False in padding."""
        # From the parents, as the sizes are on the CPU and would have to be copied over.
        real = self.parents >= 0
        real[:, 0] = True
        return real

    def to(self, device: torch.device | str) -> TokenTree:
        """Copy the trees to `device`; the structure goes along through the cache (no rebuild there)."""
        if device == self.tokens.device:  # no string is: called every step, with a device
            return self
        # An index makes "cuda" mean one device also in the cache, whatever becomes current later.
        device = torch.empty(0, device=device, dtype=torch.float32).device
        if device == self.device:
            return self
        tokens, parents, source = moved(torch.stack([self.tokens, self.parents, self.source]), device)
        structure = structure_of(self.parents, device)
        return TokenTree(tokens, parents, moved(self.logp, device), source, self.sizes, structure)

    # ---- cutting

    def best(self, n: int | Sequence[int]) -> TokenTree:
        """Keep the n most probable draft tokens of each tree (fewer where it has fewer) and the root, connected.

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
            return TokenTree(self.tokens, self.parents, capped, self.source, sizes, structure)
        # Stable, so that a parent precedes a child that ties with it, and real nodes precede padding.
        order = capped.sort(dim=1, descending=True, stable=True).indices
        most = moved(torch.tensor(limits, dtype=torch.long, device="cpu"), self.device)[:, None]
        chosen = torch.arange(self.width, device=self.device) <= most
        keep = torch.zeros_like(structure.ancestors[:, 0]).scatter_(1, order, chosen) & self.real
        return self._compact(capped, keep, sizes)[0]

    def first(self, n: Sequence[int]) -> TokenTree:
        """Keep the root and the first n[b] draft tokens of each tree; the best ones if logp falls by node."""
        sizes = self._sizes_with(n)
        width = max(sizes, default=1)
        # Connected, since parents come before their children.
        columns = [column[:, :width] for column in (self.tokens, self.parents, self.logp, self.source)]
        if min(sizes, default=1) < width:
            counts = torch.tensor(sizes, dtype=torch.long, device=self.device)[:, None]
            padding = torch.arange(width, device=self.device) >= counts
            columns = [column.masked_fill(padding, fill) for column, fill in zip(columns, PADDING, strict=True)]
        tokens, parents, logp, source = columns
        return TokenTree(tokens, parents, logp, source, sizes)

    def _sizes_with(self, n: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of the trees with at most n[b] draft tokens each."""
        return tuple(min(count + 1, size) for count, size in zip(n, self.sizes, strict=True))

    def prune(self, keep: Tensor) -> tuple[TokenTree, Tensor]:
        """Drop the nodes where `keep` (BoolTensor [B, N]) is False, and all below them; the root stays.

        Returns the tree [B, N'] and index, LongTensor [B, N']: the old id of each node, -1 in padding.
        """
        if keep.shape != self.tokens.shape:
            raise ValueError(f"keep {list(keep.shape)} must have the tree's shape {list(self.tokens.shape)}.")
        dropped = ~keep
        dropped[:, 0] = False
        keep = self.real & ~any_above(self.structure, dropped)
        return self._compact(self.logp, keep, tuple(keep.sum(1).tolist()))

    def _compact(self, logp: Tensor, keep: Tensor, sizes: tuple[int, ...]) -> tuple[TokenTree, Tensor]:
        """Return the nodes of `keep`, closed upwards, in their order, and their old ids; `sizes` are its row sums."""
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
        tree = TokenTree(
            self.tokens.gather(1, old).masked_fill_(gap, 0),
            parents,
            logp.gather(1, old).masked_fill_(gap, NOTHING),
            self.source.gather(1, old).masked_fill_(gap, 0),
            sizes,
        )
        return tree, index
