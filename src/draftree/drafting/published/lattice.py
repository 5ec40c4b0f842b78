"""What DSpark and DFlash2 add to DFlash: a draft token's score depends on the one before it.

DSpark (arXiv 2607.05147) adds a bias from the previous token to all logits; DFlash2 scores the best candidates of each
depth after each of the last depth's. Either way the candidates of all depths are a lattice, and a tree comes of it.
"""

from __future__ import annotations

import heapq
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftree.drafting.published.layers import linear


class DynamicConv(nn.Module):
    """DFlash2's convolution along a block, before (side 0) and behind (side 1) attention or the MLP.

    Args:
        width: of the rows.
        taps: rows that it reads, with the row itself.
        group: entries of a row that share a dynamic coefficient.
    """

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.empty(2, taps, width, dtype=torch.float32, device="meta"))
        self.kernel_projection = linear(width, 2 * taps * (width // group))

    def coefficients(self, x: Tensor) -> Tensor:
        """Return the coefficients [2, taps, B, n, width] of normed rows [B, n, width]."""
        sides, taps, width = self.base_kernel.shape
        dynamic = self.kernel_projection(x).view(*x.shape[:2], sides, taps, -1)
        repeated = dynamic.repeat_interleave(width // dynamic.shape[-1], -1)
        return repeated.permute(2, 3, 0, 1, 4) + self.base_kernel[:, :, None, None]


def convolve(x: Tensor, coefficients: Tensor) -> Tensor:
    """Return rows [B, n, width], each a sum of itself and those before it in its block, times [taps, B, n, width]."""
    shifted = (F.pad(x, (0, 0, tap, 0))[:, : x.shape[1]] for tap in range(len(coefficients)))
    return sum((rows * own for rows, own in zip(shifted, coefficients, strict=True)), torch.zeros_like(x))


class Selector(nn.Module):
    """DFlash2's scores of a candidate after another one."""

    def __init__(self, vocab_size: int, width: int, rank: int) -> None:
        super().__init__()
        for name in ("predecessor_codebook", "successor_codebook"):
            setattr(self, name, nn.Parameter(torch.empty(vocab_size, rank, dtype=torch.float32, device="meta")))
        self.hidden_projection = linear(width, rank)

    def forward(self, rows: Tensor, previous: Tensor, candidates: Tensor, draft_ids: Tensor) -> Tensor:
        """Return scores [L, D, P, K] to be added to the candidates' logits.

        Args:
            rows: [L, D, width], behind the last norm.
            previous: LongTensor [L, D, P], token ids before each depth.
            candidates: LongTensor [L, D, K], token ids of each depth.
            draft_ids: the same in the head's numbering.
        """
        before: Any = self.predecessor_codebook
        behind: Any = self.successor_codebook
        made: Tensor = (before[previous] * self.hidden_projection(rows)[:, :, None]) @ behind[candidates].mT
        return made


class MarkovHead(nn.Module):
    """DSpark's bias of all logits from the previous token: W2 W1[previous]."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank, dtype=torch.float32, device="meta")
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False, dtype=torch.float32, device="meta")

    def forward(self, rows: Tensor, previous: Tensor, candidates: Tensor, draft_ids: Tensor) -> Tensor:
        """See `Selector.forward`."""
        return self.markov_w1(previous) @ self.markov_w2.weight[draft_ids].mT


class ConfidenceHead(nn.Module):
    """DSpark's logit of how probably the drafted token is accepted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1, dtype=torch.float32, device="meta")

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits [...] of rows [..., width]."""
        made: Any = self.proj(rows)
        return made[..., 0]


def best_of_lattice(
    tokens: list[list[int]], logp: list[list[list[float]]], budget: int
) -> tuple[list[int], list[int], list[float]]:
    """Return the most probable subtree of a lattice, best node first: tokens, parents and log-probabilities.

    Args:
        tokens: by depth the candidates' tokens, different ones.
        logp: by depth, and by candidate of the last depth, the log-probabilities of this depth's candidates. The first
            depth has one row.
        budget: most nodes.

    Parents count from 0, and -1 is the root.
    """
    found: tuple[list[int], list[int], list[float]] = ([], [], [])
    # (minus the log-probability, order, parent, its depth, candidate)
    heap: list[tuple[float, int, int, int, int]] = []
    offered = 0

    def offer(parent: int, base: float, depth: int, row: int) -> None:
        nonlocal offered
        for k, value in enumerate(logp[depth][row]):
            if value > float("-inf"):
                heapq.heappush(heap, (-(base + value), offered, parent, depth, k))
                offered += 1

    offer(-1, 0.0, 0, 0)
    while heap and len(found[0]) < budget:
        minus, _, parent, depth, k = heapq.heappop(heap)
        found[0].append(tokens[depth][k])
        found[1].append(parent)
        found[2].append(-minus)
        if depth + 1 < len(tokens):
            offer(len(found[0]) - 1, -minus, depth + 1, k)
    return found
