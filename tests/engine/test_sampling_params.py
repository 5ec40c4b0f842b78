"""Options of one request: scores, a node budget, a prediction, a cache salt."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from drafters_for_tests import RandomTree

import draftree
from draftree.engine import Engine, SamplingParams
from draftree.engine.request import Request

PROMPT = [5, 6, 7, 8, 9, 10, 5, 6, 7]


def answer(model: Any, drafter: Any, params: SamplingParams, prompt: list[int] = PROMPT) -> Request:
    shape = None if drafter is None else draftree.Fixed(8)  # however long steps take
    with Engine(model, drafter=drafter, shape=shape, slots=2) as engine:
        request = engine.add(prompt, params)
        engine.run()
    return request


@pytest.mark.parametrize("drafter", [None, draftree.Lookahead()])
@pytest.mark.parametrize("sample", [False, True])
def test_scores_are_the_models_log_probabilities(drafter: Any, sample: bool) -> None:
    model = zoo.build("llama")
    request = answer(model, drafter, SamplingParams(20, logprobs=3, sample=sample, seed=1))
    ids = torch.tensor([[*PROMPT, *request.tokens]])
    with torch.no_grad():
        logp = model(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    for place, emitted in zip(logp, request.output, strict=True):
        assert emitted.scores is not None
        values, tokens = place.topk(3)
        assert emitted.scores.chosen == pytest.approx(float(place[emitted.token]), abs=1e-4)
        assert [t for t, _ in emitted.scores.likeliest] == tokens.tolist()
        assert [p for _, p in emitted.scores.likeliest] == pytest.approx(values.tolist(), abs=1e-4)


def test_a_node_budget_bounds_one_request_alone() -> None:
    model = zoo.build("llama")
    with Engine(model, drafter=RandomTree({}), shape=draftree.Fixed(12), slots=2) as engine:
        free, bound = engine.add(PROMPT, SamplingParams(16)), engine.add(PROMPT, SamplingParams(16, node_budget=2))
        engine.run()
    assert free.tokens == bound.tokens
    assert free.stats.drafted > 4 * free.stats.steps
    assert 0 < bound.stats.drafted <= 2 * bound.stats.steps


@pytest.mark.parametrize("make", [draftree.Lookahead, draftree.PromptLookup])
def test_a_prediction_is_drafted_from_and_changes_nothing(make: Any) -> None:
    model = zoo.build("llama")
    plain = answer(model, None, SamplingParams(24))
    guided = answer(model, make(), SamplingParams(24, prediction=(1, 2, *plain.tokens)))
    misled = answer(model, make(), SamplingParams(24, prediction=(3, 1, 4, 1, 5, 9, 2, 6)))
    assert guided.tokens == misled.tokens == plain.tokens
    assert guided.stats.steps < misled.stats.steps


def test_a_cache_salt_learns_nothing_from_another() -> None:
    model, drafter = zoo.build("llama"), draftree.Lookahead()
    first = answer(model, drafter, SamplingParams(24, cache_salt="a"))
    stranger = answer(model, drafter, SamplingParams(24, cache_salt="b"))
    shared = answer(model, drafter, SamplingParams(24))
    again = answer(model, drafter, SamplingParams(24, cache_salt="a"))
    assert first.tokens == stranger.tokens == shared.tokens == again.tokens
    assert first.stats.steps == stranger.stats.steps == shared.stats.steps
    assert again.stats.steps < first.stats.steps


def test_a_cache_salt_begins_with_the_trie_as_it_was_loaded(tmp_path: Path) -> None:
    model, tokenizer = zoo.build("llama"), Words()
    plain = answer(model, None, SamplingParams(24))
    first = draftree.Lookahead(eos_token_ids=())
    first.warm([[*PROMPT, *plain.tokens]])
    first.save(tmp_path / "trie", tokenizer)
    drafter = draftree.Lookahead.load(tmp_path / "trie", tokenizer)
    loaded = drafter.trie.nodes
    answer(model, drafter, SamplingParams(24), [3, *PROMPT, 4])
    assert drafter.trie.nodes > loaded
    for cache_salt in ("a", "b"):
        assert drafter.trie_of(cache_salt).nodes == loaded
        found = answer(model, drafter, SamplingParams(24, cache_salt=cache_salt))
        assert found.tokens == plain.tokens
        assert found.stats.accepted > 12
    assert copy.deepcopy(drafter).trie_of("c").nodes == loaded


class Words:
    """A tokenizer with a vocabulary and nothing else."""

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(zoo.VOCABULARY)}


def test_cache_salts_in_one_step() -> None:
    model, drafter = zoo.build("llama"), draftree.Lookahead()
    with Engine(model, drafter=drafter, slots=4) as engine:
        salts = ["a", None, "b", "a"]
        requests = [engine.add([*PROMPT, i], SamplingParams(20, cache_salt=salt)) for i, salt in enumerate(salts)]
        engine.run()
    for i, request in enumerate(requests):
        assert request.tokens == answer(model, None, SamplingParams(20), [*PROMPT, i]).tokens


def test_the_number_of_salted_tries_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftree.drafting.lookahead import drafter as module

    monkeypatch.setattr(module, "MOST_CACHE_SALTS", 3)
    model, drafter = zoo.build("llama"), draftree.Lookahead()
    for name in "abcde":
        answer(model, drafter, SamplingParams(8, cache_salt=name))
    assert list(drafter._salted) == ["c", "d", "e"]
