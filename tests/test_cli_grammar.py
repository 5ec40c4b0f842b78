"""Grammars on the command line: every kind, with a drafter or another, and what is wrong said before a model loads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from benchmarks.machine.schemas import SCHEMAS
from draftree.cli import app
from draftree.trace.file import read_trace

PROMPT = "Tell me about Anna, who lives in Hamburg."


def said(*arguments: str) -> dict:
    done = CliRunner().invoke(app, ["generate", "--json", *arguments, PROMPT])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def written(folder: Path, name: str) -> str:
    file = folder / "schema.json"
    file.write_text(json.dumps(SCHEMAS[name], ensure_ascii=False), "utf-8")
    return str(file)


@pytest.mark.parametrize("name", ["nested", "unicode"])
def test_a_schema_and_the_drafters_under_it(tmp_path: Path, name: str) -> None:
    file = written(tmp_path, name)
    plain, usual = said("--json-schema", file, "--drafter", "none"), said("--json-schema", file)
    assert plain["token_ids"] == usual["token_ids"]
    assert usual["stats"]["steps"] < plain["stats"]["steps"]
    assert "grammar" in usual["stats"]["accepted_by_source"]
    jsonschema.validate(json.loads(usual["text"]), SCHEMAS[name])


def test_other_kinds(tmp_path: Path) -> None:
    (tmp_path / "list.gbnf").write_text('root ::= [a-z]+ ("," [a-z]+){2}')
    assert re.fullmatch("[a-z]+(,[a-z]+){2}", said("--ebnf", str(tmp_path / "list.gbnf"))["text"])
    assert re.fullmatch("[A-Z][a-z]{2,5}", said("--regex", "[A-Z][a-z]{2,5}", "--sample", "--seed", "3")["text"])
    assert said("--choice", "yes", "--choice", "no", "--drafter", "prompt-lookup")["text"] in ("yes", "no")


def test_a_trie_of_a_merged_drafter_is_kept(tmp_path: Path) -> None:
    trie, file = tmp_path / "kept.trie", written(tmp_path, "person")
    first = said("--json-schema", file, "--trie", str(trie), "--drafter", "grammar+lookahead")
    again = said("--json-schema", file, "--trie", str(trie), "--drafter", "grammar+lookahead")
    assert first["token_ids"] == again["token_ids"]
    assert any("lookahead" in source for source in again["stats"]["accepted_by_source"])


def test_a_recorded_run_has_a_grammar(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    told = CliRunner().invoke(app, ["trace", "--json-schema", written(tmp_path, "person"), "--out", str(file), PROMPT])
    assert told.exit_code == 0, told.output
    recorded = read_trace(file)
    assert [run["drafter"] for run in recorded.runs.values()] == ["lookahead+grammar"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--json-schema GONE", "cannot be read (No such file or directory): give another file"),
        ("--json-schema BYTES", "cannot be read (no UTF-8 text): give another file"),
        ("--json-schema TEXT", "The schema is no JSON"),
        ("--json-schema WRONG", "The JSON schema cannot be used (Invalid type: strin)"),
        ("--regex (", "The regular expression cannot be used"),
        ("--ebnf TEXT", "The grammar cannot be"),
        ("--choice yes --regex a", "--regex and --choice both say what to answer: give one of them"),
        ("--regex a --drafter grammer", "Did you mean 'grammar'?"),
    ],
)
@pytest.mark.parametrize("verb", ["generate", "trace"])
def test_what_is_wrong_is_said_before_a_model_loads(tmp_path: Path, verb: str, arguments: str, told: str) -> None:
    (tmp_path / "BYTES").write_bytes(b"\xff\xfe{}")
    (tmp_path / "TEXT").write_text("no { grammar", "utf-8")
    (tmp_path / "WRONG").write_text('{"type": "strin"}', "utf-8")
    places = [str(tmp_path / word) if word.isupper() else word for word in arguments.split()]
    done = CliRunner().invoke(app, [verb, "--model", "./nowhere", *places, PROMPT])
    assert done.exit_code != 0
    assert told in str(done.exception), done.output
