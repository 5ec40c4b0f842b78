"""Check the numbers of a JSON schema, of which llguidance 1.9.1 rounds the large ones."""

from __future__ import annotations

from typing import Any

from draftree.grammar.llguidance import GrammarError

EXACT = 2**53  # Beyond, the library rounds to float64.
BIGINT = 2**63 - 1  # The library bounds integers by it from above.
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
VALUES = ("const", "enum")
NAMED = ("properties", "patternProperties", "$defs", "definitions")  # Keywords with schemas by name.


def check_numbers(schema: Any, name: str = "") -> None:
    """Refuse numbers that the library would round; `name` is the property that the schema describes."""
    if isinstance(schema, list):
        for one in schema:
            check_numbers(one, name)
    if not isinstance(schema, dict):
        return
    shown = repr(name) if name else "the schema"
    for key, value in schema.items():
        for number in _numbers(value) if key in VALUES + BOUNDS else ():
            short = len(str(number).strip("-0")) <= 15  # Float64 holds all numbers of fifteen digits.
            exact = short and (key in VALUES or (key in BOUNDS[:2] and abs(number) <= BIGINT))
            most = key == "maximum" and number == BIGINT and schema.get("type") == "integer"
            if abs(number) > EXACT and not exact and not most:
                message = f"{key} of {shown} has {number}, and numbers beyond 2**53 would be rounded: "
                raise GrammarError(f"{message}leave it out, or make it a string.")
        if key in NAMED and isinstance(value, dict):
            for one, part in value.items():
                check_numbers(part, f"{name}.{one}".lstrip("."))
        elif key not in (*VALUES, "default", "examples"):
            check_numbers(value, name)


def _numbers(value: Any) -> list[int | float]:
    if isinstance(value, list | dict):
        return [number for one in (value.values() if isinstance(value, dict) else value) for number in _numbers(one)]
    return [value] if isinstance(value, int | float) else []
