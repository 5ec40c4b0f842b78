"""Texts of grammars that a tokenizer writes as one token, or changes: the mask and the matcher agree on them."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

import pytest
import torch
from drafters_for_tests import RandomTree
from grammar_cases import EOS, ascii_tokenizer
from real_tokenizers import real_tokenizer
from zoo import build

import draftree
from draftree import Grammar, GrammarDrafter, Merge
from draftree.grammar import GrammarError, lark_text

REAL = ["qwen3", "llama3_1", "gemma3", "deepseek_v3", "llama2"]
SPECIAL, PLAIN = "<file_sep>", "<think>"


def with_markers(tokenizer: Any) -> Any:
    made = copy.deepcopy(tokenizer)
    made.add_tokens([SPECIAL, "[TOOL]"], special_tokens=True)
    made.add_tokens([PLAIN, "</think>"])
    return made


@pytest.fixture(scope="module", params=["demo", "ascii", *REAL])
def tokenizer(request: Any, demo: Any) -> Any:
    if request.param in REAL:
        return real_tokenizer(request.param)
    return with_markers(demo.tokenizer if request.param == "demo" else ascii_tokenizer())


def walk(grammar: Grammar, tokenizer: Any, seed: int) -> str:
    """Return a random text of the grammar; every token that its mask allows can follow."""
    ends, choose = tokenizer.eos_token_id, random.Random(seed)
    state, ids = grammar.compile(tokenizer, max(tokenizer.get_vocab().values()) + 3, [ends]).begin(), []
    while len(ids) < 80:
        allowed = state.allowed(ids).nonzero()[0].tolist()
        tried = [ends, *choose.sample(allowed, min(30, len(allowed)))]
        nodes = [token for token in tried if token in allowed]
        assert all(state.permits(ids, [0, *nodes], [-1, *[0] * len(nodes)]))
        if ends in allowed:
            break
        ids.append(choose.choice(allowed))
    added = tokenizer.added_tokens_decoder
    assert not any(added[token].special for token in ids if token in added)
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def names(tokenizer: Any) -> list[str]:
    added = list(tokenizer.added_tokens_decoder.values())
    special, plain = ([token.content for token in added if token.special == wanted] for wanted in (True, False))
    return [*special[:1], *special[-1:], *plain[:1], *plain[-1:]]


def test_texts_of_a_grammar_are_spelled_by_ordinary_tokens(tokenizer: Any) -> None:
    for seed, name in enumerate(names(tokenizer)):
        quoted, escaped = json.dumps(name, ensure_ascii=False), re.escape(name)
        for grammar, expected in (
            (Grammar.ebnf(f"root ::= {quoted} [a-z]{{3}}"), escaped + "[a-z]{3}"),
            (Grammar.regex(escaped + "[a-z]{3}"), escaped + "[a-z]{3}"),
            (Grammar.choice([name]), escaped),
            (Grammar.choice([f"a{name}b", "c"]), f"a{escaped}b|c"),
        ):
            assert re.fullmatch(expected, walk(grammar, tokenizer, seed))
        schema = {
            "type": "object",
            "properties": {name: {"const": f"so {name} it"}, "x": {"type": "string", "pattern": "^[a-z]{2}$"}},
            "required": [name, "x"],
            "additionalProperties": False,
        }
        found = json.loads(walk(Grammar.json_schema(schema), tokenizer, seed))
        assert found[name] == f"so {name} it"


@pytest.mark.parametrize("text", ["e\u0301\ufb01", "\u2581x\u2581 y", "\u00ff\u0120", "a  \n\n \u200d\U0001f600"])
def test_texts_that_a_tokenizer_would_change(tokenizer: Any, text: str) -> None:
    if tokenizer.vocab_size < 200:
        pytest.skip("a vocabulary without all bytes cannot spell it")
    assert walk(Grammar.choice([f"({text})"]), tokenizer, 1) == f"({text})"


def test_special_tokens_are_written_by_id(demo: Any) -> None:
    tokenizer = with_markers(demo.tokenizer)
    special, plain = (tokenizer.convert_tokens_to_ids(name) for name in (SPECIAL, PLAIN))
    assert lark_text(tokenizer, f"a{SPECIAL}{PLAIN}\n") == f'"a" <[{special}]> "{PLAIN}\\n"'
    state = Grammar.ebnf(f"start: <[{special}]> {json.dumps(PLAIN)}").compile(tokenizer, 5000, [2]).begin()
    assert state.allowed([]).nonzero()[0].tolist() == [special]
    assert state.allowed([special]).nonzero()[0].tolist() == [plain]
    with pytest.raises(GrammarError, match='special token: "<think>": write it as text in quotes'):
        Grammar.ebnf(f"start: {PLAIN}").compile(tokenizer, 5000, [2])


@pytest.mark.parametrize("sample", [False, True])
def test_a_model_spells_a_special_token_of_its_grammar(sample: bool) -> None:
    tokenizer = copy.deepcopy(ascii_tokenizer())
    tokenizer.backend_tokenizer.add_special_tokens(["ab"])  # A token of the model's vocabulary.
    options: dict[str, Any] = {"tokenizer": tokenizer, "eos_token_id": EOS, "max_new_tokens": 20, "do_sample": sample}
    for grammar in (
        Grammar.ebnf('root ::= "xabx" [c-e]{2}'),
        Grammar.choice(["xabx"]),
        Grammar.regex("ab|abab"),
        Grammar.json_schema({"enum": ["ab", "xab"]}),
    ):
        found = []
        for drafter in (None, GrammarDrafter(), Merge([RandomTree({}), GrammarDrafter()])):
            torch.manual_seed(1)
            out = draftree.generate(build("llama"), torch.tensor([[5, 6]]), drafter=drafter, grammar=grammar, **options)
            found.append(out.sequences[0, 2:].tolist())
        assert found[1:] == [found[0]] * 2
        text = tokenizer.decode(found[0], skip_special_tokens=True)
        assert re.fullmatch('xabx([c-e]{2})?|(ab){1,2}|"x?ab"', text)
