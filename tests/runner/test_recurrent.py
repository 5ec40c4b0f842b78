"""Models with recurrent layers: what other models do not have, beside the zoo's checks and the law's."""

from __future__ import annotations

import copy
import sys
import threading
from typing import Any

import pytest
import torch
import zoo
from generate_driver import SAMPLED, hf, left_pad, noisy, prompts, same
from runner_driver import Run, Stepwise, Tree, difference, prune

import draftree
from draftree.drafting import BiLD, DraftModel, Lookahead
from draftree.engine import Engine, SamplingParams, generate
from draftree.engine.passes import score_prompt
from draftree.runner import open_runner
from draftree.runner.base import Runner
from draftree.runner.recurrent.cache import RecurrentCache
from draftree.runner.recurrent.operators import Forest
from draftree.shaping import Fixed

FAMILIES = [member.id for member in zoo.RECURRENT]
KINDS = ("qwen3_5", "kimi_linear", "nemotron_h", "jamba", "lfm2")  # One for each kind of recurrence.


def test_a_forest_has_levels_and_windows() -> None:
    tree = Tree((-1, 0, 0, 1, 3), 1)
    forest = Forest(torch.stack([tree.visible(5), torch.eye(5, dtype=torch.bool)]), (5, 1))
    levels = [(rows.tolist(), above.tolist()) for rows, above in forest.levels]
    assert levels == [([0, 5], [0, 1]), ([1, 2], [0, 0]), ([3], [0]), ([4], [0])]
    # The context's inputs are 0 to 2, then rows.
    assert forest.windows(3)[0].tolist() == [[0, 1, 2], [1, 2, 3], [1, 2, 3], [2, 3, 4], [3, 4, 6]]


@pytest.mark.parametrize("name", KINDS)
def test_random_trees_and_their_commits(name: str) -> None:
    """Every node of random trees, in three ragged requests over several steps, equals the stock model."""
    run = Run(open_runner(zoo.build(name), "hooked"), [5, 30, 17], seed=4).prefill()
    for step in range(6):
        trees = [Tree.random(1 + (step * 5 + 7 * b) % 12, 100 * step + b) for b in range(3)]
        result = run.step(trees)
        assert run.error(trees, result) < 1e-4
        run.commit(trees, [tree.branches[-1] for tree in trees], result)


def test_the_model_keeps_its_functions() -> None:
    """Functions are replaced while a pass over trees runs, and in its thread alone."""
    model = zoo.build("qwen3_5")
    file = sys.modules[type(model).__module__]
    names = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
    before = [getattr(file, name) for name in names]
    ids = torch.tensor(prompts((40,)))
    expected = hf(model, ids)
    own = copy.deepcopy(model)
    run = Run(open_runner(own, "hooked")).prefill()
    found: list[Any] = []

    def other() -> None:
        found.append(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False))

    thread = threading.Thread(target=other)
    thread.start()
    tree = Tree((-1, 0, 0, 1), 2)
    while thread.is_alive():
        run.step([tree])
    thread.join()
    assert torch.equal(found[0], expected)
    assert [getattr(file, name) for name in names] == before


@pytest.mark.parametrize("name", ["qwen3_5", "jamba", "lfm2"])
@pytest.mark.parametrize("large", ["llama", "same"])
def test_a_hybrid_drafts(name: str, large: str) -> None:
    """A small model with recurrent layers drafts chains and trees, greedily and sampled, in ragged batches."""
    model = zoo.build(name if large == "same" else large)
    rows = prompts()
    ids, mask = left_pad(rows)
    expected = hf(model, ids, mask)
    accepted = 0
    for drafter in (
        DraftModel(noisy(name), depth=4, branching=3, beam=3, confidence=0),
        DraftModel(noisy(name), depth=4, branching=1, beam=1, confidence=0),
        BiLD(noisy(name), 0.1, lossless=True, num_draft_tokens=6),
    ):
        out = generate(model, ids, mask, drafter=drafter, shape=Fixed(12), max_new_tokens=24)
        same(out.sequences, expected, f"{name} for {large}")
        accepted += out.stats.total.accepted
        drawn = generate(model, ids, mask, max_new_tokens=24, seed=3, **SAMPLED).sequences
        again = generate(model, ids, mask, drafter=drafter, max_new_tokens=24, seed=3, **SAMPLED).sequences
        same(again, drawn, f"{name} for {large}, sampled")
    assert accepted > 20 or large != "same"


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
def test_a_dialogue_goes_on_from_the_state_of_its_last_answer(name: str) -> None:
    model, first = zoo.build(name), prompts((70,), seed=5)[0]
    with Engine(model, slots=2, keep_prefixes=True) as engine:
        one = engine.add(first, SamplingParams(6))
        engine.run()
        # Another answer to the same question begins at the last chunk of its prompt.
        again = engine.add(first, SamplingParams(6))
        engine.run()
        assert again.reused == 64
        second = [*first, *one.tokens, *prompts((5,), seed=6)[0]]
        two = engine.add(second, SamplingParams(6))
        engine.run()
        assert two.reused == len(first) + 5
    assert again.tokens == one.tokens
    with Engine(model, slots=1) as engine:
        alone = engine.add(second, SamplingParams(6))
        engine.run()
    assert two.tokens == alone.tokens


