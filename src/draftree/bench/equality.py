"""Find where two answers part, and the gap between the two best logits there.

The position and the gap distinguish a bug from a near-tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Difference:
    """Two answers that are not equal."""

    position: int  # of the first new token that differs; the shorter answer's length if the longer one begins with it
    expected: int | None  # the reference's token id there, None behind its end
    found: int | None  # the other's
    gap: float  # best minus second-best logit of the model there, after the tokens both agree on

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"first differs at new token {self.position} (expected id {self.expected}, found {self.found}; "
            f"top-2 logit gap there {self.gap:.3g})"
        )


@torch.no_grad()
def difference(model: Any, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int]) -> Difference | None:
    """Return where two answers to `prompt` (all token ids) part; None if they are equal."""
    if list(expected) == list(found):
        return None
    shorter = min(len(expected), len(found))
    position = next((i for i in range(shorter) if expected[i] != found[i]), shorter)
    prefix = torch.tensor([[*prompt, *expected[:position]]], device=model.device)
    best = model(prefix).logits[0, -1].float().topk(2).values
    return Difference(
        position,
        expected[position] if position < len(expected) else None,
        found[position] if position < len(found) else None,
        float(best[0] - best[1]),
    )
