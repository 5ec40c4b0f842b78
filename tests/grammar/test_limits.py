"""A grammar has a limit of memory, which neither draft tokens nor other answers bring an answer nearer to."""

from __future__ import annotations

import json

import numpy as np
import pytest
from drafters_for_tests import RandomTree
from grammar_cases import EOS, ascii_tokenizer, compiled, ids_of
from zoo import build

from draftree import Grammar, GrammarDrafter
from draftree.engine import Engine, SamplingParams
from draftree.grammar import CompiledGrammar, GrammarError, llguidance
from draftree.shaping import Fixed


def hard(letters: str, monkeypatch: pytest.MonkeyPatch) -> CompiledGrammar:
    """A grammar of two letters whose lexer has more states after some tokens than it may have."""
    a, b = letters
    grammar = Grammar.regex(f"({a}|{b})*{a}({a}|{b}){{40}}")
    monkeypatch.setattr(llguidance, "LEXER_STATES", 20)
    return compiled(grammar)


def test_a_grammar_beyond_its_limits_ends_its_own_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(build("llama"), slots=2, drafter=GrammarDrafter()) as engine:
        wrong = engine.add([5, 6], SamplingParams(64, (EOS,), grammar=hard("ab", monkeypatch)))
        right = engine.add([5, 6], SamplingParams(8, (EOS,), grammar=compiled(Grammar.regex("a{3}"))))
        engine.run()
    assert isinstance(wrong.error, GrammarError)
    assert "cannot be followed further" in str(wrong.error)
    assert wrong.tokens
    assert right.error is None
    assert ascii_tokenizer().decode(right.tokens) == "aaa</s>"


def steps_to_the_limit(grammar: CompiledGrammar, *, drafted: bool) -> int:
    """Tokens that an answer has when its grammar cannot be followed further."""
    text, wild, state = ids_of("dcdccdddcdccdcdd" * 4), ids_of("ccddcdc"), grammar.begin()
    for count in range(len(text)):
        if drafted and count:
            state.permits(text[:count], [text[count - 1], *wild], range(-1, len(wild)))
            state.forced(text[:count])
        try:
            state.allowed(text[:count])
        except GrammarError:
            return count
    return -1


def test_neither_draft_tokens_nor_other_answers_bring_one_to_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = hard("cd", monkeypatch)
    first, *others = (steps_to_the_limit(grammar, drafted=drafted) for drafted in (False, True, False, True, True))
    assert first > 1
    assert others == [first] * 4


def test_an_answer_at_its_grammars_limits_is_that_of_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, found = hard("ef", monkeypatch), []
    for drafter in (None, RandomTree({}), None, GrammarDrafter()):
        engine = Engine(build("llama"), drafter=drafter, shape=None if drafter is None else Fixed(12))
        request = engine.add([5, 6], SamplingParams(64, (EOS,), grammar=grammar, sample=True, seed=3))
        engine.run()
        found.append((request.tokens, str(request.error)))
    assert found[0][0]
    assert "cannot be followed further" in found[0][1]
    assert all(one == found[0] for one in found)


def followed(grammar: CompiledGrammar, text: str) -> list[int]:
    """The tokens of a text, each of which the grammar must allow; an end token where it may end."""
    state, tokens = grammar.begin(), ids_of(text)
    for count, token in enumerate(tokens):
        assert state.allowed(tokens[:count])[token]
    return [*tokens, *([EOS] if state.allowed(tokens)[EOS] else [])]


def test_a_choice_may_have_thousands_of_texts() -> None:
    texts = [f"city {i}" for i in range(5000)]
    grammar = compiled(Grammar.choice(texts))
    assert followed(grammar, "city 4999")[-1] == EOS
    assert followed(grammar, "city 499")[-1] == EOS  # also where a longer one goes on
    assert not grammar.begin().allowed(ids_of("city 4999"))[ids_of("0")[0]]


def test_an_answer_that_ends_by_the_librarys_limits_says_by_which() -> None:
    rules = compiled(Grammar.ebnf("start: " + " | ".join(f'"city {i}"' for i in range(6000))))
    with pytest.raises(GrammarError, match=r"cannot be followed further .*max is 5000"):
        followed(rules, "city 4")


def test_an_object_of_hundreds_of_optional_properties_is_followed_to_its_end() -> None:
    names = [f"p{i}" for i in range(1000)]
    schema = {"properties": {name: {"enum": [1]} for name in names}, "required": names[:3]}
    rules = compiled(Grammar.json_schema({"type": "object", "additionalProperties": False} | schema))
    for many in (False, True):
        asked = names if many else [*names[:3], "p500", "p999"]
        assert followed(rules, json.dumps(dict.fromkeys(asked, 1)))[-1] == EOS


def test_more_optional_properties_than_can_be_followed_are_refused_at_once() -> None:
    names = [f"p{i}" for i in range(1002)]
    many = {"type": "object", "properties": {name: {} for name in names}}
    compiled(Grammar.json_schema({"type": "array", "items": many | {"required": names[:2]}}))
    with pytest.raises(GrammarError, match="has 1002 properties, and at most 1000 may be optional: require more"):
        Grammar.json_schema({"type": "array", "items": many | {"required": [names[0], "another"]}})


def test_masks_that_come_to_take_long_end_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of ambiguous grammars do, and at once: with a store of its own it would only begin anew."""
    state = compiled(Grammar.regex("[ab]*")).begin()
    monkeypatch.setattr(state, "_make_private", None)
    monkeypatch.setattr(llguidance, "SLOW_SECONDS", -1.0)
    text = ids_of("abababab")
    for count in range(llguidance.SLOW_MASKS):  # the first one makes tables
        state.allowed(text[:count])
    with pytest.raises(llguidance.GrammarSlowError, match=r"takes \d+ ms for each token .* in one way"):
        state.allowed(text[: llguidance.SLOW_MASKS])


def test_a_grammar_that_takes_no_token_is_refused_when_it_is_compiled() -> None:
    """Each of its answers would meet the limit in the thread that decodes all others, and make it anew there."""
    with pytest.raises(GrammarError, match=r"regular expression cannot be followed \(.*too many.*\): simplify"):
        compiled(Grammar.regex("(abcdefghij){50000}"))


def test_schemas_that_are_true_or_false() -> None:
    allowed = compiled(Grammar.json_schema(True)).begin().allowed([])
    assert np.array_equal(allowed, compiled(Grammar.json_schema({})).begin().allowed([]))
    with pytest.raises(GrammarError, match="The schema false allows no text"):
        Grammar.json_schema(False)
