"""Grammars: what an answer may say, and how that constrains tokens, in drafts and in choices (extra `grammar`).

A `Grammar` says what texts are allowed; `compile` fits it to a tokenizer. Each request that has one follows it in a
`GrammarState`, which is asked about prefixes of the answer: it knows nothing of drafts, so constrained texts are the
same with and without them.
"""

from __future__ import annotations

from draftree.grammar.compiled import CompiledGrammar
from draftree.grammar.llguidance import GrammarBusyError, GrammarError, Matcher
from draftree.grammar.processor import GrammarProcessor, with_grammar
from draftree.grammar.source import Grammar, Grammars, compile_grammars
from draftree.grammar.state import GrammarState

__all__ = [
    "CompiledGrammar",
    "Grammar",
    "GrammarBusyError",
    "GrammarError",
    "GrammarProcessor",
    "GrammarState",
    "Grammars",
    "Matcher",
    "compile_grammars",
    "with_grammar",
]
