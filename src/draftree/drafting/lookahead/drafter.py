"""Lookahead: draft from a trie of prompts and earlier outputs (Zhao et al., KDD '24, arXiv 2312.12728).

The last tokens of the context are searched in the trie, and the branches after them are verified as one tree. There is
no training; the trie improves with use.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from draftree.drafting.base import ByRequest, Capabilities, Drafter, RequestState
from draftree.drafting.lookahead.dict_trie import MAX_TOKEN, MODES, SOURCES, checked_ids, chosen
from draftree.drafting.lookahead.trie import Trie
from draftree.runner.target import Target
from draftree.tree import Draft, TokenTree

NAMES = {SOURCES["prompt"]: "lookahead/prompt", SOURCES["output"]: "lookahead/output", SOURCES["mix"]: "lookahead/both"}

MOST_CACHE_SALTS = 64  # Limit of tries for requests with a cache salt; each has up to `max_nodes` nodes.


class Lookahead(Drafter):
    """Draft from a trie. One drafter may serve many calls and engines, and learns from all of them.

    Args:
        decoding_length: limit of nodes in a draft (paper: 64); the shape chooses how many are verified.
        branch_length: limit of tokens in a branch (paper: 12, in batches 8).
        mode: "hierarchical" (branches merged into one tree), "parallel" (branches side by side under the same
            budget) or "single" (the best branch, as in LLMA).
        sources: "mix", "prompt" or "output".
        trie_options: `max_query_length`, `prompt_weight`, `capacity`, `max_nodes`, `prune`, `eliminate` and
            `compiled`; see `TrieOptions` and `Trie`.
    """

    name = "lookahead"
    capabilities = Capabilities(copies_prediction=True)
    # Shares of hits exceed the shares of accepted draft tokens; see docs/methods/merge.md for the measurement.
    discount = 0.7

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
        self._answers: list[list[int]] = []  # Stored when the trie is made.
        self._eos: Sequence[int] = ()
        self._salted: dict[str, Trie] = {}  # The most recently used one is last.
        self._loaded: Any = None  # Function and arguments that make another trie from the loaded file.
        self._seen: ByRequest[int] = ByRequest()  # Tokens of each request that the trie has.
        # Garbage collection of an engine may end requests while this thread holds the lock.
        self._making = threading.RLock()
        checked = Trie(**self._options)  # Bad options raise here, not in the first call.
        self._trie: Trie | None = checked if "eos_token_ids" in trie_options else None

    def __getstate__(self) -> dict[str, Any]:
        """Copy options and tries, without requests."""
        with self._making:
            own = {"_salted": dict(self._salted), "_answers": list(self._answers)}
            return {name: value for name, value in vars(self).items() if name != "_making"} | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._making = threading.RLock()

    @property
    def trie(self) -> Trie:
        """Return the trie, made with the EOS ids of the first target or on first use."""
        return self.trie_of(None)

    def trie_of(self, cache_salt: str | None) -> Trie:
        """Return the trie of one cache_salt: `trie` for None, else a copy of the loaded one.

        The `MOST_CACHE_SALTS` most recently used tries are kept. Copying a large one takes up to a second, so a server
        calls this outside of the engine's thread.
        """
        with self._making:
            if cache_salt is None:
                if self._trie is None:
                    self._trie = self._new_trie()
                    for answer in self._answers:
                        self._trie.warm(answer)
                    self._answers = []
                return self._trie
            if cache_salt in self._salted:
                self._salted[cache_salt] = self._salted.pop(cache_salt)
                return self._salted[cache_salt]
        made = self._new_trie()  # Without the lock, so that other threads can draft.
        with self._making:
            found = self._salted.pop(cache_salt, made)
            idle = [name for name, trie in self._salted.items() if not trie.live_requests]
            for name in idle[: max(0, len(self._salted) + 1 - MOST_CACHE_SALTS)]:
                del self._salted[name]
            self._salted[cache_salt] = found
            return found

    def has_trie(self, cache_salt: str | None) -> bool:
        """Return whether `trie_of` has the trie already."""
        with self._making:
            return cache_salt in self._salted if cache_salt is not None else self._trie is not None

    def _new_trie(self) -> Trie:
        if self._loaded is not None:
            make, arguments = self._loaded
            loaded: Trie = make(*arguments)
            return loaded
        return Trie(**{"eos_token_ids": self._eos} | self._options)

    def bind(self, target: Target, *, eos_token_ids: Sequence[int] = ()) -> None:
        self._eos = eos_token_ids
        self.trie_of(None)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tries, and of the loaded file."""
        with self._making:
            tries = [*self._salted.values(), *([] if self._trie is None else [self._trie])]
        loaded = 0 if self._loaded is None else sum(column.nbytes for column in self._loaded[1][2][:-1])
        return loaded + sum(trie.nbytes for trie in tries)

    def source_name(self, source: int) -> str:
        return NAMES.get(source, self.name)

    def begin(self, request: RequestState) -> None:
        # The prediction joins the prompt's branches, which are dropped when the request ends.
        self.trie_of(request.cache_salt).begin(request.id, [*request.prediction, *request.tokens])
        self._seen[request.id] = len(request.tokens)

    def draft(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        tries = [self.trie_of(request.cache_salt) for request in requests]
        for trie, request in zip(tries, requests, strict=True):  # Requests of this step may draft from each other.
            trie.extend(request.id, self._news(request))
        drafts: list[Draft] = []
        for trie, request, budget in zip(tries, requests, budgets, strict=True):
            depth = min(request.remaining - 1, MAX_TOKEN)
            if budget < 1 or depth < 1:
                drafts.append(([], [], [], 0))
            else:
                drafts.append(trie.retrieve(request.id, budget, depth=depth, mode=self.mode, sources=self.sources))
        return TokenTree.from_drafts([request.tokens[-1] for request in requests], drafts, budgets)

    def end(self, request: RequestState) -> None:
        trie = self.trie_of(request.cache_salt)
        try:
            if news := self._news(request):
                trie.extend(request.id, news)
        finally:
            self._seen.pop(request.id, None)
            trie.end(request.id)

    def _news(self, request: RequestState) -> list[int]:
        """Return the request's tokens that the trie does not have yet."""
        tokens = request.tokens
        seen = self._seen.get(request.id, len(tokens))
        self._seen[request.id] = len(tokens)
        return tokens[seen:]

    def warm(self, answers: Sequence[Sequence[int]], cache_salt: str | None = None) -> None:
        """Insert finished answers (token ids), such as a development set's, for one cache_salt."""
        checked = [checked_ids(answer, "answer") for answer in answers]
        if cache_salt is None:
            with self._making:
                if self._trie is None:  # `bind` stores them, with the EOS ids that end an answer.
                    self._answers += checked
                    return
        trie = self.trie_of(cache_salt)
        for answer in checked:
            trie.warm(answer)

    def save(self, path: str | os.PathLike[str], tokenizer: Any) -> None:
        """Write the outputs in the trie to a safetensors file that names `tokenizer`."""
        self.trie.save(path, tokenizer_fingerprint(tokenizer))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        tokenizer: Any,
        *,
        mode: str = "hierarchical",
        sources: str = "mix",
    ) -> Lookahead:
        """Return a drafter on a saved trie, with the options of that trie.

        Raises:
            ValueError: the file is not a trie, is damaged, or belongs to another tokenizer.
        """
        trie = Trie.load(path, tokenizer_fingerprint(tokenizer))
        own = {name: value for name, value in vars(trie.options).items() if name != "eos_token_ids"}
        drafter = cls(**own, mode=mode, sources=sources)
        drafter._trie, drafter._loaded = trie, trie.__reduce__()
        return drafter


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a short name of a tokenizer's vocabulary; equal names mean equal ids for equal text."""
    import hashlib

    if not hasattr(tokenizer, "get_vocab"):
        raise TypeError(
            f"A trie file names its tokenizer: give the model's tokenizer, not a {type(tokenizer).__name__}."
        )
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    digest = hashlib.sha256(repr(vocabulary).encode()).hexdigest()[:32]
    return f"{type(tokenizer).__name__}-{len(vocabulary)}-{digest}"
