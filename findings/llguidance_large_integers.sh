#!/usr/bin/env bash
# llguidance 1.9.1 rounds the integers of a JSON schema to float64: the only text of {"const": 9007199254740993} is
# ...992, which the schema refuses, and {"type": "integer", "minimum": 0, "maximum": 18446744073709551615}, the range of
# an unsigned 64-bit id, allows nothing above 2^63 - 1. No error says so. JSON schema sets no limit to integers.
#
# usage: bash findings/llguidance_large_integers.sh    (installs into a temporary folder; exits 0 while it is so)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'llguidance==1.9.1' 'jsonschema==4.26.0' 'numpy==2.3.5' 2>/dev/null
cd "$folder"
venv/bin/python - <<'P'
import json
import sys
from importlib.metadata import version

import jsonschema
from llguidance import LLMatcher, LLTokenizer

UINT64 = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
CASES = [
    ({"const": 2**53 + 1}, 2**53 + 1, False),
    ({"const": 2**53 + 1}, 2**53, True),
    (UINT64, 2**63 - 1, True),
    (UINT64, 2**63, False),
    (UINT64, 2**64 - 1, False),
]


def allows(schema, value):
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    text = json.dumps(value).encode()
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


print(f"llguidance {version('llguidance')}, jsonschema {version('jsonschema')}")
as_said = True
for schema, value, expected in CASES:
    found, valid = allows(schema, value), jsonschema.Draft202012Validator(schema).is_valid(value)
    print(f"{json.dumps(schema)}: {value} is {'valid' if valid else 'invalid'}, and {'allowed' if found else 'forbidden'}")
    as_said &= found == expected and valid == (value != 2**53)
print("As described." if as_said else "It has changed.")
sys.exit(0 if as_said else 1)
P
