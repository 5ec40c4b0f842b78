"""The state of one answer under a grammar: its masks, its forced tokens, and the allowed nodes of its draft trees.

Copies of a matcher share one store of lexer states with a limit of memory, which draft tokens and other answers fill
too. An answer that meets the limit continues with a private matcher with its own store, which reads only true prefixes,
from the first on. If it meets the limit as well, the answer ends, at the same token as in plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from draftree.grammar.llguidance import GrammarError, Matcher

KEPT = 16  # Cached masks: a draft model and the target ask for the same prefixes.
# Processors that Hugging Face puts after a caller's own; a grammar has the place of the latter.
LAST = ("LogitsWarper", "WatermarkLogitsProcessor", "LogitNormalization")


class GrammarState:
    """The grammar at any prefix of one answer. Results do not depend on earlier calls."""

    def __init__(self, matcher: Matcher, make_private: Callable[[], Matcher]) -> None:
        self._matcher, self._make_private = matcher, make_private
        self._private = False  # Whether the matcher is private.
        self._at: list[int] = []  # Tokens that the matcher has consumed.
        self._masks: dict[tuple[int, ...], np.ndarray] = {}  # The latest masks by prefix.

    def allowed(self, answer: Sequence[int]) -> np.ndarray:
        """Return the tokens that may follow `answer`: BoolArray [V], read-only."""
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
        except GrammarError:
            if self._private:
                raise
        self._matcher, self._private, self._at = self._make_private(), True, []
        for end in range(len(answer)):
            self._move(answer[:end])
            self._matcher.allowed()
        return self._mask(answer)

    def forced(self, answer: Sequence[int]) -> list[int]:
        """Return the tokens that must follow `answer`, as the tokenizer would write them; often none.

        There are none of a private matcher, or of a grammar beyond its limits (`allowed` raises the error).
        """
        if self._private:
            return []
        try:
            self._move(answer)
            return self._matcher.forced()
        except GrammarError:
            return []

    def permits(self, answer: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Return which nodes of a draft tree the grammar allows; the root alone with a private matcher."""
        keep = [True] + [False] * (len(tokens) - 1)
        if self._private:
            return keep
        with suppress(GrammarError):  # `allowed` raises it.
            self._move(answer)
            self._walk(tokens, parents, keep)
        return keep

    def _walk(self, tokens: Sequence[int], parents: Sequence[int], keep: list[bool]) -> None:
        """Try all paths of a tree from the matcher's position, and mark the nodes that it consumes."""
        children: dict[int, list[int]] = {}
        for node in range(1, len(tokens)):
            children.setdefault(parents[node], []).append(node)
        depth = 0  # Tokens consumed beyond the answer.
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
        """Move the matcher to the end of `answer`."""
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


class GrammarProcessor(LogitsProcessor):
    """Masks the tokens that the grammar does not allow."""

    def __init__(self, state: GrammarState, start: int) -> None:
        self.state, self._start = state, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return `scores` [1, V] with -inf at forbidden tokens."""
        allowed = torch.from_numpy(self.state.allowed(input_ids[0, self._start :].tolist()))
        left = scores.masked_fill(~allowed.to(scores.device), -torch.inf)
        if bool(left.amax() == -torch.inf):
            raise GrammarError(
                "The grammar allows here only tokens that other options forbid (min_new_tokens, bad words, suppressed "
                "tokens): loosen one of them."
            )
        return left


def with_grammar(processors: LogitsProcessorList, own: GrammarProcessor) -> LogitsProcessorList:
    """Return `processors` with a grammar's, in the place of a caller's own in Hugging Face's `generate`."""
    place = next((i for i, p in enumerate(processors) if type(p).__name__.endswith(LAST)), len(processors))
    return LogitsProcessorList([*processors[:place], own, *processors[place:]])
