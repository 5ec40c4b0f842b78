"""Grammars on the command line: every kind, with a drafter or another, and what is wrong said before a model loads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.machine.schemas import SCHEMAS
from draftree.cli import app
from draftree.grammar import CompiledGrammar, GrammarError, GrammarState, Matcher
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
        ("--json-schema GONE", "No such file or directory"),
        ("--json-schema TEXT", "The schema is no JSON"),
        ("--json-schema WRONG", "The JSON schema cannot be used (Invalid type: strin)"),
        ("--regex (", "The regular expression cannot be used"),
        ("--ebnf TEXT", "The grammar cannot be"),
        ("--choice yes --regex a", "--regex and --choice both constrain the answer: give one of them"),
        ("--regex a --drafter grammer", "Did you mean 'grammar'?"),
    ],
)
@pytest.mark.parametrize("verb", ["generate", "trace"])
def test_what_is_wrong_is_said_before_a_model_loads(tmp_path: Path, verb: str, arguments: str, told: str) -> None:
    (tmp_path / "TEXT").write_text("no { grammar", "utf-8")
    (tmp_path / "WRONG").write_text('{"type": "strin"}', "utf-8")
    places = [str(tmp_path / word) if word.isupper() else word for word in arguments.split()]
    (tmp_path / "config.json").touch()  # There is nothing to load beside it.
    done = CliRunner().invoke(app, [verb, "--model", str(tmp_path), *places, PROMPT])
    assert done.exit_code != 0
    assert told in str(done.exception), done.output


class Broken:
    """Follows its grammar no further than the beginning."""

    def __init__(self, matcher: Matcher) -> None:
        self.first: np.ndarray | None = matcher.allowed()

    def allowed(self) -> np.ndarray:
        first, self.first = self.first, None
        if first is None:
            raise GrammarError("The grammar cannot be followed further: simplify it.")
        return first

    def consume(self, token: int) -> bool:
        return True

    def rollback(self, count: int) -> None:
        pass

    def forced(self) -> list[int]:
        return []


def test_an_answer_that_fails_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here every other answer takes its grammar beyond the limits."""
    file, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": PROMPT, "id": str(i)}) for i in range(4)))
    begin, made = CompiledGrammar.begin, []

    def begun(self: CompiledGrammar) -> GrammarState:
        made.append(begin(self))
        if len(made) % 2 == 0:
            monkeypatch.setattr(made[-1], "_matcher", Broken(made[-1]._matcher))
            monkeypatch.setattr(made[-1], "_private", True)
        return made[-1]

    monkeypatch.setattr(CompiledGrammar, "begin", begun)
    arguments = ["generate", "--prompts", str(file), "--out", str(out), "--choice", "yes", "--choice", "no"]
    done = CliRunner().invoke(app, arguments)
    assert "2 of 4 answers ended with an error" in str(done.exception)
    told = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["finish_reason"] for one in told] == ["eos", "error", "eos", "error"]
    assert [one.get("error") for one in told][1] == "The grammar cannot be followed further: simplify it."


def test_a_piped_answer_is_the_text_as_it_is() -> None:
    """Where no terminal shows it, tabs are no blanks, and no control character is left out."""
    text = "all:\n\techo a\tb\r\n\fend"
    assert said("--choice", text)["text"] == text
    done = CliRunner().invoke(app, ["generate", "--choice", text, PROMPT])
    assert done.stdout_bytes.decode() == text + "\n"