@pytest.mark.parametrize("runner", ["auto", "hooked"])
def test_a_slot_forgets_the_states_of_another_text(runner: str) -> None:
    """A text of less than a chunk follows one with a state behind its first chunk, and grows past that length."""
    model = zoo.construct(zoo.MEMBERS["qwen3_5"])
    model.generation_config.eos_token_id = None
    with Engine(model, slots=1, keep_prefixes=True, runner=runner) as engine:
        engine.add(prompts((70,), seed=5)[0], SamplingParams(2))
        engine.run()
        one = engine.add(prompts((20,), seed=6)[0], SamplingParams(90))
        engine.run()
        begun = [*one.context.tokens[:65], 7]
        two = engine.add(begun, SamplingParams(12))
        engine.run()
    with Engine(model, slots=1, runner=runner) as engine:
        alone = engine.add(begun, SamplingParams(12))
        engine.run()
    assert two.reused == 0
    assert two.tokens == alone.tokens


def test_a_dialogue_of_jamba_is_read_anew() -> None:
    model, first = zoo.build("jamba"), prompts((40,), seed=5)[0]
    with Engine(model, slots=2, keep_prefixes=True) as engine:
        one = engine.add(first, SamplingParams(6))
        engine.run()
        second = [*first, *one.tokens, *prompts((5,), seed=6)[0]]
        two = engine.add(second, SamplingParams(6))
        engine.run()
    expected = hf(model, torch.tensor([second]), max_new_tokens=6)[0, len(second) :].tolist()
    assert two.tokens == expected


def test_prompts_of_jamba_are_read_in_one_pass() -> None:
    model = zoo.construct(zoo.MEMBERS["jamba"], max_position_embeddings=2048)
    ids = torch.tensor(prompts((900,)))
    same(generate(model, ids, drafter=Lookahead(), max_new_tokens=24).sequences, hf(model, ids))


@pytest.mark.parametrize("name", ["jamba", "qwen3_5"])
def test_scores_of_a_long_prompt(name: str) -> None:
    model = zoo.construct(zoo.MEMBERS[name], max_position_embeddings=2048)
    runner, prompt = open_runner(model), prompts((600,))[0]
    scores = [one for chunk in score_prompt(runner, prompt, 1, runner.new_cache(1)) for one in chunk]
    with torch.no_grad():
        logp = model(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    expected = logp[torch.arange(599), torch.tensor(prompt[1:])]
    torch.testing.assert_close(torch.tensor([one.chosen for one in scores]), expected, rtol=0, atol=1e-3)


def check_trees(runner: Runner, count: int, seed: int, tolerance: float) -> None:
    """Compare the nodes of so many trees, of three growing texts, with the stock model's one-token steps."""
    run = Run(runner, [40 + seed, 5, 97], seed=seed).prefill()
    stock = [Stepwise(runner.target.model, prompt) for prompt in run.prompts]
    for step in range(count // 3):
        trees = [Tree.random(1 + (step * 5 + 7 * b) % 12, 1000 * seed + 10 * step + b) for b in range(3)]
        result = run.step(trees)
        for b, tree in enumerate(trees):
            wanted = stock[b].nodes(tree)
            assert difference(result.logits[b, : tree.size], wanted) < tolerance * float(wanted.abs().max())
        paths = [tree.branches[-1] for tree in trees]
        run.commit(trees, paths, result)
        for b, tree in enumerate(trees):
            stock[b].accept(tree.tokens[paths[b]])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_two_thousand_trees(hybrid: Any, seed: int) -> None:
    check_trees(open_runner(hybrid.model, "hooked" if seed == 7 else "auto"), 250, seed, 3e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "runner"), [*((name, "auto") for name in FAMILIES), ("qwen3_5", "hooked"), ("lfm2", "hooked")]
)
def test_two_thousand_trees_of_the_families(name: str, runner: str) -> None:
    check_trees(open_runner(zoo.build(name), runner), 105, 1, 5e-5 if name == "zamba2" else 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chat-hybrid", *FAMILIES])
def test_a_long_text(hybrid: Any, name: str) -> None:
    """Texts of 2,000 tokens, most of them the prompt's, and one of the package's model with most of its own."""
    length = 40 if name == "chat-hybrid" else 1500
    if name == "chat-hybrid":
        model = copy.deepcopy(hybrid.model)
    else:
        model = zoo.construct(zoo.MEMBERS[name], max_position_embeddings=4096)
    model.generation_config.eos_token_id = None
    ids = torch.tensor(prompts((length,)))
    expected = hf(model, ids, max_new_tokens=2000 - length)
    drafter = Lookahead()
    drafter.warm([expected[0, length:1900].tolist()])
    out = generate(model, ids, drafter=drafter, shape=Fixed(12), max_new_tokens=2000 - length)
    same(out.sequences, expected, name)
    assert out.stats.total.accepted > 0


def test_a_pass_keeps_little_of_each_node() -> None:
    """What a tree leaves behind until its commit is a few numbers of each head and node, not a state."""
    model = zoo.construct(zoo.MEMBERS["qwen3_5"], linear_key_head_dim=64, linear_value_head_dim=64)
    run = Run(open_runner(model, "hooked"), [100]).prefill()
    assert isinstance(run.cache, RecurrentCache)
    run.step([Tree.random(8, 1)])
    kept = sum(row.numel() for scan in run.cache._recurrent.scans.values() for row in scan.rows)
    states = sum(state[0].numel() for state in run.cache.states.values())
    assert kept < 8 * states / 16


def test_what_does_not_hold_is_refused() -> None:
    model = zoo.build("qwen3_5")
    with pytest.raises(ValueError, match="recurrent layers"):
        draftree.BiTA.fresh(model)
    with pytest.raises(ValueError, match="strict=True cannot be kept"):
        Engine(copy.deepcopy(model).bfloat16(), strict=True)
    run = Run(open_runner(zoo.build("zamba2"))).prefill()
    with pytest.raises(ValueError, match="leave the pruner out"):
        run.step([Tree.random(4, 1)], surgeries=prune(2, torch.tensor([[0, 1]])))
