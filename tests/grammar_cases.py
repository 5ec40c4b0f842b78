"""Grammars that are no JSON schemas, and a tokenizer for tiny models."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from zoo import VOCABULARY

from draftree import Grammar
from draftree.grammar import CompiledGrammar

EOS = 2  # of the tokenizer

# What other kinds of grammar say, and what their texts look like to Python's own `re`.
OTHERS: dict[str, tuple[Grammar, str]] = {
    "regex": (Grammar.regex(r"[a-f]{2,5}( [0-9]{1,3})?"), r"[a-f]{2,5}( [0-9]{1,3})?"),
    "choice": (Grammar.choice(["yes", "no", "not sure", "nothing at all"]), r"yes|no|not sure|nothing at all"),
    "gbnf": (Grammar.ebnf('root ::= item ("," item){0,3}\nitem ::= [a-c] [0-9]'), r"[a-c][0-9](,[a-c][0-9]){0,3}"),
    "lark": (Grammar.ebnf('start: "(" /[a-z]{1,6}/ ")"'), r"\([a-z]{1,6}\)"),
}


@functools.cache
def ascii_tokenizer() -> PreTrainedTokenizerFast:
    """97 tokens for the tiny models: printable characters, `}` as id 0, a pair of letters, 1 BOS and 2 EOS."""
    words = {"}": 0, "<s>": 1, "</s>": 2, "ab": 96}
    words |= {"Ġ" if char == " " else char: 3 + i for i, char in enumerate(map(chr, range(32, 125)))}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    assert len(made) == VOCABULARY
    return made


def compiled(grammar: Grammar) -> CompiledGrammar:
    """The grammar for that tokenizer."""
    return grammar.compile(ascii_tokenizer(), VOCABULARY, [EOS])


def ids_of(text: str) -> list[int]:
    """Token ids of a text."""
    found: list[int] = ascii_tokenizer()(text, add_special_tokens=False).input_ids
    return found


def allows(grammar: Grammar, text: str) -> bool:
    """Return whether a whole text is in the grammar."""
    state, answer = compiled(grammar).begin(), []
    for token in [*ids_of(text), EOS]:
        if not state.allowed(answer)[token]:
            return False
        answer.append(token)
    return True
