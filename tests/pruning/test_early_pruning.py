"""Early pruning: the text stays the model's own, the right nodes leave, drafters read what they would have read."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from few import shared
from generate_driver import NEW, SAMPLED, drafters, hf, left_pad, prompts, references_of, same, tries_in_turn
from in_model_driver import MAKERS, make, recorded
from pruning_driver import PRUNERS, pruner, randomised_head
from torch import Tensor
from tree_paths import from_arrays
from zoo import CAUSAL, ENCODER_DECODER, MORE_TOKENS, build

import draftree
from draftree.engine import generate
from draftree.pruning import EarlyHead, EarlyPruning
from draftree.pruning.pruner import STAY_FIRST
from draftree.runner import EagerRunner, inspect_model, open_runner
from draftree.runner.plan import Plan
from draftree.runner.step_cost import StepCost
from draftree.shaping import DynamicTree, Fixed
from draftree.tree import TokenTree

DEFAULT = ("llama", "gpt2", "bart")
NAMES = [m.id for m in CAUSAL + ENCODER_DECODER]
ODD, EVEN = shared(NAMES, DEFAULT)
TURNS = [*DEFAULT, *(name for name in NAMES if name not in DEFAULT)]
SEED = 11


def check(name: str, ids: Tensor, mask: Tensor | None, expected: Tensor, **options: Any) -> None:
    model = build(name)
    rows = prompts()
    fast = EagerRunner.qualifies(inspect_model(model))
    outside = {} if model.config.is_encoder_decoder else drafters(references_of(rows, expected), in_model=False)
    makers = outside | {kind: lambda kind=kind: make(kind, model) for kind in MAKERS}
    kinds = tries_in_turn(makers, TURNS.index(name), 2)
    pruned = drafted = accepted = 0
    for number, (kind, maker) in enumerate(makers.items()):
        if kind not in kinds:
            continue
        place = list(PRUNERS)[number % len(PRUNERS)]
        runner = "cpu" if fast and number % 2 else "hooked"
        out = generate(
            model,
            ids,
            mask,
            drafter=maker(),
            pruner=PRUNERS[place](model),
            shape=Fixed(16),
            runner=runner,
            max_new_tokens=NEW,
            **options,
        )
        same(out.sequences, expected, f"{name} on {runner} with {kind}, {place}")
        total = out.stats.total
        pruned, drafted, accepted = pruned + total.pruned, drafted + total.drafted, accepted + total.accepted
    assert 0 < pruned < drafted
    assert accepted > 0


@pytest.mark.parametrize("name", EVEN)
def test_greedy_in_a_ragged_batch(name: str) -> None:
    ids, mask = left_pad(prompts())
    options: dict[str, Any] = {}
    if build(name).config.is_encoder_decoder:
        ids, mask, options = ids.flip(1), mask.flip(1), {"no_repeat_ngram_size": 3}
    check(name, ids, mask, hf(build(name), ids, mask, **options), **options)


@pytest.mark.parametrize("name", ODD)
def test_sampled_in_a_ragged_batch(name: str) -> None:
    ids, mask = left_pad(prompts())
    if build(name).config.is_encoder_decoder:
        ids, mask = ids.flip(1), mask.flip(1)
    expected = generate(build(name), ids, mask, max_new_tokens=NEW, seed=SEED, **SAMPLED).sequences
    check(name, ids, mask, expected, seed=SEED, **SAMPLED)


@pytest.mark.parametrize("name", [member.id for member in MORE_TOKENS])
def test_more_tokens_than_positions(name: str) -> None:
    model, ids = build(name), torch.tensor(prompts()[:1])
    drafter, pruner = make("medusa", model), PRUNERS["middle"](model)
    out = generate(model, ids, drafter=drafter, pruner=pruner, shape=Fixed(16), runner="hooked", max_new_tokens=NEW)
    same(out.sequences, hf(model, ids), name)
    assert out.stats.total.pruned > 0


def as_if_steps_cost(bind: Any, cost: StepCost, runner: Any, _measured: StepCost, clock: Any) -> Any:
    """A pruner's `bind` with that cost in place of the measured one."""
    return bind(runner, cost, clock)


