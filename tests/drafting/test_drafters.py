"""Drafters behind their contract: what they are shown of the model, and what the two model-free ones draft."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters_for_tests import InModel
from generate_driver import prompts
from tree_paths import path_of
from zoo import MEMBERS, build, construct

from draftree.drafting import Lookahead, PromptLookup, RequestState
from draftree.engine import Engine, SamplingParams, generate
from draftree.engine import engine as engine_module
from draftree.runner import inspect_model
from draftree.shaping import Fixed
from draftree.tree import TokenTree

PROMPTS = prompts((5, 17, 9, 30, 1), seed=6)


@functools.cache
def other(name: str) -> Any:
    """The same model once more: transformers leaves hooks on one whose hidden states were asked for."""
    return construct(MEMBERS[name])


def stock_states(name: str, tokens: list[int], layer: int) -> torch.Tensor:
    with torch.no_grad():
        return other(name)(torch.tensor([tokens]), output_hidden_states=True).hidden_states[layer][0]


@pytest.mark.parametrize("chunk", [512, 4])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mpt", "bloom"])
def test_a_drafter_sees_the_states_of_every_committed_row(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts included, whole or in pieces, in ragged batches; its own rows change none of them."""
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", chunk)
    model = build(name)
    plain = Engine(model)
    answers = [plain.add(prompt, SamplingParams(max_new_tokens=20)) for prompt in PROMPTS]
    plain.run()
    references = {tuple(p): r.tokens for p, r in zip(PROMPTS, answers, strict=True)}
    for runner in ("cpu", "hooked") if name == "llama" else ("hooked",):
        drafter = InModel(references, seed=9)
        engine = Engine(model, drafter=drafter, shape=Fixed(10), slots=3, runner=runner)
        made = [engine.add(prompt, SamplingParams(max_new_tokens=20)) for prompt in PROMPTS]
        engine.run()
        assert [r.tokens for r in made] == [r.tokens for r in answers]
        assert len(drafter.kept) == len(PROMPTS)
        assert (drafter.passes[False] > 0) == (chunk == 4)  # parts of prompts go without its rows
        assert drafter.passes[True] >= sum(r.stats.steps for r in made) / 3
        for tokens, states in drafter.kept:
            for layer in drafter.taps:
                # Every token but the newest, which is the next root; one that ended the text has no row either.
                known = states[layer]
                assert len(known) in (len(tokens) - 1, len(tokens))
                torch.testing.assert_close(known, stock_states(name, tokens[: len(known)], layer), rtol=0, atol=2e-4)
        assert sum(r.stats.accepted for r in made) > 20


# ------------------------------------------------------------------------------- prompt lookup


def lookup(
    tokens: list[int], budget: int = 10, room: int = 100, eos: tuple[int, ...] = (), **options: int
) -> list[int]:
    drafter = PromptLookup(**{"num_draft_tokens": 10, "max_ngram_size": 3} | options)
    request = RequestState(0, list(tokens), len(tokens), room, eos_token_ids=eos)
    drafter.begin(request)
    tree = drafter.draft([request], [budget])
    assert tree.tokens[0, 0] == tokens[-1]
    size = tree.sizes[0]
    assert tree.parents[0].tolist() == list(range(-1, size - 1))
    assert (np.diff(tree.logp[0].numpy()) < 0).all()
    return tree.tokens[0, 1:size].tolist()


def test_prompt_lookup_takes_the_longest_match() -> None:
    assert lookup([1, 2, 3, 7, 7, 2, 3, 8, 9, 1, 2, 3]) == [7, 7, 2, 3, 8, 9, 1, 2, 3]
    assert lookup([4, 3, 5, 1, 3, 6, 1, 3]) == [6, 1, 3]
    assert lookup([4, 3, 5, 1, 3, 6, 1, 3], max_ngram_size=1) == [5, 1, 3, 6, 1, 3]
    assert lookup([1, 2, 3]) == []
    assert lookup([5]) == []
    assert lookup([0, 0]) == [0]  # id 0 is a token


def test_prompt_lookup_limits() -> None:
    text = [1, 2, 3, 4, 5, 6, 1]
    assert lookup(text) == [2, 3, 4, 5, 6, 1]
    assert lookup(text, budget=2) == [2, 3]
    assert lookup(text, room=4) == [2, 3, 4]  # the target adds one itself
    assert lookup(text, room=1) == []
    assert lookup(text, budget=0) == []
    assert lookup(text, eos=(4, 5)) == [2, 3, 4]


def test_prompt_lookup_follows_the_output() -> None:
    drafter = PromptLookup()
    request = RequestState(3, [1, 2], 2, 10)
    drafter.begin(request)
    for new in ([8], [9, 1]):  # two steps that ask for no draft tokens
        request.tokens += new
        request.remaining -= len(new)
    assert drafter.draft([request], [5]).tokens[0].tolist() == [1, 2, 8, 9, 1]
    request.tokens += [2, 8]
    request.remaining -= 2
    assert drafter.draft([request], [2]).tokens[0].tolist() == [8, 9, 1]
    drafter.end(request)
    drafter.end(request)  # a request that never began may end
    assert drafter._seen == {}


@pytest.mark.parametrize("options", [{"num_draft_tokens": 0}, {"max_ngram_size": -1}])
def test_prompt_lookup_options(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="give at least 1"):
        PromptLookup(**options)


# ------------------------------------------------------------------------------- lookahead


