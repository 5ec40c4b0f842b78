"""The ways of decoding that `draftree bench bild` compares: plain, BiLD at every pair of thresholds, and its baselines.

A pair is the large model with a small one; there is one that was trained on its own, and perhaps one that was aligned
with the large model. Ways that give the plain large model's own text say so, and are held to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftree.bench.methods import DraftingHuggingFace, Draftree, HuggingFace, Method
from draftree.drafting import BiLD, DraftModel
from draftree.shaping import Fixed

PLAIN, SMALL, BILD, LOSSLESS, TREES, FIXED = "plain", "small", "bild", "bild lossless", "draft model", "speculative"
NO_ROLLBACK, NO_FALLBACK, THEIRS, ASSISTED = "no rollback", "no fallback", "HF generate", "HF assisted"
GROUPS = {
    PLAIN: "large alone",
    SMALL: "small alone",
    BILD: "BiLD",
    NO_ROLLBACK: "no rollback",
    NO_FALLBACK: "no fallback",
    LOSSLESS: "BiLD lossless",
    FIXED: "speculative",
    TREES: "DraftModel",
    THEIRS: "HF generate",
    ASSISTED: "HF assisted",
}
EXACT = (PLAIN, LOSSLESS, FIXED, TREES, THEIRS, ASSISTED)  # their text is the large model's own
MOST = 10  # tokens of the small model in a turn (section 7.1.2)
ABLATION_WINDOW = 5  # turns of the small model where only rollback is left


@dataclass(frozen=True, slots=True)
class Way:
    """One way to decode.

    Attributes:
        group: which kind; one of `GROUPS`.
        pair: name of the small model; "" where there is none.
        fallback: alpha_FB; None where it has no meaning.
        rollback: alpha_RB; None where it has no meaning.
        window: most tokens of the small model in a turn; None where it has no meaning.
    """

    group: str
    pair: str = ""
    fallback: float | None = None
    rollback: float | None = None
    window: int | None = None

    @property
    def name(self) -> str:
        """Key in result files."""
        numbers = [("FB", self.fallback), ("RB", self.rollback), ("window", self.window)]
        return " ".join([self.group, *filter(None, [self.pair]), *(f"{k} {v:g}" for k, v in numbers if v is not None)])

    @property
    def exact(self) -> bool:
        """Whether its text is the large model's own."""
        return self.group in EXACT

    def method(self, large: Any, smalls: Mapping[str, Any], max_new_tokens: int) -> Method:
        """What runs it, with the small models by name."""
        given = (self.name, self.name, large, max_new_tokens)
        small = smalls.get(self.pair)
        if self.group == THEIRS:
            return HuggingFace(*given)
        if self.group == ASSISTED:
            return DraftingHuggingFace(*given, assistant_model=small)
        if self.group == SMALL:
            return Draftree(self.name, self.name, small, max_new_tokens)
        if self.group == PLAIN:
            return Draftree(*given)
        if self.group == TREES:
            return Draftree(*given, lambda: DraftModel(small))
        window = self.window or MOST
        if self.group == FIXED:
            return Draftree(
                *given, lambda: DraftModel(small, depth=window, branching=1, confidence=0.0), lambda: Fixed(window)
            )
        lossless = self.group == LOSSLESS
        return Draftree(
            *given,
            lambda: BiLD(small, self.fallback or 0.0, self.rollback, lossless=lossless, num_draft_tokens=window),
        )


def ways_of(
    pairs: Sequence[str], thresholds: Sequence[tuple[float, float]], windows: Sequence[int], *, ablations: bool = True
) -> list[Way]:
    """All ways to compare, the plain large model first.

    Args:
        pairs: names of the small models; the baselines and ablations take the last one.
        thresholds: (alpha_FB, alpha_RB) of every point of the grid.
        windows: of speculative decoding with a fixed number of guesses.
        ablations: whether to leave out rollback, and fallback, as well.
    """
    last = pairs[-1]
    fallbacks = sorted({fallback for fallback, _ in thresholds})
    rollbacks = sorted({rollback for _, rollback in thresholds})
    ways = [Way(PLAIN), *(Way(SMALL, pair) for pair in pairs)]
    ways += [Way(BILD, pair, fallback, rollback) for pair in pairs for fallback, rollback in thresholds]
    if ablations:
        ways += [Way(NO_ROLLBACK, last, fallback) for fallback in fallbacks if fallback > 0]
        middle = rollbacks[len(rollbacks) // 2]
        turns = [(rollback, ABLATION_WINDOW) for rollback in rollbacks] + [(middle, 3), (middle, MOST)]
        ways += [Way(NO_FALLBACK, last, None, rollback, window) for rollback, window in turns]
    ways += [Way(LOSSLESS, last, fallback) for fallback in fallbacks]
    ways += [Way(FIXED, last, None, None, window) for window in windows]
    ways += [Way(TREES, last), Way(THEIRS), Way(ASSISTED, last)]
    return list(dict.fromkeys(ways))