def test_alone_and_with_a_dynamic_tree() -> None:
    """Also where the pruner decides by itself what pays; both ways of deciding are met."""
    model, rows = build("llama"), prompts((19,))
    ids = torch.tensor(rows)
    expected = hf(model, ids)
    flat, steep = StepCost((1, 64), (1.0, 1.01)), StepCost((1, 64), (1.0, 20.0))
    pruned = []
    for cost in (flat, steep):
        early = EarlyPruning(randomised_head(EarlyHead.fresh(model, layer=1)), top_k=8)
        early.bind = partial(as_if_steps_cost, early.bind, cost)  # type: ignore[method-assign]
        drafter = drafters(references_of(rows, expected), in_model=False)["random"]()
        out = generate(model, ids, drafter=drafter, pruner=early, shape=Fixed(24), max_new_tokens=NEW)
        same(out.sequences, expected)
        pruned.append(out.stats.total.pruned)
        out = generate(model, ids, drafter=drafter, pruner=early, shape=DynamicTree(cost=cost), max_new_tokens=NEW)
        same(out.sequences, expected)
    assert pruned[0] == 0
    assert pruned[1] > 0


def reference(model: Any, early: EarlyPruning, text: list[int], tree: TokenTree) -> list[int]:
    """Nodes that stay, one path at a time, from a stock pass over each."""
    head = model.get_output_embeddings()
    parents, tokens = tree.parents[0].tolist(), tree.tokens[0].tolist()

    def says(node: int) -> np.ndarray:
        path = []
        while node > 0:
            path.append(tokens[node])
            node = parents[node]
        states = model(torch.tensor([text + path[::-1]]), output_hidden_states=True).hidden_states[early.layer]
        return early.head.weights(states[:, -1:], head)[0, 0].log_softmax(-1).numpy()

    stays = [True]
    for node in range(1, len(parents)):
        given = says(parents[node])
        stays.append(bool((given > given[tokens[node]]).sum() < early.top_k) and stays[parents[node]])
    return [node for node, stay in enumerate(stays) if stay]


@pytest.mark.parametrize("place", list(PRUNERS))
@pytest.mark.parametrize("runner_name", ["cpu", "hooked"])
@torch.no_grad()
def test_those_stay_that_should(place: str, runner_name: str) -> None:
    model = build("llama")
    early, runner = PRUNERS[place](model), open_runner(model, runner_name)
    pruner = early.bind(runner, None)
    generator = torch.Generator().manual_seed(2)
    size = 20
    parents = [-1, *(int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, size))]
    tokens = torch.randint(3, 97, (1, size), generator=generator)
    tree = from_arrays(tokens[0, 1:].tolist(), [p - 1 for p in parents[1:]], root=int(tokens[0, 0]))
    text = prompts((12,))[0]
    with runner.guard():
        cache = runner.new_cache(1)
        causal = torch.ones(1, 12, 12, dtype=torch.bool).tril()
        result = runner.run(Plan(torch.tensor([text]), torch.arange(12)[None], causal), cache)
        cache.commit([list(range(12))], result.segments)
        plan = Plan(tokens, 12 + tree.depth, tree.ancestors, last_logit_row=size)
        result = runner.run(pruner.enter(plan, tree), cache)
    expected = reference(model, early, [*text, int(tokens[0, 0])], tree)
    assert 1 < len(expected) < size
    assert result.rows is not None
    assert result.rows.tolist() == [expected]
    assert result.logits.shape[1] == len(expected)


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if "groups" not in kind and "straight" not in kind])
def test_drafters_read_what_they_would_have_read(kind: str) -> None:
    """Where every node has rows, what is read at the one accepted last depends on the text alone, whatever left."""
    model = build("llama")
    ids, mask = left_pad(prompts())
    seen = []
    for early in (None, *(maker(model) for maker in PRUNERS.values())):
        drafter = make(kind, model)
        steps = recorded(drafter)
        generate(model, ids, mask, drafter=drafter, pruner=early, shape=Fixed(12), max_new_tokens=NEW)
        seen.append({tuple(s.tokens): s for s in steps})
    plain, compared = seen[0], 0
    for pruned in seen[1:]:
        for text in plain.keys() & pruned.keys():
            depth = min(int(s.logp[:, 0].isfinite().sum()) for s in (plain[text], pruned[text]))
            torch.testing.assert_close(plain[text].logp[:depth], pruned[text].logp[:depth], rtol=1e-3, atol=1e-3)
            compared += depth
    assert compared > 60


