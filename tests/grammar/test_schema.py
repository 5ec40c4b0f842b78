"""Where the library's JSON schema differs from the standard: mended, or refused by the name of the key."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from grammar_cases import allows

from benchmarks.machine.schemas import record
from draftree import Grammar
from draftree.grammar import GrammarError

INTEGER = {"type": "integer"}


def says(schema: dict[str, Any], value: Any) -> bool:
    return allows(Grammar.json_schema(schema), value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (INTEGER | {"minimum": 0, "maximum": 2**53}, [0, 2**53 - 1, 2**53, 2**53 + 1, 2**63]),
        (INTEGER | {"minimum": 1, "maximum": 2**63 - 1}, [0, 1, 2**60 + 1, 2**63 - 1, 2**63, 2**64]),
        (INTEGER | {"minimum": 0}, [2**64 - 1, 2**80, -1]),
        ({"enum": [10**16, 3]}, [10**16, 10**16 + 1, 3]),
        (INTEGER | {"minimum": -(10**16)}, [-(10**16), -(10**16) - 1, -(10**16) + 1]),
    ],
)
def test_large_integers_are_exact(schema: dict[str, Any], values: list[int]) -> None:
    for value in values:
        assert says(schema, value) == jsonschema.Draft202012Validator(schema).is_valid(value), value


@pytest.mark.parametrize(
    ("schema", "key"),
    [
        (INTEGER | {"minimum": 9007199254740993, "maximum": 9007199254740993}, "minimum of 'x' has 9007199254740993"),
        (INTEGER | {"minimum": 0, "maximum": 2**64 - 1}, "maximum of 'x' has 18446744073709551615"),
        (INTEGER | {"minimum": -(2**53) - 1}, "minimum of 'x' has -9007199254740993"),
        (INTEGER | {"maximum": 1e19}, r"maximum of 'x' has 1e\+19"),
        (INTEGER | {"exclusiveMaximum": 2**60}, "exclusiveMaximum of 'x'"),
        ({"type": "number", "maximum": 2**63 - 1}, "maximum of 'x'"),
        ({"const": 2**53 + 1}, "const of 'x' has 9007199254740993"),
        ({"enum": [1, {"id": [175928847299117063]}]}, "enum of 'x' has 175928847299117063"),
        ({"type": "array", "items": {"anyOf": [{"const": 2**64}, {"type": "null"}]}}, "const of 'x'"),
    ],
)
def test_what_cannot_be_mended_is_refused_by_its_name(schema: dict[str, Any], key: str) -> None:
    for whole in (record(x=schema), {"$defs": {"One": record(x=schema)}, "$ref": "#/$defs/One"}):
        with pytest.raises(GrammarError, match=key.replace("'x", r"'(One\.)?x")):
            Grammar.json_schema(whole)


def test_names_and_texts_are_not_escaped() -> None:
    """An escaped name could be that of another property."""
    schema = {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": {"type": "string"}}
    assert says(schema, '{"z": "x"}')
    assert not says(schema, '{"\\u0061": "x"}')
    assert not says({"type": "string"}, '"\\u00e9"')
    assert says({"const": "\x1b"}, '"\\u001b"')
