"""Limits of a grammar's time and memory: they protect other requests, and drafting does not use them up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from drafters_for_tests import RandomTree
from grammar_cases import EOS, ascii_tokenizer, compiled, ids_of
from serve_driver import serving
from zoo import build

from draftree import Grammar, GrammarDrafter
from draftree.engine import Engine, SamplingParams
from draftree.grammar import CompiledGrammar, GrammarError, llguidance
from draftree.shaping import Fixed


def hard(letters: str, monkeypatch: pytest.MonkeyPatch) -> CompiledGrammar:
    """Return a grammar of two letters whose lexer exceeds its limit of states after some tokens."""
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
    """Return the tokens of a text that the grammar allows, with the end token if the text may end."""
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


def test_grammars_that_meet_a_limit_at_once_are_refused_when_they_are_compiled() -> None:
    names = [f"p{i}" for i in range(600)]
    many = {"type": "object", "properties": {name: {} for name in names}}
    compiled(Grammar.json_schema(many | {"required": names[:200]}))
    with pytest.raises(GrammarError, match=r"JSON schema cannot be followed \(.*2407 items; max is 2000"):
        compiled(Grammar.json_schema(many))
    with pytest.raises(GrammarError, match=r"regular expression cannot be followed \(.*too many.*\): simplify"):
        compiled(Grammar.regex("(abcdefghij){50000}"))


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile without end until the test ends, in all places."""
    over = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(llguidance, "SECONDS", 0.05)
        for _ in range(2):
            with pytest.raises(GrammarError, match="was not compiled within"):
                llguidance._in_time("regex", "a", over.wait)
        yield
        over.set()
    assert Grammar.regex("a text that is compiled when they have ended")


@pytest.mark.usefixtures("busy")
def test_a_client_is_asked_to_try_again(demo: Any) -> None:
    with serving(*demo) as server:
        asked = {"prompt": "Hi", "max_tokens": 2}
        refused = server.post("/v1/completions", **asked, structured_outputs={"regex": "another text, and a new one"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "60")
        assert server.post("/v1/completions", **asked).status_code == 200


def test_a_grammar_whose_masks_would_hold_up_all_others_is_refused(demo: Any) -> None:
    """The cost of a mask grows with the longest text, not with the number of texts or of a schema's parts."""
    vocabulary, ends = demo.model.config.vocab_size, [demo.tokenizer.eos_token_id]
    wide = {"type": "object", "properties": {f"field {i}": {"type": "string"} for i in range(300)}}
    for light in (Grammar.choice([f"city {i}" for i in range(5000)]), Grammar.json_schema(wide)):
        light.compile(demo.tokenizer, vocabulary, ends)
    long = " ".join(map(str, range(20_000)))
    for heavy in (Grammar.choice([long]), Grammar.json_schema({"const": long}), Grammar.regex("(abcdefghij){10000}")):
        with pytest.raises(GrammarError, match="ms for each token of an answer, and at most 10 are given: shorten"):
            heavy.compile(demo.tokenizer, vocabulary, ends)
