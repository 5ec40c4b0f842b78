"""JSON schemas of thirty kinds, and Hugging Face's way of answering by them: a processor that masks every row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor


def text(most: int = 16) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


def record(**properties: Any) -> dict[str, Any]:
    """Return an object with all of these and no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def listed(items: Any, most: int = 3, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
ADDRESS = record(street=text(), city=text(10), code={"type": "string", "pattern": "^[0-9]{5}$"})

# All but the recursive ones are bounded, so that a model which knows no JSON comes to an end as well.
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": record(name=text(), age={"type": "integer", "minimum": 0, "maximum": 120}),
    "nested": record(name=text(), address=ADDRESS),
    "deeply-nested": record(a=record(b=record(c=record(d=record(e=DIGIT))))),
    "list-of-numbers": listed(DIGIT, most=6, least=2),
    "list-of-texts": record(tags=listed(text(8), least=1)),
    "list-of-objects": record(people=listed(record(name=text(8), age=DIGIT), most=2, least=1)),
    "list-of-lists": listed(listed(DIGIT, least=1), most=2, least=1),
    "tuple": {"type": "array", "prefixItems": [DIGIT, text(6), {"type": "boolean"}], "minItems": 3, "maxItems": 3},
    "enum": record(color={"enum": ["red", "green", "blue"]}, size={"enum": ["s", "m", "l", "xl"]}),
    "enum-of-kinds": record(value={"enum": [1, "one", True, None, [1, 2], {"a": 1}]}),
    "const": record(version={"const": "1.0"}, kind={"const": "event"}, at=DIGIT),
    "integer-bounds": record(n={"type": "integer", "minimum": -17, "maximum": 4242}),
    "exclusive-bounds": record(n={"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 13}),
    "number-bounds": record(x={"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.125}),
    "multiple-of": record(n={"type": "integer", "multipleOf": 25, "minimum": 0, "maximum": 1000}),
    "booleans-and-null": record(
        done={"type": "boolean"}, nothing={"type": "null"}, maybe={"type": ["boolean", "null"]}
    ),
    "any-of": record(id={"anyOf": [{"type": "integer", "minimum": 0, "maximum": 999}, text(6)]}),
    "any-of-objects": {
        "anyOf": [record(kind={"const": "circle"}, r=DIGIT), record(kind={"const": "box"}, w=DIGIT, h=DIGIT)]
    },
    "optional": {
        "type": "object",
        "properties": {"a": DIGIT, "b": text(6), "c": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "all-optional": {"type": "object", "properties": {"x": DIGIT, "y": DIGIT}, "additionalProperties": False},
    "recursive-in-turns": {
        "$ref": "#/$defs/one",
        "$defs": {
            "one": record(value=DIGIT, rest=listed({"$ref": "#/$defs/two"}, most=1)),
            "two": record(word=text(4), rest=listed({"$ref": "#/$defs/one"}, most=1)),
        },
    },
    "recursive-tree": {
        "$ref": "#/$defs/node",
        "$defs": {"node": record(v=DIGIT, kids=listed({"$ref": "#/$defs/node"}, most=1))},
    },
    "references": {
        **record(home={"$ref": "#/$defs/place"}, work={"$ref": "#/$defs/place"}),
        "$defs": {"place": record(city=text(8), zip=DIGIT)},
    },
    "regex": record(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,4}$"}),
    "regex-choice": record(word={"type": "string", "pattern": "^(foo|bar|ba[xyz]){1,3}$"}),
    "date": record(day={"type": "string", "format": "date"}, on={"type": "boolean"}),
    "uuid": record(id={"type": "string", "format": "uuid"}),
    "unicode": record(Größe={"enum": ["klein", "groß", "größer"]}, 名={"enum": ["東京", "京都", "🙂"]}),
    "escapes": record(path={"enum": ['C:\\new\\"x"', "tab\there", "line\nbreak"]}, note=text(10)),
    "keys": {
        "type": "object",
        "properties": {"a b": DIGIT, "": DIGIT, 'say "hi"': DIGIT},
        "required": ["a b", "", 'say "hi"'],
        "additionalProperties": False,
    },
}


class Reference(LogitsProcessor):
    """The same library's mask as a processor of Hugging Face's, made without any of our code; one grammar a row."""

    def __init__(self, words: Any, grammars: Sequence[str], start: int, eos: int) -> None:
        import llguidance

        self.matchers = [llguidance.LLMatcher(words, grammar, log_level=0) for grammar in grammars]
        assert not any(matcher.is_error() for matcher in self.matchers)
        self.start, self.eos = start, eos

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, matcher in enumerate(self.matchers):
            answer = input_ids[row, self.start :].tolist()
            if self.eos in answer:
                continue
            if answer:
                assert matcher.consume_token(answer[-1])
            allowed = np.frombuffer(matcher.compute_logit_bias(), dtype=np.uint8) != 0
            scores[row, ~torch.from_numpy(allowed[: scores.shape[1]])] = -torch.inf
        return scores


def reference_words(tokenizer: Any, vocabulary: int, eos: int) -> Any:
    """Return the library's own view of a tokenizer, which it makes once."""
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=eos)


def reference_grammar(schema: dict[str, Any]) -> str:
    """What the library makes of a schema with the whitespace and the escapes that ours has by default."""
    import llguidance

    style: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    style["json_allowed_escapes"] = 'nrbtf\\"'
    return str(llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=style))
