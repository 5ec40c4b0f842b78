"""The ways of decoding that `bild` compares: plain, BiLD at every pair of thresholds, its baselines and ablations.

A pair is the large model with a small one; there is one that was trained on its own, and perhaps one that was aligned
with the large model. Ways that give the plain large model's own text say so, and their text is compared with it.
Speculative sampling draws at temperature 1, as in the paper (section 4.1): its text is the large model's own draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from draftree.bench.methods import Draftree, HuggingFace, Method
from draftree.drafting import BiLD, DraftModel
from draftree.shaping import Fixed

PLAIN, SMALL, BILD, LOSSLESS, FIXED = "large alone", "small alone", "BiLD", "BiLD lossless", "speculative"
SAMPLED = "speculative sampling"
NO_ROLLBACK, NO_FALLBACK, TREES = "no rollback", "no fallback", "DraftModel"
THEIRS, ASSISTED = "HF generate", "HF assisted"
EXACT = (PLAIN, LOSSLESS, FIXED, TREES, THEIRS, ASSISTED)  # their text is the large model's own
MOST = 10  # tokens of the small model in a turn (section 7.1.2)


class Pair(NamedTuple):
    """A large model, and small ones by the name that tables give them, the aligned one last."""

    large: Any
    smalls: dict[str, Any]  # by name
    exits: bool = False  # whether the small model is the large one's first layers


@dataclass(frozen=True, slots=True)
class BildWay:
    """One way to decode; what has no meaning for it is None, or "" for the pair."""

    group: str  # which kind
    pair: str = ""  # name of the small model
    # fallback, rollback: alpha_FB and alpha_RB.
    fallback: float | None = None
    rollback: float | None = None
    window: int | None = None  # most tokens of the small model in a turn

    @property
    def name(self) -> str:
        """Return the name in tables."""
        numbers = [("FB", self.fallback), ("RB", self.rollback), ("window", self.window)]
        parts = [f"{name} {value:g}" for name, value in numbers if value is not None]
        return ", ".join([self.group, *filter(None, [self.pair, " ".join(parts)])])

    @property
    def exact(self) -> bool:
        """Return whether its text is the large model's own."""
        return self.group in EXACT

    def method(self, pair: Pair, new: int) -> Method:
        """Return the method that runs it on these models with at most `new` tokens."""
        large, small = pair.large, pair.smalls.get(self.pair)
        given = (self.name, large, new)
        if self.group in (THEIRS, ASSISTED):
            drafting: dict[str, Any] = {"assistant_model": small} if self.group == ASSISTED else {}
            return HuggingFace(*given, **drafting)
        if self.group in (PLAIN, SMALL):
            return Draftree(self.name, large if self.group == PLAIN else small, new)
        if self.group == TREES:
            return Draftree(*given, lambda: DraftModel(small))
        window = self.window or MOST
        if self.group in (FIXED, SAMPLED):
            chain: dict[str, Any] = {"depth": window, "branching": 1, "confidence": 0.0}
            drawn = 1.0 if self.group == SAMPLED else 0.0
            return Draftree(*given, lambda: DraftModel(small, **chain), lambda: Fixed(window), temperature=drawn)
        own: dict[str, Any] = {"lossless": self.group == LOSSLESS, "num_draft_tokens": window}
        return Draftree(*given, lambda: BiLD(small, self.fallback or 0.0, self.rollback, **own))


def ways_of(
    pairs: Sequence[str],
    thresholds: Sequence[tuple[float, float]],
    windows: Sequence[int],
    *,
    ablations: bool = True,
) -> list[BildWay]:
    """Return all ways to compare, the plain large model first.

    Args:
        pairs: names of the small models. Speculative sampling takes the first one, as the paper does, the other
            baselines and ablations the last one.
        thresholds: (alpha_FB, alpha_RB) of every point of the grid.
        windows: tokens of the small model in a turn, of speculative decoding and of BiLD without fallback.
        ablations: whether to leave out rollback, and fallback, as well.
    """
    first, last = pairs[0], pairs[-1]
    fallbacks, rollbacks = (sorted({pair[i] for pair in thresholds}) for i in (0, 1))
    ways = [BildWay(PLAIN), *(BildWay(SMALL, pair) for pair in pairs)]
    ways += [BildWay(BILD, pair, fallback, rollback) for pair in pairs for fallback, rollback in thresholds]
    if ablations:
        ways += [BildWay(NO_ROLLBACK, last, fallback) for fallback in fallbacks if fallback > 0]
        ways += [BildWay(NO_FALLBACK, last, None, rollback, window) for rollback in rollbacks for window in windows]
    ways += [BildWay(LOSSLESS, last, fallback) for fallback in fallbacks]
    ways += [
        BildWay(group, pair, None, None, window)
        for group, pair in ((FIXED, last), (SAMPLED, first))
        for window in windows
    ]
    ways += [BildWay(TREES, last), BildWay(THEIRS), BildWay(ASSISTED, last)]
    return list(dict.fromkeys(ways))


def check_windows(given: Sequence[int]) -> None:
    """Raise a ValueError for turns of the small model without tokens."""
    if wrong := [window for window in given if window < 1]:
        raise ValueError(f"windows has {wrong[0]}: give numbers of draft tokens from 1 on.")


def read_thresholds(given: Sequence[str]) -> tuple[tuple[float, float], ...]:
    """Return the points of the grid from FALLBACK:ROLLBACK; raise a ValueError for other texts and thresholds."""
    found = []
    for text in given:
        fallback, _, rollback = text.partition(":")
        try:
            found.append((float(fallback), float(rollback)))
        except ValueError:
            raise ValueError(f"A point of thresholds is {text!r}: give FALLBACK:ROLLBACK, as 0.6:5.") from None
        if not 0 <= found[-1][0] <= 1:
            raise ValueError(f"The fallback threshold is {found[-1][0]}: give a probability from 0 (never) to 1.")
        if not found[-1][1] >= 0:
            raise ValueError(f"The rollback threshold is {found[-1][1]}: give 0 or more.")
    if not found:
        raise ValueError("There are no thresholds: give at least one pair, as 0.6:5.")
    return tuple(dict.fromkeys(found))
