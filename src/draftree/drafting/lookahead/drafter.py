"""Lookahead: drafts retrieved from a trie of prompts and earlier outputs (Zhao et al., KDD '24).

Every position of a prompt or an output is a key, what followed it a branch; the context's last tokens are looked up
and the branches found are verified as one tree. Nothing is trained, and the trie gets better with use.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

from draftree.drafting.base import Context, Drafter
from draftree.drafting.lookahead.trie import Trie
from draftree.drafting.lookahead.twins import MODES, SOURCES, checked_ids, chosen
from draftree.runner.target import Target
from draftree.tree import TokenTree

NAMES = {SOURCES["prompt"]: "lookahead/prompt", SOURCES["output"]: "lookahead/output", SOURCES["mix"]: "lookahead/both"}


class Lookahead(Drafter):
    """Drafts from a trie; one object may serve many calls and engines, and learns from all of them.

    Args:
        decoding_length: most nodes of a draft (paper: 64; how many are verified is the shape's choice).
        branch_length: most tokens of a branch (paper: 12, in batches 8).
        mode: "hierarchical" (branches merged into one tree), "parallel" (branches side by side under the same
            budget) or "single" (the best branch, as in LLMA).
        sources: "mix", "prompt" or "output".
        trie_options: `max_query_length`, `prompt_weight`, `capacity`, `max_nodes`, `prune`, `eliminate` and
            `backend`, see `TrieOptions` and `Trie`.
    """

    name: ClassVar[str] = "lookahead"

    def __init__(
        self,
        decoding_length: int = 64,
        branch_length: int = 12,
        *,
        mode: str = "hierarchical",
        sources: str = "mix",
        **trie_options: Any,
    ) -> None:
        chosen("mode", mode, MODES)
        chosen("sources", sources, SOURCES)
        self.max_nodes = decoding_length
        self.mode = mode
        self.sources = sources
        self._options = {"decoding_length": decoding_length, "branch_length": branch_length, **trie_options}
        self._trie: Trie | None = None
        self._answers: list[list[int]] = []  # to be stored when the trie is made
        self._seen: dict[int, int] = {}  # how many tokens of each request the trie has been given
        self._making = threading.Lock()  # engines in several threads may meet the drafter at once
        if "eos_token_ids" in trie_options:
            self._trie = Trie(**self._options)
        else:
            Trie(**self._options)  # a bad option is refused here, not in the first call

    @property
    def trie(self) -> Trie:
        """The store; made when the first target tells its EOS ids, or on first use."""
        return self._made(())

    def _made(self, eos_token_ids: Sequence[int]) -> Trie:
        with self._making:
            if self._trie is None:
                trie = Trie(**{"eos_token_ids": eos_token_ids} | self._options)
                for answer in self._answers:
                    trie.warm(answer)
                self._trie, self._answers = trie, []
            return self._trie

    def bind(self, target: Target, **hints: Any) -> None:
        """See `Drafter.bind`."""
        self._made(hints.get("eos_token_ids", ()))

    def source_name(self, source: int) -> str:
        """See `Drafter.source_name`."""
        return NAMES.get(source, self.name)

    def begin(self, request: Context) -> None:
        """See `Drafter.begin`."""
        self.trie.begin(request.id, request.tokens)
        self._seen[request.id] = len(request.tokens)

    def draft(self, requests: Sequence[Context], budgets: Sequence[int]) -> TokenTree:
        """See `Drafter.draft`."""
        return self.trie.draft(
            [request.id for request in requests],
            [request.tokens[-1] for request in requests],
            budgets,
            news=[self._news(request) for request in requests],
            depths=[request.room - 1 for request in requests],
            mode=self.mode,
            sources=self.sources,
        )

    def end(self, request: Context) -> None:
        """See `Drafter.end`."""
        try:
            news = self._news(request)
            if news:
                self.trie.extend(request.id, news)
        finally:
            self._seen.pop(request.id, None)
            self.trie.end(request.id)

    def _news(self, request: Context) -> list[int]:
        """The request's tokens that the trie has yet to read; none before its first draft."""
        tokens = request.tokens
        seen = self._seen.get(request.id, len(tokens))
        self._seen[request.id] = len(tokens)
        return tokens[seen:]

    def warm(self, answers: Sequence[Sequence[int]]) -> None:
        """Insert finished answers (token ids), such as a development set's, before serving."""
        checked = [checked_ids(answer, "answer") for answer in answers]
        with self._making:
            if self._trie is None:  # stored by `bind`, which knows the EOS ids that end an answer
                self._answers += checked
                return
        for answer in checked:
            self._trie.warm(answer)

    def save(self, path: str | os.PathLike[str], tokenizer: Any) -> None:
        """Write the trie's outputs to a flat file that names `tokenizer`."""
        self.trie.save(path, tokenizer_fingerprint(tokenizer))

    @classmethod
    def load(cls, path: str | os.PathLike[str], tokenizer: Any, **options: Any) -> Lookahead:
        """A drafter on a saved trie.

        Raises:
            ValueError: no trie file, a damaged one, or one of another tokenizer.
        """
        trie = Trie.load(path, tokenizer_fingerprint(tokenizer))
        drafter = cls(trie.options.decoding_length, trie.options.branch_length, **options)
        drafter._trie = trie
        return drafter


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A short name of a tokenizer's vocabulary: equal where equal ids mean equal text."""
    import hashlib

    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    digest = hashlib.sha256(repr(vocabulary).encode()).hexdigest()[:32]
    return f"{type(tokenizer).__name__}-{len(vocabulary)}-{digest}"
