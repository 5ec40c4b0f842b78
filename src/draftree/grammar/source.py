"""Grammars as users write them (a JSON schema, a regular expression, an EBNF, a list of texts), and compiled ones."""

from __future__ import annotations

import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from draftree.grammar.llguidance import (
    WHITESPACE,
    GrammarError,
    Matcher,
    build,
    check_pace,
    compose,
    read_tokenizer,
    translate,
)
from draftree.grammar.schema import check_numbers
from draftree.grammar.state import GrammarState

KEPT = 128  # Compiled grammars per tokenizer, by latest use.


class CompiledGrammar:
    """A grammar for one tokenizer, vocabulary and set of end tokens; made by `Grammar.compile`."""

    def __init__(self, build: Callable[[], Any], vocabulary: int, end_tokens: tuple[int, ...]) -> None:
        self.vocabulary, self.end_tokens = vocabulary, end_tokens
        self._build, self._original = build, build()
        self._full = False  # Whether the shared store of states has met its limit, see `state`.

    def begin(self) -> GrammarState:
        """Return a state at the beginning of an answer."""
        if self._full:
            self._original, self._full = self._build(), False
        return GrammarState(self._matcher(self._original.deep_copy()), self._private_matcher)

    def _private_matcher(self) -> Matcher:
        """Return a matcher at the beginning with its own states; called when the shared store is full."""
        self._full = True
        return self._matcher(self._build())

    def _matcher(self, made: Any) -> Matcher:
        return Matcher(made, self.vocabulary, self.end_tokens)


@dataclass(slots=True)
class _Cache:
    """Compiled parts of one tokenizer, by vocabulary and end tokens."""

    tokens: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    grammars: OrderedDict[tuple[Any, ...], CompiledGrammar] = field(default_factory=OrderedDict)


_lock = threading.Lock()
_caches: weakref.WeakKeyDictionary[Any, _Cache] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Grammar:
    """The allowed texts of an answer, for any model; made by one of the class methods.

    Attributes:
        kind: "json_schema", "regex", "ebnf", "choice", or "composed" of several.
        text: as written; of several, in the library's language.
        whitespace: between the parts of JSON, see `json_schema`.
    """

    kind: str
    text: str
    whitespace: str = "fixed"

    def __post_init__(self) -> None:
        if self.whitespace not in WHITESPACE:
            raise GrammarError(f"whitespace is {self.whitespace!r}: choose {', '.join(WHITESPACE)}.")
        translate(self.kind, self.text, self.whitespace)  # It raises if the grammar is bad.

    @classmethod
    def json_schema(cls, schema: Any, *, whitespace: str = "fixed") -> Self:
        """Return the grammar of JSON by a schema.

        Args:
            schema: a dict, its JSON text, or a pydantic model (the class).
            whitespace: "fixed" for ", " and ": " as in `json.dumps`; "compact" for none; "any" leaves line breaks and
                spaces to the model, which forces fewer tokens and may never end.

        Raises:
            GrammarError: no valid schema, or another whitespace.
        """
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, str | bytes):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise GrammarError(f"The schema is no JSON ({error}): correct it.") from None
        if not isinstance(schema, dict):
            raise GrammarError(
                f"The schema is a {type(schema).__name__}: give a dict, its JSON text, or a pydantic model."
            )
        try:
            check_numbers(schema)
            text = json.dumps(schema, ensure_ascii=False)
        except GrammarError:
            raise
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"The schema cannot be written as JSON ({error}): correct it.") from None
        return cls("json_schema", text, whitespace)

    @classmethod
    def json(cls, *, whitespace: str = "fixed") -> Self:
        """Return the grammar of any JSON object."""
        return cls.json_schema({"type": "object"}, whitespace=whitespace)

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Return the grammar of full matches of a regular expression, in the syntax of Rust's `regex`."""
        return cls("regex", _text(pattern, "pattern"))

    @classmethod
    def ebnf(cls, text: str, **parts: Grammar) -> Self:
        """Return a context-free grammar, in GBNF (llama.cpp's, `root ::= ...`) or Lark (`start: ...`).

        Args:
            text: the grammar; with parts, in llguidance's Lark.
            parts: other grammars, to which `text` refers as @name.

        Raises:
            GrammarError: a bad text or part, or a part with parts of its own.
        """
        if not parts:
            return cls("ebnf", _text(text, "grammar"))
        for name, part in parts.items():
            if not isinstance(part, Grammar) or part.kind == "composed":
                raise GrammarError(f"The part {name!r} is not one whole grammar: give one such as Grammar.regex(...).")
        inner = {name: translate(part.kind, part.text, part.whitespace) for name, part in parts.items()}
        return cls("composed", compose(_text(text, "grammar"), inner))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Self:
        """Return the grammar of one of some texts."""
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise GrammarError("A choice is a list of texts, none of them empty, such as ['yes', 'no'].")
        return cls("choice", json.dumps(list(texts)))

    def compile(self, tokenizer: Any, vocabulary: int, end_tokens: Sequence[int]) -> CompiledGrammar:
        """Compile the grammar for a model; results are cached.

        Args:
            tokenizer: the model's, a fast one.
            vocabulary: V, tokens of its logits.
            end_tokens: ids that end an answer (EOS).

        Raises:
            GrammarError: a grammar beyond the limits, or a tokenizer that does not fit.
        """
        return _compiled(self, tokenizer, vocabulary, tuple(end_tokens))


