"""Grammars that were fitted to a tokenizer, kept for requests to come."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from draftree.grammar.llguidance import GrammarError, Matcher, build, check_pace, read_tokenizer, translate
from draftree.grammar.state import GrammarState

KEPT = 128  # compiled grammars of a tokenizer; the one asked for longest ago goes

_Key = tuple[int, tuple[int, ...]]  # vocabulary and end tokens


class CompiledGrammar:
    """A grammar for one tokenizer, vocabulary and set of end tokens; made by `Grammar.compile`.

    Args:
        build: makes a matcher at the beginning of a text.
        vocabulary: V, tokens that the model's logits have.
        end_tokens: ids that end an answer.
    """

    def __init__(self, build: Callable[[], Any], vocabulary: int, end_tokens: tuple[int, ...]) -> None:
        self.vocabulary, self.end_tokens = vocabulary, end_tokens
        self._build, self._original = build, build()
        self._full = False  # whether the store of states that the original's copies share has met its limit

    def begin(self) -> GrammarState:
        """Return a state at the beginning of an answer."""
        if self._full:
            self._original, self._full = self._build(), False
        return GrammarState(self._matcher(self._original.deep_copy()), self._private_matcher)

    def _private_matcher(self) -> Matcher:
        """A matcher at the beginning that shares its states with no other; asked for when the shared store is full."""
        self._full = True
        return self._matcher(self._build())

    def _matcher(self, made: Any) -> Matcher:
        return Matcher(made, self.vocabulary, self.end_tokens)


class _Kept:
    """What is kept of one tokenizer."""

    def __init__(self) -> None:
        self.tokens: dict[_Key, Any] = {}
        self.grammars: OrderedDict[tuple[Any, ...], CompiledGrammar] = OrderedDict()


_lock = threading.Lock()
_kept: weakref.WeakKeyDictionary[Any, _Kept] = weakref.WeakKeyDictionary()


def compiled(
    kind: str, text: str, whitespace: str, tokenizer: Any, vocabulary: int, end_tokens: tuple[int, ...]
) -> CompiledGrammar:
    """See `Grammar.compile`."""
    if tokenizer is None:
        raise GrammarError("A grammar is about text, so it needs the model's tokenizer: pass tokenizer=.")
    if not end_tokens:
        raise GrammarError("A grammar ends an answer by an end token, and there is none: pass eos_token_id=.")
    beyond = [token for token in end_tokens if not 0 <= token < vocabulary]
    if beyond:
        raise GrammarError(f"The end token {beyond[0]} is outside the model's vocabulary of {vocabulary}.")
    own = (kind, text, whitespace, vocabulary, end_tokens)
    with _lock:
        kept = _kept.setdefault(tokenizer, _Kept())
        found = kept.grammars.get(own)
        if found is not None:
            kept.grammars.move_to_end(own)
            return found
        tokens = kept.tokens.get((vocabulary, end_tokens))
    if tokens is None:
        last = max(tokenizer.get_vocab().values())
        if last >= vocabulary:
            raise GrammarError(
                f"The tokenizer has token {last} and the model a vocabulary of {vocabulary}: pass the model's own one."
            )
        tokens = read_tokenizer(tokenizer, vocabulary, end_tokens)
    translated = translate(kind, text, whitespace)
    made = CompiledGrammar(lambda: build(tokens, kind, translated), vocabulary, end_tokens)
    check_pace(tokens, kind, translated)  # once, and in a matcher of its own: it fills the store of states
    with _lock:
        kept.tokens[vocabulary, end_tokens] = tokens
        kept.grammars[own] = made
        while len(kept.grammars) > KEPT:
            kept.grammars.popitem(last=False)
    return made
