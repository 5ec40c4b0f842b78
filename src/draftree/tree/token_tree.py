"""The token tree: the draft tokens of one step for a batch of requests, and how it comes to be.

Trees are made from token paths, drafts of many requests, candidates of each depth, or other trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from draftree.tree import candidates as fills
from draftree.tree.arrays import TreeArrays
from draftree.tree.candidates import Choices
from draftree.tree.layout import PADDING, Draft, laid_out, likeliest
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
    def from_drafts(cls, roots: Sequence[int], drafts: Sequence[Draft], budgets: Sequence[int]) -> TokenTree:
        """A tree for each request, of its `budgets[b]` likeliest draft tokens in falling order of probability.

        roots: the requests' newest tokens. drafts: for each the tokens [n], parents [n] (-1: the root), path
        log-probabilities [n] and sources ([n], or one mask for all) of its draft tokens, in which a parent comes before
        its children and is no less likely. Those of log-probability -inf are left out. Lives on the CPU.
        """
        return cls(*laid_out(roots, [likeliest(*each) for each in zip(drafts, budgets, strict=True)]))

    @classmethod
    def from_paths(
        cls, root: int, paths: Sequence[Sequence[int]], logp: Sequence[Sequence[float]] | None = None, source: int = 1
    ) -> TokenTree:
        """One tree of token paths below `root`, equal prefixes merged; nodes in order of appearance.

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
        cls, roots: Tensor, candidates: Tensor, choices: Choices, logp: Tensor, source: int = 1
    ) -> TokenTree:
        """The Medusa / EAGLE choice list `choices` filled from per-depth candidates, all on the CPU.

        roots: LongTensor [B]; candidates: LongTensor [B, D, K], best first, those of one depth all different, as `topk`
        gives them; choices: tuples of child ranks from the root, of depth at most D and ranks below K; logp:
        FloatTensor [B, D, K], log-probability at each depth. Nodes are ordered by depth, then ranks.
        ValueError when a prefix is missing from the list.
        """
        return cls(*fills.from_choices(roots, candidates, choices, logp, source))

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
        """The most probable subtree of the full product tree of per-depth candidates, best node first, on the CPU.

        roots: LongTensor [B]; candidates: int64 [B, D, K]; logp: float32 [B, D, K], taken as independent of the path
        and capped at 0; node_budget: nodes besides the root, one number or one a request; off_path: factor on the
        probability for each step below a candidate that was not the best of its depth. Candidates of log-probability
        -inf or NaN are never used. ValueError when the budgets do not fit the requests.
        """
        return cls(*fills.from_candidates(roots, candidates, logp, node_budget, source, off_path))

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
