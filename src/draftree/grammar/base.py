"""What a grammar library has to do for us: one small protocol, so that another could take the place of llguidance."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class GrammarError(ValueError):
    """A grammar that cannot be used, or an answer that it leaves no way to go on; the message says what to do."""


class Matcher(Protocol):
    """Follows one text, token by token, and says what may come next."""

    def consume(self, token: int) -> bool:
        """Go on by a token; False, and nothing has changed, where the grammar does not allow it here."""

    def rollback(self, count: int) -> None:
        """Take the last `count` tokens back."""

    def allowed(self) -> np.ndarray:
        """BoolArray [V]: the tokens that may come next; end tokens where the text may end.

        Raises:
            GrammarError: the grammar takes more time or memory than its limits, or nothing can follow.
        """

    def forced(self) -> list[int]:
        """The tokens that the text goes on with whatever is chosen, as the tokenizer would write them; often none."""
