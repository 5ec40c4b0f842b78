"""Grammars: allowed texts, refusals in one sentence, and states that depend on the prefix alone."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import numpy as np
import pytest
import torch
from grammar_cases import EOS, OTHERS, allows, ascii_tokenizer, compiled, ids_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from zoo import VOCABULARY, build

import draftree
from benchmarks.machine.schemas import SCHEMAS, record
from draftree import Grammar
from draftree.engine import Engine, SamplingParams
from draftree.grammar import GrammarError, llguidance

# ---------------------------------------------------------------- what is allowed


@pytest.mark.parametrize(
    ("kind", "inside", "outside"),
    [
        ("regex", ["abc", "abcde 12"], ["a", "abcg", "abc 1234", "abc "]),
        ("choice", ["yes", "no", "not sure"], ["ye", "maybe", "not surely"]),
        ("gbnf", ["a1", "a1,b2,c3"], ["d1", "a1,", "a1,b2,c3,a4,b5"]),
        ("lark", ["(ab)", "(q)"], ["()", "(ab"]),
    ],
)
def test_texts_of_each_kind(kind: str, inside: list[str], outside: list[str]) -> None:
    grammar, pattern = OTHERS[kind]
    for text in inside:
        assert re.fullmatch(pattern, text)
        assert allows(grammar, text), text
    for text in outside:
        assert not allows(grammar, text), text


def test_whitespace_of_json() -> None:
    schema = record(a={"type": "integer"}, b={"type": "integer"})
    fixed, compact, free = '{"a": 1, "b": 2}', '{"a":1,"b":2}', '{ "a":1,  "b" :2 }'
    found = {
        whitespace: [
            allows(Grammar.json_schema(schema, whitespace=whitespace), text) for text in (fixed, compact, free)
        ]
        for whitespace in ("fixed", "compact", "any")
    }
    assert found == {"fixed": [True, False, False], "compact": [False, True, False], "any": [True, True, True]}


def test_a_schema_comes_as_a_dict_as_text_or_as_a_pydantic_model() -> None:
    class Point(BaseModel):
        x: int
        y: int

    made = [Grammar.json_schema(Point), Grammar.json_schema(Point.model_json_schema())]
    made.append(Grammar.json_schema(json.dumps(Point.model_json_schema())))
    assert made[0] == made[1] == made[2]
    assert allows(made[0], '{"x": 1, "y": -20}')
    assert not allows(made[0], '{"x": 1}')
    assert allows(Grammar.json(), '{"a": [1, {"b": null}]}')
    assert not allows(Grammar.json(), "[1]")


def test_special_tokens_are_never_allowed_but_the_end_token_where_the_text_may_end() -> None:
    state = compiled(Grammar.regex("a{1,2}")).begin()
    assert not state.allowed([])[[0, 1, EOS]].any()
    assert state.allowed(ids_of("a"))[EOS]
    assert not state.allowed(ids_of("a"))[1]
    assert np.flatnonzero(state.allowed(ids_of("a") * 2)).tolist() == [EOS]


def test_id_0_is_a_token_like_others() -> None:
    state = compiled(Grammar.choice(["}"])).begin()
    assert np.flatnonzero(state.allowed([])).tolist() == [0]
    assert state.forced([]) == [0, EOS]


# ---------------------------------------------------------------- a function of the prefix alone


GRAMMARS = [Grammar.json_schema(SCHEMAS["any-of-objects"]), *(grammar for grammar, _ in OTHERS.values())]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_masks_depend_on_the_prefix_alone(data: st.DataObject) -> None:
    grammar = data.draw(st.sampled_from(GRAMMARS))
    wandering = compiled(grammar).begin()
    answers: list[list[int]] = [[]]
    for _ in range(data.draw(st.integers(1, 12))):
        answer = data.draw(st.sampled_from(answers))
        fresh = compiled(grammar).begin()
        mask = fresh.allowed(answer)
        assert (wandering.allowed(answer) == mask).all()
        assert wandering.forced(answer) == compiled(grammar).begin().forced(answer)
        words = [token for token in np.flatnonzero(mask).tolist() if token != EOS]
        if words:
            answers.append([*answer, data.draw(st.sampled_from(words))])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_tree_keeps_what_the_masks_along_its_paths_allow(data: st.DataObject) -> None:
    grammar = data.draw(st.sampled_from(GRAMMARS))
    state, answer = compiled(grammar).begin(), []
    for _ in range(data.draw(st.integers(0, 5))):
        words = [token for token in np.flatnonzero(state.allowed(answer)).tolist() if token != EOS]
        if words:
            answer.append(data.draw(st.sampled_from(words)))
    tokens, parents, paths, expected = [answer[-1] if answer else 1], [-1], [list(answer)], [True]
    for node in range(1, data.draw(st.integers(2, 14))):
        parent = data.draw(st.integers(0, node - 1))
        allowed = expected[parent] and paths[parent][-1:] != [EOS]
        mask = compiled(grammar).begin().allowed(paths[parent]) if allowed else np.zeros(VOCABULARY, dtype=bool)
        likely = np.flatnonzero(mask).tolist() or [5]
        token = data.draw(st.one_of(st.sampled_from(likely), st.integers(-1, VOCABULARY + 3)))
        tokens.append(token)
        parents.append(parent)
        paths.append([*paths[parent], token])
        expected.append(bool(allowed and 0 <= token < VOCABULARY and mask[token]))
    assert state.permits(answer, tokens, parents) == expected
    assert (state.allowed(answer) == compiled(grammar).begin().allowed(answer)).all()  # nothing has moved


def test_forced_tokens_are_what_the_tokenizer_would_write() -> None:
    state = compiled(Grammar.json_schema(record(cab={"enum": ["abba"]}))).begin()
    text = '{"cab": "abba"}'
    assert state.forced([]) == [*ids_of(text), EOS]
    assert state.forced(ids_of('{"c'))[0] == ids_of("ab")[0]


def test_a_grammar_is_compiled_once_for_a_tokenizer() -> None:
    grammar, tokenizer = Grammar.regex("a+b"), ascii_tokenizer.__wrapped__()
    first = grammar.compile(tokenizer, VOCABULARY, [EOS])
    assert grammar.compile(tokenizer, VOCABULARY, [EOS]) is first
    assert Grammar.regex("a+b").compile(tokenizer, VOCABULARY, [EOS]) is first
    assert grammar.compile(tokenizer, VOCABULARY + 3, [EOS]) is not first


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.json_schema("no json"), "The schema is no JSON"),
        (lambda: Grammar.json_schema([1]), "The schema is a list: give a dict"),
        (lambda: Grammar.json_schema({}, whitespace="much"), "whitespace is 'much': choose fixed, compact, any"),
        (lambda: Grammar.json_schema({"enum": ["x" * (1 << 20)]}), "characters, and at most 1048576 are taken"),
        (lambda: Grammar.regex(""), "The pattern is ''"),
        (lambda: Grammar.choice("yes"), "A choice is a list of texts"),
        (lambda: Grammar.json_schema({"type": "objekt"}), r"Invalid type: objekt\): correct or simplify"),
        (lambda: Grammar.json_schema({"not": {"type": "string"}}), 'Unimplemented keys: ."not"'),
        (lambda: Grammar.regex("(?=a)b"), "invalid regex"),
        (lambda: Grammar.ebnf("start: missing"), "cannot be used"),
    ],
)
def test_grammars_that_are_refused(make: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [{"type": "array", "items": schema}, {"type": "object", "properties": {"a": schema}}]}
    return schema


def test_grammars_that_explode_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GrammarError, match="schema too large"):
        Grammar.json_schema(nested(13))
    wide = record(**{f"property number {i}": {"type": "string"} for i in range(4000)})
    monkeypatch.setattr(llguidance, "SECONDS", 0.05)
    began = time.monotonic()
    with pytest.raises(GrammarError, match=r"was not compiled within 0\.05 seconds"):
        Grammar.json_schema(wide)
    assert time.monotonic() - began < 2


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarError, match="Grammars need llguidance, which is not installed"):
        Grammar.regex("a text that no other test asks for")


def test_a_tokenizer_that_cannot_be_read(demo: Any) -> None:
    class Slow:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 1}

    with pytest.raises(GrammarError, match=r"Slow is none .* load it with AutoTokenizer"):
        Grammar.regex("a").compile(Slow(), VOCABULARY, [EOS])
    with pytest.raises(GrammarError, match=r"has token 4095 and the model a vocabulary of 97"):
        Grammar.regex("a").compile(demo.tokenizer, VOCABULARY, [EOS])
    with pytest.raises(GrammarError, match="pass tokenizer="):
        Grammar.regex("a").compile(None, VOCABULARY, [EOS])
    with pytest.raises(GrammarError, match="pass eos_token_id="):
        Grammar.regex("a").compile(ascii_tokenizer(), VOCABULARY, [])
    with pytest.raises(GrammarError, match="end token 97 is outside"):
        Grammar.regex("a").compile(ascii_tokenizer(), VOCABULARY, [97])


def test_bad_options_of_generate() -> None:
    model, ids, tokenizer = build("llama"), torch.tensor([[5, 6, 7]]), ascii_tokenizer()

    def answer(**options: Any) -> Any:
        return draftree.generate(model, ids, max_new_tokens=8, tokenizer=tokenizer, **options)

    with pytest.raises(TypeError, match=r"grammar is a str: pass one such as draftree.Grammar.json_schema"):
        answer(grammar="[a-z]+")
    with pytest.raises(ValueError, match="There are 2 grammars for 1 answers"):
        answer(grammar=[Grammar.regex("a"), None])
    with pytest.raises(GrammarError, match="only tokens that other options forbid"):
        answer(grammar=Grammar.regex("a{2}"), min_new_tokens=6)


def test_bad_grammars_of_an_engine() -> None:
    engine = Engine(build("llama"))
    grammar = Grammar.regex("a+")

    def add(given: Any, ends: tuple[int, ...] = (EOS,)) -> Any:
        return engine.add([5, 6], SamplingParams(8, ends, grammar=given))

    with pytest.raises(ValueError, match=r"grammar is a Grammar: pass what Grammar.compile"):
        add(grammar)
    with pytest.raises(ValueError, match="compiled for a vocabulary of 100, and the model has 97"):
        add(grammar.compile(ascii_tokenizer(), 100, [EOS]))
    with pytest.raises(ValueError, match="ends answers by token 2, at which this request does not stop"):
        add(compiled(grammar), ends=())
    assert not engine.busy
