"""One answer under a grammar: which tokens may follow a prefix of it, and which of its draft tokens it allows.

A matcher keeps the states that it has met in one store for all its copies, up to a limit of memory. Draft tokens that
were tried, and other answers, fill the store too. So where an answer's matcher meets the limit, it is replaced by a
private one with a store of its own. That one is asked only about true prefixes of the answer, from the first on, as
plain decoding asks: where it meets the limit, the answer ends, and would have ended with any drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from draftree.grammar.llguidance import GrammarError, GrammarSlowError, Matcher

KEPT = 16  # masks; a draft model and the model itself ask about the same prefixes


class GrammarState:
    """Answers about prefixes of one answer. A prefix is given whole, so nothing depends on what was asked before.

    Args:
        matcher: at the beginning of the answer.
        make_private: makes a matcher that shares its store with no other.
    """

    def __init__(self, matcher: Matcher, make_private: Callable[[], Matcher]) -> None:
        self._matcher, self._make_private = matcher, make_private
        self._private = False  # whether the matcher is such a one
        self._at: list[int] = []  # the tokens that the matcher has consumed
        self._masks: dict[tuple[int, ...], np.ndarray] = {}  # by prefix, the last ones that were asked for

    def allowed(self, answer: Sequence[int]) -> np.ndarray:
        """BoolArray [V], read-only: the tokens that may follow `answer`.

        Raises:
            GrammarError: `answer` is outside the grammar, or takes it more time or memory than its limits.
        """
        key = tuple(answer)
        mask = self._masks.get(key)
        if mask is None:
            mask = self._masks[key] = self._mask(answer)
            if len(self._masks) > KEPT:
                del self._masks[next(iter(self._masks))]
        return mask

    def _mask(self, answer: Sequence[int]) -> np.ndarray:
        try:
            self._move(answer)
            return self._matcher.allowed()
        except GrammarError as error:
            if self._private or isinstance(error, GrammarSlowError):
                raise
        self._matcher, self._private, self._at = self._make_private(), True, []
        for end in range(len(answer)):
            self._move(answer[:end])
            self._matcher.allowed()
        return self._mask(answer)

    def forced(self, answer: Sequence[int]) -> list[int]:
        """The tokens that follow `answer` whatever is chosen, as the tokenizer would write them; often none.

        None as well where the grammar cannot be followed further: `allowed` says why, to the one who has to choose. And
        none of a private matcher, see the module.
        """
        if self._private:
            return []
        try:
            self._move(answer)
            return self._matcher.forced()
        except GrammarError:
            return []

    def permits(self, answer: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Of a draft tree behind `answer`, which nodes the grammar allows; none below one that it does not.

        A private matcher is not asked, see the module: the root alone is kept.

        Args:
            answer: its last token is the root.
            tokens, parents: of the nodes, the root first; a parent comes before its children.
        """
        keep = [True] + [False] * (len(tokens) - 1)
        if self._private:
            return keep
        with suppress(GrammarError):  # see `forced`
            self._move(answer)
            self._walk(tokens, parents, keep)
        return keep

    def _walk(self, tokens: Sequence[int], parents: Sequence[int], keep: list[bool]) -> None:
        """Try all paths of a tree from where the matcher stands, and mark what it consumes."""
        children: dict[int, list[int]] = {}
        for node in range(1, len(tokens)):
            children.setdefault(parents[node], []).append(node)
        depth = 0  # tokens consumed beyond the answer
        to_see = [(node, 0) for node in reversed(children.get(0, ()))]
        while to_see:
            node, above = to_see.pop()
            self._matcher.rollback(depth - above)
            depth = above
            if self._matcher.consume(tokens[node]):
                keep[node], depth = True, above + 1
                to_see += [(child, depth) for child in reversed(children.get(node, ()))]
        self._matcher.rollback(depth)

    def _move(self, answer: Sequence[int]) -> None:
        """Have the matcher stand behind `answer`."""
        at, answer = self._at, list(answer)
        common = len(at)
        if at != answer[:common]:
            common = next((i for i, (a, b) in enumerate(zip(at, answer, strict=False)) if a != b), len(answer))
        self._matcher.rollback(len(at) - common)
        del at[common:]
        for token in answer[common:]:
            if not self._matcher.consume(token):
                raise GrammarError(
                    f"The answer has token {token} where its grammar does not allow it: begin with the grammar's text."
                )
            at.append(token)