def test_a_drafter_keeps_all_it_needs_when_nothing_leaves() -> None:
    model = build("llama")
    ids = torch.tensor(prompts((9,)))
    early = pruner(model, 2, top_k=97)
    out = generate(model, ids, drafter=make("bita", model), pruner=early, shape=Fixed(8), max_new_tokens=NEW)
    assert early._looks.stay > STAY_FIRST  # it did look
    assert out.stats.total.pruned == 0


def test_it_learns_what_a_look_costs_and_how_much_leaves() -> None:
    model = build("llama")
    cost = StepCost((1, 64), (1.0, 64.0))
    early = EarlyPruning(EarlyHead.fresh(model, layer=1))
    worth = early.bind(open_runner(model), cost).worth
    assert worth.pays(32)
    for _ in range(100):
        worth.note(1.0, 2.0, 32)
    assert not worth.pays(32)  # nothing ever leaves
    assert worth.rows(32) == 32
    for _ in range(100):
        worth.note(0.0, 1e-6, 32)
    assert worth.pays(32)
    assert worth.rows(32) == pytest.approx(32 / 4, rel=0.1)
    for _ in range(400):
        worth.note(0.0, 100.0, 32)
    assert not worth.pays(32)  # looking takes longer than the pass
    assert sum(worth.pays(32) for _ in range(200)) == 3  # but it is tried again


def test_engines_that_share_a_pruner_keep_their_own_costs() -> None:
    runner = open_runner(build("llama"))
    early = EarlyPruning(EarlyHead.fresh(build("llama"), layer=1))
    flat = early.bind(runner, StepCost((1, 64), (1.0, 1.01))).worth
    steep = early.bind(runner, StepCost((1, 64), (1.0, 20.0))).worth
    assert steep.pays(32)
    assert not flat.pays(32)
    before = flat.rows(1000)
    steep.note(0.0, 1e-6, 32)
    assert flat.rows(1000) < before  # what leaves is known to both


def test_the_shipped_head_prunes_most_of_a_tree_at_little_loss() -> None:
    model, tokenizer = draftree.demo_model()
    text = "Write a Python function that returns the sum of a list."
    chat = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    outs = []
    for early in (None, EarlyPruning(draftree.demo_early_head(model), always=True)):
        drafter = draftree.demo_drafter("hidden-transfer", model)
        outs.append(generate(model, ids, drafter=drafter, pruner=early, shape=Fixed(32), max_new_tokens=64))
    same(outs[0].sequences, outs[1].sequences)
    total = outs[1].stats.total
    assert total.pruned > 0.57 * total.drafted
    assert total.acceptance_length > 0.9 * outs[0].stats.acceptance_length
    assert "pruned inside the pass" in outs[1].stats.summary()
    assert total.as_dict()["pruned"] == total.pruned


@pytest.mark.slow
def test_it_can_be_what_is_imported_first() -> None:
    """Rooms of one floor import one another; whichever comes first, all of them load.

    Each is imported in a process that knows nothing of draftree; they are forked from one that has loaded torch.
    """
    script = """
import os, sys, torch, transformers

for room in ("pruning", "shaping", "drafting", "acceptance"):
    assert not [name for name in sys.modules if name.startswith("draftree")]
    child = os.fork()
    if child == 0:
        try:
            __import__(f"draftree.{room}")
        except BaseException as error:
            print(room, repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, room
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="top_k"):
        EarlyPruning(EarlyHead.fresh(build("llama"), layer=1), top_k=0)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(TypeError, match=r"draftree\.EarlyHead"):
        EarlyPruning("folder")  # type: ignore[arg-type]
    early = EarlyPruning(EarlyHead.fresh(build("llama"), layer=1))
    ids = torch.tensor(prompts((9,)))
    with pytest.raises(ValueError, match="pass a drafter"):
        generate(build("llama"), ids, pruner=early)
    demo, _ = draftree.demo_model()
    with pytest.raises(ValueError, match="made for a model with hidden_size 64"):
        generate(demo, ids, drafter=draftree.Lookahead(), pruner=early)
    keeping = drafters(references_of(prompts((9,)), hf(build("llama"), ids)))["in-model"]()
    early = EarlyPruning(early.head, always=True)
    with pytest.raises(ValueError, match="drops rows inside the pass already"):
        generate(build("llama"), ids, drafter=keeping, pruner=early, shape=Fixed(8))