def lookahead(**options: Any) -> tuple[Lookahead, RequestState]:
    drafter = Lookahead(decoding_length=12, branch_length=4, **options)
    drafter.warm([[5, 6, 7, 8, 9], [5, 6, 7, 3, 3], [6, 20, 21]])
    drafter.bind(inspect_model(build("llama")), eos_token_ids=(9,))
    request = RequestState(1, [30, 31, 5, 6, 30, 31, 5, 6], 8, 50)
    drafter.begin(request)
    return drafter, request


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(path_of(tree, 0, node)[1:]) for node in range(1, tree.sizes[0])}


def test_lookahead_drafts_from_prompt_and_answers() -> None:
    drafter, request = lookahead()
    tree = drafter.draft([request], [12])
    assert {(7,), (7, 8), (7, 3), (30,), (30, 31)} <= paths(tree)
    names = {drafter.source_name(int(s)) for s in tree.source[0, 1 : tree.sizes[0]]}
    assert {"lookahead/prompt", "lookahead/output"} <= names
    assert (tree.logp[0, 1:].diff() <= 0).all()


@pytest.mark.parametrize("budget", [0, 1, 3, 12])
@pytest.mark.parametrize("room", [1, 2, 3, 50])
@pytest.mark.parametrize("mode", ["hierarchical", "parallel", "single"])
def test_lookahead_keeps_to_budget_and_room(budget: int, room: int, mode: str) -> None:
    drafter, request = lookahead(mode=mode)
    request.remaining = room
    tree = drafter.draft([request], [budget])
    assert tree.sizes[0] - 1 <= budget
    assert tree.height <= room - 1
    if budget and room > 1:
        assert tree.sizes[0] > 1
    if mode == "single":
        assert tree.height == tree.sizes[0] - 1


def test_lookahead_reads_the_news_of_a_batch_before_it_drafts() -> None:
    """What one request brings is drafted for another in the same step, and each has the tree that it has alone."""
    drafter, first = lookahead()
    second, third = RequestState(2, [40, 41], 2, 50), RequestState(3, [5, 6], 2, 1)
    for request in (second, third):
        drafter.begin(request)
    second.tokens += [5, 6, 22, 23]
    trees = drafter.draft([first, second, third], [12, 12, 12])
    assert {(22,), (22, 23)} <= {tuple(path_of(trees, 0, node)[1:]) for node in range(1, trees.sizes[0])}
    assert trees.sizes[2] == 1  # it has room for the target's own token alone
    for b, request in enumerate((first, second)):
        alone = drafter.draft([request], [12])
        for field in ("tokens", "parents", "logp", "source"):
            assert torch.equal(getattr(trees, field)[b, : trees.sizes[b]], getattr(alone, field)[0])
    assert drafter.draft([first, second], [0, 12]).sizes == (1, trees.sizes[1])


def test_lookahead_sources() -> None:
    drafter, request = lookahead(sources="prompt")
    assert all(p[0] == 30 for p in paths(drafter.draft([request], [12])))
    drafter, request = lookahead(sources="output")
    assert all(p[0] != 30 for p in paths(drafter.draft([request], [12])))


def test_answers_warmed_before_the_model_is_known_end_at_its_eos() -> None:
    """The trie is made when a target tells its EOS ids; what was warmed before must not run past one."""
    drafter = Lookahead(branch_length=6)
    drafter.warm([[5, 6, 9, 7, 7, 7]])
    drafter.bind(inspect_model(build("llama")), eos_token_ids=(9,))
    drafter.warm([[5, 11, 9, 12]])
    request = RequestState(1, [30, 5], 2, 50)
    drafter.begin(request)
    assert paths(drafter.draft([request], [12])) == {(6,), (6, 9), (11,), (11, 9)}
    with pytest.raises(ValueError, match="answer"):
        Lookahead().warm([[5, -1]])


@pytest.mark.parametrize("options", [{"mode": "tree"}, {"sources": "web"}, {"decoding_length": 0}, {"capacity": -1}])
def test_lookahead_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Lookahead(**options)


def test_lookahead_travels_by_file(demo: Any, tmp_path: Path) -> None:
    ids = demo.tokenizer("The restaurant serves", return_tensors="pt").input_ids
    drafter = Lookahead()
    options = {"max_new_tokens": 30, "shape": Fixed(16)}
    cold = generate(demo.model, ids, drafter=drafter, **options)
    drafter.save(tmp_path / "trie", demo.tokenizer)
    loaded = Lookahead.load(tmp_path / "trie", demo.tokenizer)
    warm = generate(demo.model, ids, drafter=loaded, **options)
    again = generate(demo.model, ids, drafter=drafter, **options)
    assert torch.equal(cold.sequences, warm.sequences)
    assert warm.stats.total.steps == again.stats.total.steps < cold.stats.total.steps


def test_no_answer_without_a_lookup_table_of_its_own() -> None:
    """Two drafters share nothing."""
    first, request = lookahead()
    second = Lookahead(decoding_length=12, branch_length=4)
    second.bind(inspect_model(build("llama")), eos_token_ids=())
    second.begin(request)
    assert paths(first.draft([request], [12])) != paths(second.draft([request], [12]))


def test_any_room_is_room_for_a_trie() -> None:
    """Models without a limit of positions may be asked for more tokens than a trie counts levels."""
    drafter, first = lookahead()
    drafter.end(first)
    request = RequestState(2, [5, 6], 2, 2**40)
    drafter.begin(request)
    assert drafter.draft([request], [8]).sizes[0] > 1
    drafter.end(request)
