"""A grammar as its author writes it: a JSON schema, a regular expression, an EBNF, a list of texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from draftree.grammar.compiled import CompiledGrammar, compiled
from draftree.grammar.llguidance import WHITESPACE, GrammarError, check, compose, translate


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer may say; made by one of the class methods, and good for any model.

    Attributes:
        kind: "json_schema", "regex", "ebnf", "choice", or "composed" of several.
        text: as it was written; of several, as the library reads it.
        whitespace: between the parts of JSON, see `json_schema`.
        longest: most bytes of an answer where that is known at once.
    """

    kind: str
    text: str
    whitespace: str = "fixed"
    longest: int | None = None

    def __post_init__(self) -> None:
        if self.whitespace not in WHITESPACE:
            raise GrammarError(f"whitespace is {self.whitespace!r}: choose {', '.join(WHITESPACE)}.")
        check(self.kind, self.text, self.whitespace)

    @classmethod
    def json_schema(cls, schema: Any, *, whitespace: str = "fixed") -> Self:
        """JSON by a schema.

        Args:
            schema: a dict, its JSON text, or a pydantic model (the class).
            whitespace: "fixed" writes ", " and ": " as `json.dumps` does, "compact" nothing between the parts; "any"
                leaves line breaks and spaces to the model, which forces fewer tokens and may go on for ever.

        Raises:
            GrammarError: no schema, or another whitespace.
        """
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, str | bytes):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise GrammarError(f"The schema is no JSON ({error}): correct it.") from None
        if schema is False:
            raise GrammarError("The schema false allows no text at all: correct it.")
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise GrammarError(
                f"The schema is a {type(schema).__name__}: give a dict, its JSON text, or a pydantic model."
            )
        try:
            text = json.dumps(schema, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"The schema cannot be written as JSON ({error}): correct it.") from None
        return cls("json_schema", text, whitespace)

    @classmethod
    def json(cls, *, whitespace: str = "fixed") -> Self:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, whitespace=whitespace)

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Texts that a regular expression matches as a whole, in the syntax of Rust's `regex` (no look-around)."""
        return cls("regex", _text(pattern, "pattern"))

    @classmethod
    def ebnf(cls, text: str, **parts: Grammar) -> Self:
        """Texts of a context-free grammar, as GBNF (llama.cpp's, `root ::= ...`) or Lark (`start: ...`) write it.

        Args:
            text: the grammar, in llguidance's Lark where there are parts.
            parts: other grammars, to which `text` refers as @name.

        Raises:
            GrammarError: a text or part that is no grammar, or a part that is made of parts itself.
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
        """One of some texts."""
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise GrammarError("A choice is a list of texts, none of them empty, such as ['yes', 'no'].")
        longest = max(len(text.encode("utf-8", "replace")) for text in texts)
        return cls("choice", json.dumps(list(texts)), longest=longest)

    def compile(
        self, tokenizer: Any, vocabulary: int, end_tokens: Sequence[int], min_new_tokens: int | None = None
    ) -> CompiledGrammar:
        """Fit the grammar to a model; kept, so that asking again costs nothing.

        Args:
            tokenizer: the model's, a fast one.
            vocabulary: V, tokens that its logits have.
            end_tokens: ids that end an answer (EOS).
            min_new_tokens: of the answer; None for none.

        Raises:
            GrammarError: what the library cannot express, a grammar that explodes, a tokenizer that does not fit, or
                texts that end before the answer may.
        """
        # A token is a byte or more, and the end token is one of those counted.
        if self.longest is not None and (min_new_tokens or 0) > self.longest + 1:
            raise GrammarError(
                f"min_new_tokens is {min_new_tokens}, and the grammar's texts have at most {self.longest} bytes: "
                "lower it."
            )
        return compiled(self.kind, self.text, self.whitespace, tokenizer, vocabulary, tuple(end_tokens))


def _text(given: Any, what: str) -> str:
    if not isinstance(given, str) or not given:
        raise GrammarError(f"The {what} is {given!r}: give a text that is not empty.")
    return given


Grammars = Grammar | Sequence[Grammar | None] | None
"""One grammar for all answers, one per answer, or none."""


def compile_grammars(
    grammars: Grammars,
    count: int,
    tokenizer: Any,
    vocabulary: int,
    end_tokens: Sequence[int],
    min_new_tokens: int | None = None,
) -> list[CompiledGrammar | None]:
    """Compile the grammars of `count` answers; see `Grammar.compile` for the other arguments.

    Raises:
        TypeError: another object than a grammar.
        ValueError: the number of grammars differs from `count`, or one does not fit the model.
    """
    given: list[Any] = list(grammars) if isinstance(grammars, list | tuple) else [grammars] * count
    for grammar in given:
        if grammar is not None and not isinstance(grammar, Grammar):
            raise TypeError(
                f"grammar is a {type(grammar).__name__}: pass one such as draftree.Grammar.json_schema(...), or None."
            )
    if len(given) != count:
        raise ValueError(f"There are {len(given)} grammars for {count} answers: give one for each, or one for all.")
    fit = tokenizer, vocabulary, end_tokens, min_new_tokens
    return [None if grammar is None else grammar.compile(*fit) for grammar in given]
