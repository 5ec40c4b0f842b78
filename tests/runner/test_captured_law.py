"""The one law over recorded passes: token ids are those of Hugging Face, whatever drafter, batch and type."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from drafters_for_tests import RandomTree
from few import few
from generate_driver import (
    FIVE,
    NEW,
    SAMPLED,
    SHAPES,
    drafters,
    hf,
    left_pad,
    prompts,
    references_of,
    same,
    tries_in_turn,
)
from in_model_driver import MAKERS, make
from runner_driver import BUSHY, Run, Tree, one_thread  # noqa: F401
from strict_driver import PROMPTS as STRICT_PROMPTS
from strict_driver import flat
from strict_driver import run as run_strict
from tape import passes, record_on, tape
from zoo import build

from draftree.engine import Engine, SamplingParams, generate
from draftree.runner import CudaGraphRunner, inspect_model, open_runner
from draftree.shaping import Fixed


@pytest.fixture(autouse=True)
def taped(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on(monkeypatch)


NAMES = ["llama", "gemma3", "qwen3", "glm4"]
CASES = product(NAMES, [False, True], [1, 5])


@pytest.mark.parametrize(("name", "sampled", "batch"), few(CASES, [("llama", True, 1), ("gemma3", False, 5)]))
def test_token_ids_are_those_of_hugging_face(name: str, sampled: bool, batch: int) -> None:
    """Run every kind of drafter over recorded passes, and half of the tries with every other family."""
    model, rows = build(name), prompts(FIVE[:batch])
    ids, mask = left_pad(rows)
    options: dict[str, Any] = SAMPLED | {"seed": 11} if sampled else {}
    if sampled and batch > 1:  # request b draws from seed + b
        expected = generate(model, ids, mask, runner="hooked", max_new_tokens=NEW, **options).sequences
    else:
        expected = hf(model, ids, mask, **options)
    runner = open_runner(model, "cuda_graphs")
    accepted = 0
    made = drafters(references_of(rows, expected))
    kinds = tries_in_turn(made, NAMES.index(name), 2)
    for number, (kind, new) in enumerate(made.items()):
        if kind not in kinds:
            continue
        shape = list(SHAPES.values())[number % len(SHAPES)]()
        out = generate(model, ids, mask, drafter=new(), shape=shape, runner=runner, max_new_tokens=NEW, **options)
        same(out.sequences, expected, kind)
        accepted += out.stats.total.accepted
    assert accepted > expected.shape[1] - ids.shape[1]
    assert tape(runner).replayed > 5 * (expected.shape[1] - ids.shape[1])


@pytest.mark.parametrize("kind", MAKERS)
def test_drafters_inside_the_model(kind: str) -> None:
    """Run rows that enter as embeddings, join behind a layer or are tapped, in a ragged batch."""
    model, rows = build("llama"), prompts(FIVE)
    ids, mask = left_pad(rows)
    expected = hf(model, ids, mask)
    runner = open_runner(model, "cuda_graphs")
    before = tape(runner).replayed
    out = generate(model, ids, mask, drafter=make(kind, model), shape=Fixed(12), runner=runner, max_new_tokens=NEW)
    same(out.sequences, expected, kind)
    eager = open_runner(model, "eager")
    plain = generate(model, ids, mask, drafter=make(kind, model), shape=Fixed(12), runner=eager, max_new_tokens=NEW)
    assert out.stats.total.steps == plain.stats.total.steps  # the same draft tokens, so the same rows
    assert tape(runner).replayed >= before + out.stats.total.steps // len(rows)


def test_requests_that_come_and_go() -> None:
    """Take, free and move slots between steps; texts are those of requests alone."""
    model = build("qwen3")
    runner = open_runner(model, "cuda_graphs")
    asked = prompts((12, 30, 7, 21, 17, 3), seed=5)
    alone = [hf(model, torch.tensor([p]), max_new_tokens=6 + 5 * i)[0, len(p) :].tolist() for i, p in enumerate(asked)]
    references = {tuple(p): text for p, text in zip(asked, alone, strict=True)}
    engine = Engine(model, drafter=RandomTree(references, 3), shape=Fixed(9), slots=5, capacity=32, runner=runner)
    requests = []
    for i, prompt in enumerate(asked):
        requests.append(engine.add(prompt, SamplingParams(max_new_tokens=6 + 5 * i, eos_token_ids=(2,))))
        engine.step()
    engine.run()
    for request, text in zip(requests, alone, strict=True):
        assert request.error is None
        assert request.tokens == text
    assert passes(runner).recorded > 3


def test_strict_mode_in_sixteen_bits() -> None:
    """Decode with trees on a model whose scores are so close together that other bits would be other tokens."""
    model = flat("llama")
    runner = open_runner(model, "cuda_graphs")
    plain, _ = run_strict(model, runner)
    references = {tuple(p): r.tokens for p, r in zip(STRICT_PROMPTS, plain, strict=True)}
    for kind in (RandomTree(references, 3), RandomTree(references, 4)):
        drafted, _ = run_strict(model, runner, drafter=kind, strict=True)
        assert [r.tokens for r in drafted] == [r.tokens for r in plain]
        assert sum(r.stats.accepted for r in drafted) > 60


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2-window"])
def test_rows_that_attend_alone_have_the_bits_of_single_steps(name: str) -> None:
    model = copy.deepcopy(build(name)).to(torch.bfloat16)
    runner = CudaGraphRunner(inspect_model(model))
    tree = Tree(BUSHY, 3)
    run = Run(runner, (21,)).prefill()
    apart = run.step([tree], row_by_row=True).logits
    for node, branch in enumerate(tree.branches):
        steps = Run(runner, (21,)).prefill()
        for above in branch:
            one = Tree((-1,), 1)
            one.tokens = tree.tokens[above : above + 1]
            result = steps.step([one])
            steps.commit([one], [[0]], result)
        assert torch.equal(result.logits[0, 0], apart[0, node]), node


def test_a_second_call_of_generate_records_nothing_anew() -> None:
    model = copy.deepcopy(build("llama"))
    runner = open_runner(model, "cuda_graphs")
    ids = torch.tensor(prompts(FIVE[:1]))
    first = generate(model, ids, runner=runner, max_new_tokens=NEW).sequences
    recorded = passes(runner).recorded
    same(generate(model, ids, runner=runner, max_new_tokens=NEW).sequences, first)
    assert passes(runner).recorded == recorded > 0
