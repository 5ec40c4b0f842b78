"""Grammars: constrain the tokens of an answer, in drafts and in sampling (extra `grammar`).

A `Grammar` describes the allowed texts; `compile` fits it to a tokenizer. A constrained request has a `GrammarState`,
whose masks depend on the prefix of the answer alone, so drafting does not change the text.
"""

from __future__ import annotations

from draftree.grammar.llguidance import GrammarBusyError, GrammarError, Matcher, lark_text
from draftree.grammar.source import CompiledGrammar, Grammar, Grammars, compile_grammars
from draftree.grammar.state import GrammarProcessor, GrammarState, with_grammar