def _compiled(grammar: Grammar, tokenizer: Any, vocabulary: int, end_tokens: tuple[int, ...]) -> CompiledGrammar:
    if tokenizer is None:
        raise GrammarError("A grammar needs the model's tokenizer: pass tokenizer=.")
    if not end_tokens:
        raise GrammarError("A grammar ends an answer by an end token, and there is none: pass eos_token_id=.")
    beyond = [token for token in end_tokens if not 0 <= token < vocabulary]
    if beyond:
        raise GrammarError(f"The end token {beyond[0]} is outside the model's vocabulary of {vocabulary}.")
    key = grammar, vocabulary, end_tokens
    with _lock:
        cache = _caches.setdefault(tokenizer, _Cache())
        if key in cache.grammars:
            cache.grammars.move_to_end(key)
            return cache.grammars[key]
        tokens = cache.tokens.get((vocabulary, end_tokens))
    if tokens is None:
        last = max(tokenizer.get_vocab().values())
        if last >= vocabulary:
            raise GrammarError(
                f"The tokenizer has token {last} and the model a vocabulary of {vocabulary}: pass the model's own one."
            )
        tokens = read_tokenizer(tokenizer, vocabulary, end_tokens)
    kind, text = grammar.kind, translate(grammar.kind, grammar.text, grammar.whitespace)
    made = CompiledGrammar(lambda: build(tokens, kind, text), vocabulary, end_tokens)
    check_pace(tokens, kind, text)  # With another matcher, because it fills the store of states.
    with _lock:
        cache.tokens[vocabulary, end_tokens] = tokens
        cache.grammars[key] = made
        while len(cache.grammars) > KEPT:
            cache.grammars.popitem(last=False)
    return made


def _text(given: Any, what: str) -> str:
    if not isinstance(given, str) or not given:
        raise GrammarError(f"The {what} is {given!r}: give a text that is not empty.")
    return given


Grammars = Grammar | Sequence[Grammar | None] | None
"""One grammar for all answers, one per answer, or none."""


def compile_grammars(
    grammars: Grammars, count: int, tokenizer: Any, vocabulary: int, end_tokens: Sequence[int]
) -> list[CompiledGrammar | None]:
    """Compile the grammars of `count` answers; see `Grammar.compile` for the other arguments."""
    given: list[Any] = list(grammars) if isinstance(grammars, list | tuple) else [grammars] * count
    for grammar in given:
        if grammar is not None and not isinstance(grammar, Grammar):
            raise TypeError(
                f"grammar is a {type(grammar).__name__}: pass one such as draftree.Grammar.json_schema(...), or None."
            )
    if len(given) != count:
        raise ValueError(f"There are {len(given)} grammars for {count} answers: give one for each, or one for all.")
    return [None if grammar is None else grammar.compile(tokenizer, vocabulary, end_tokens) for grammar in given]
