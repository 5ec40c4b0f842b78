"""Prepare a JSON schema for llguidance: mend what 1.9.1 reads otherwise than the standard, or refuse it by its name.

docs/structured_output.md lists what remains.
"""

from __future__ import annotations

import re
from typing import Any

from draftree.grammar.llguidance import GrammarError

EXACT = 2**53  # Beyond, the library rounds to float64.
BIGINT = 2**63 - 1  # The library bounds integers by it from above.
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
VALUES = ("const", "enum")
NAMED = ("properties", "patternProperties", "$defs", "definitions")  # Keywords with schemas by name.
NAMES = re.compile(r"\^(\w+|\((\?:)?\w+(\|\w+)*\))\$")  # A pattern that matches some names.
# 29 February only in leap years; the format has the days of the other months.
CALENDAR = (
    r"^(\d{4}-(0[13-9]|1[0-2]|02-([01]\d|2[0-8]))|"
    r"(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)


def prepare(schema: Any, name: str = "") -> Any:
    """Return a schema for the library; `name` is the property that it describes."""
    if isinstance(schema, list):
        return [prepare(one, name) for one in schema]
    if not isinstance(schema, dict):
        return schema
    shown = repr(name) if name else "the schema"
    made = {}
    for key, value in schema.items():
        for number in _numbers(value) if key in VALUES + BOUNDS else ():
            short = len(str(number).strip("-0")) <= 15  # Float64 holds all numbers of fifteen digits.
            exact = short and (key in VALUES or (key in BOUNDS[:2] and abs(number) <= BIGINT))
            most = key == "maximum" and number == BIGINT and schema.get("type") == "integer"
            if abs(number) > EXACT and not exact and not most:
                message = f"{key} of {shown} has {number}, and numbers beyond 2**53 would be rounded: "
                raise GrammarError(f"{message}leave it out, or make it a string.")
        if key in NAMED and isinstance(value, dict):
            value = {one: prepare(part, f"{name}.{one}".lstrip(".")) for one, part in value.items()}
        elif key not in (*VALUES, "default", "examples"):
            value = prepare(value, name)
        made[key] = value
    if made.get("format") in ("date", "date-time"):
        made["allOf"] = [*made.get("allOf", ()), {"pattern": CALENDAR}]
    if "patternProperties" in made or "minProperties" in made:
        _names(made, shown)
    return made


def _numbers(value: Any) -> list[int | float]:
    if isinstance(value, list | dict):
        return [number for one in (value.values() if isinstance(value, dict) else value) for number in _numbers(one)]
    return [value] if isinstance(value, int | float) else []


def _names(schema: dict[str, Any], shown: str) -> None:
    """Refuse a number of names that one name written twice would meet, and join patterns of listed names with these.

    After the last name that such a pattern allows, the library expects another one.
    """
    properties, patterns = schema.get("properties") or {}, schema.get("patternProperties") or {}
    least, required = schema.get("minProperties"), schema.get("required") or ()
    others = patterns or schema.get("additionalProperties") is not False
    if others and isinstance(least, int) and least - len(required) > 1:
        raise GrammarError(
            f"minProperties of {shown} is {least}, and a name that properties do not list could be written twice: "
            "leave it out, or list the names in properties and required."
        )
    for pattern, part in list(patterns.items()):
        names = re.findall(r"\w+", pattern) if NAMES.fullmatch(pattern) else []
        if names and all(one in properties for one in names):
            del patterns[pattern]
            properties |= {one: {"allOf": [properties[one], part]} for one in names}
