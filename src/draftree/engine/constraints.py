"""Grammars in the engine: compiled before any work, and draft tokens that they forbid cut before the pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from draftree.drafting.base import RequestState
from draftree.grammar import CompiledGrammar, Grammar
from draftree.tree import TokenTree

Grammars = Grammar | Sequence[Grammar | None] | None
"""One for all answers, one for each, or none."""


def compile_grammars(
    grammars: Grammars,
    count: int,
    tokenizer: Any,
    vocabulary: int,
    end_tokens: Sequence[int],
    min_new_tokens: int | None = None,
) -> list[CompiledGrammar | None]:
    """The grammars of `count` answers.

    Args:
        grammars: as the caller gave them.
        count: of answers.
        tokenizer, vocabulary, end_tokens: see `Grammar.compile`.
        min_new_tokens: of all answers; None for none.

    Raises:
        TypeError: what is no grammar.
        ValueError: another number of grammars than answers, or one that does not fit the model.
    """
    given: list[Any] = list(grammars) if isinstance(grammars, list | tuple) else [grammars] * count
    for grammar in given:
        if grammar is not None and not isinstance(grammar, Grammar):
            raise TypeError(
                f"grammar is a {type(grammar).__name__}: pass one such as draftree.Grammar.json_schema(...), or None."
            )
    if len(given) != count:
        raise ValueError(f"There are {len(given)} grammars for {count} answers: give one for each, or one for all.")
    fit = tokenizer, vocabulary, end_tokens, min_new_tokens
    return [None if grammar is None else grammar.compile(*fit) for grammar in given]


def wider(budgets: Sequence[int], requests: Sequence[RequestState], most: int) -> list[int]:
    """Draft tokens to ask for, so that enough are left where a grammar forbids some; at most `most` for each."""
    return [
        max(budget, min(2 * budget, most)) if request.grammar is not None else budget
        for budget, request in zip(budgets, requests, strict=True)
    ]


def permitted(trees: TokenTree, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
    """`trees` without the draft tokens that a request's grammar forbids, cut to the budgets that were meant."""
    if trees.width == 1 or all(request.grammar is None for request in requests):
        return trees
    tokens, parents = trees.tokens.tolist(), trees.parents.tolist()
    keep = torch.ones(len(requests), trees.width, dtype=torch.bool, device=trees.device)
    cut = False
    for b, request in enumerate(requests):
        size = trees.sizes[b]
        if request.grammar is None or size == 1:
            continue
        own = request.grammar.permits(request.answer, tokens[b][:size], parents[b][:size])
        if not all(own):
            cut = True
            keep[b, :size] = torch.tensor(own, dtype=torch.bool, device=trees.device)
    if cut:
        trees = trees.prune(keep)[0]
    if any(size > budget + 1 for size, budget in zip(trees.sizes, budgets, strict=True)):
        trees = trees.best(budgets)
    return trees
