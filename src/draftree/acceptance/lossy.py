"""What a lossy acceptance rule is: a walk of its own through a scored tree, and what it cannot work with.

Texts under such a rule are no longer those of the plain engine, so rules are named lossy and nobody gets one without
asking for it, or for a drafter that says in its documentation that it brings one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from draftree.acceptance.base import Choice, ScoredTree
from draftree.acceptance.sampled import PrefixChooser
from draftree.tree import TokenTree

# Processors of Hugging Face that count on seeing each position once, in order.
STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")


class LossyRule(ABC):
    """Base of the rules that change texts."""

    @abstractmethod
    def walk(self, scored: ScoredTree, chooser: PrefixChooser | None, request: int | None = None) -> Iterator[Choice]:
        """Walk a tree as the rule would.

        Args:
            scored: the tree.
            chooser: the request's processors and choice behind the path; None for the best of the raw scores.
            request: id of the request.

        Yields:
            (node, token, drafted_by) as `lazy_walk` does; the last token is the model's own.
        """

    def closes(self, tree: TokenTree, b: int, ends: Iterable[int]) -> int | None:
        """The node of tree `b` at which the text ends without a pass of the model; None where it takes part in one."""
        return None

    def check(self, processors: Sequence[object]) -> None:
        """Refuse logits processors that cannot score draft tokens.

        Raises:
            ValueError: one that keeps a state from position to position.
        """
        for processor in processors:
            if type(processor).__name__ in STATEFUL:
                raise ValueError(
                    f"{type(processor).__name__} keeps a state from token to token, and a lossy rule looks at "
                    "several draft tokens of a place: leave its option out, or use the lossless rule."
                )
