"""The token tree: the draft tokens of one step for a batch of requests, and how it comes to be.

Trees are made from flat arrays, token paths, drafts of many requests, candidates of each depth, or other trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn import functional as F

from draftree.tree import candidates as fills
from draftree.tree.arrays import TreeArrays
from draftree.tree.candidates import Choices
from draftree.tree.layout import PADDING, Draft, laid_out, likeliest, per_node, to_numpy
from draftree.tree.structure import structure_of


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree(TreeArrays):
    """B trees of up to N nodes and how they are made; see `TreeArrays` for what they hold and how they are cut."""

    @classmethod
    def roots(cls, tokens: Tensor) -> TokenTree:
        """Trees of a root alone; tokens: LongTensor [B]."""
        if tokens.ndim != 1:
            raise ValueError(f"Root tokens must be [batch], not {list(tokens.shape)}: pass one token a request.")
        tokens = tokens.long()[:, None]
        zero = torch.zeros_like(tokens)
        # Every step of plain decoding has these trees; their structure is in the cache.
        structure = structure_of(torch.full(tokens.shape, -1, dtype=torch.long, device="cpu"), tokens.device)
        return cls(tokens, zero - 1, zero.float(), zero, (1,) * len(tokens), structure)

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
        drafted, above = to_numpy(tokens), to_numpy(parents)
        n = drafted.shape[0] if drafted.ndim == 1 else -1
        if n < 0 or above.shape != drafted.shape:
            raise ValueError(
                f"tokens {list(drafted.shape)} and parents {list(above.shape)} must be flat and of one length: "
                "pass one tree without its root."
            )
        if n and (above.min() < -1 or (above >= np.arange(n)).any()):
            raise ValueError("A parent must be -1 (the root) or the index of an earlier node: put parents first.")
        chances = 0.0 if logp is None else per_node(logp, n, "logp")
        masks: Any = 1 if source is None else source
        if not isinstance(masks, int | np.integer):
            masks = per_node(masks, n, "source")
        tree = cls(*laid_out([root], [(drafted, above, chances, masks)]))
        return tree.to(tokens.device) if isinstance(tokens, Tensor) else tree

    @classmethod
    def from_drafts(cls, roots: Sequence[int], drafts: Sequence[Draft], budgets: Sequence[int]) -> TokenTree:
        """A tree for each request, of its `budgets[b]` likeliest draft tokens in falling order of probability.

        roots: the requests' newest tokens. drafts: for each the tokens [n], parents [n] (-1: the root), path
        log-probabilities [n] and sources ([n], or one mask for all) of its draft tokens, in which a parent comes before
        its children and is no less likely. Those of log-probability -inf are left out. Lives on the CPU.
        """
        return cls(*laid_out(roots, [likeliest(*each) for each in zip(drafts, budgets, strict=True)]))

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
        sources = [source] * len(paths) if isinstance(source, int) else list(source)
        if len(sources) != len(paths) or (logp is not None and [len(p) for p in logp] != [len(p) for p in paths]):
            raise ValueError("logp takes one number a token and source one mask a path: give both the paths' shape.")
        ids: dict[tuple[int, int], int] = {}
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        masks: list[int] = []
        for p, path in enumerate(paths):
            node, score = -1, 0.0
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
        return cls(*laid_out([int(root)], [(tokens, parents, scores, masks)]))

    @classmethod
    def from_choices(
        cls, roots: Tensor, candidates: Tensor, choices: Choices, logp: Tensor | None = None, source: int = 1
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
