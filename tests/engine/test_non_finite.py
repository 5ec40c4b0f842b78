"""NaN and infinity in a draft token or a request never change the text of another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from generate_driver import copy_of, left_pad, prompts

import draftree
from draftree.drafting import Drafter, RequestState
from draftree.engine import Engine, SamplingParams, generate
from draftree.engine.request import State
from draftree.tree import TokenTree

BROKEN = 7  # a token whose embedding is made non-finite
NEW = 20
RUNNERS = ["auto", "eager", "cuda_graphs", "hooked"]
CASES = [("llama", runner) for runner in RUNNERS] + [
    ("gemma2", "auto"),
    ("gpt2", "auto"),
    ("t5", "auto"),
    ("bart", "auto"),
]


def broken(family: str, value: float) -> Any:
    """Return a model with one non-finite embedding, which it never chooses itself."""
    model = copy_of(family)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    with torch.no_grad():
        embedding.weight[BROKEN] = value
        head.weight[BROKEN] = 0.0
    return model


class Poisonous(Drafter):
    """Drafts the true continuation, and the broken token beside and below every token of it."""

    max_nodes = 12

    def __init__(self, truth: Sequence[Sequence[int]]) -> None:
        self.truth = truth

    def draft(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        trees = []
        for request in requests:
            known = next(row for row in self.truth if list(row[: len(request.tokens)]) == request.tokens)
            coming = list(known[len(request.tokens) :])[:3]
            paths = [[BROKEN, BROKEN], *([*coming[:i], BROKEN] for i in range(1, len(coming) + 1)), coming]
            one = TokenTree.from_paths(request.tokens[-1], [path for path in paths if path])
            trees.append(replace(one, logp=torch.where(one.depth > 0, -1.0, 0.0)))
        return TokenTree.stack(trees)


def rows_of(sequences: Any, mask: Any) -> list[list[int]]:
    """Each row without its padding on the left."""
    return [row[int((keep == 0).sum()) :] for row, keep in zip(sequences.tolist(), mask, strict=True)]


@pytest.mark.parametrize(("family", "runner"), CASES)
def test_a_draft_token_that_is_not_finite_changes_no_other(family: str, runner: str) -> None:
    model = broken(family, math.nan)
    ids, mask = left_pad([[t if t != BROKEN else 8 for t in prompt] for prompt in prompts()])
    options = {"max_new_tokens": NEW, "runner": runner, "eos_token_id": None}
    expected = generate(model, ids, mask, **options).sequences
    assert not (expected[:, -NEW:] == BROKEN).any()
    truth = expected.tolist() if model.config.is_encoder_decoder else rows_of(expected, mask)
    out = generate(model, ids, mask, drafter=Poisonous(truth), shape=draftree.Fixed(12), **options)
    assert out.sequences.tolist() == expected.tolist()
    assert out.stats.total.accepted > 0


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_request_that_is_not_finite_changes_no_other(runner: str) -> None:
    """Neither the one beside it nor the next one in its slot."""
    model = broken("llama", math.inf)
    good = [3, 27, 94, 40, 63]

    def answers(*asked: Sequence[int]) -> list[list[int]]:
        engine = Engine(model, drafter=draftree.Lookahead(), slots=1 if len(asked) == 1 else 2, runner=runner)
        requests = [engine.add(prompt, SamplingParams(max_new_tokens=NEW)) for prompt in asked]
        engine.run()
        return [request.tokens for request in requests]

    (expected,) = answers(good)
    assert answers(good, [*good, 5, BROKEN, 11, 12])[0] == expected
    engine = Engine(model, drafter=draftree.Lookahead(), slots=1, runner=runner)
    long = [*good, BROKEN, *range(20, 60)]
    first, second = (engine.add(prompt, SamplingParams(max_new_tokens=NEW)) for prompt in (long, good))
    engine.run()
    assert first.state is State.FINISHED
    assert second.tokens == expected
