"""Threads share one model and one drafter."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from few import crossed
from generate_driver import OF_DEMO, copy_of, prompts
from runner_driver import one_thread  # noqa: F401

import draftree
from draftree.runner import open_runner

THREADS, NEW = 8, 16
PROMPTS = [torch.tensor([prompt]) for prompt in prompts()]


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    """Let threads take turns far more often than by default, so that what can meet does meet."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def ours(model: Any, prompt: Any, drafter: Any = None, runner: str = "auto") -> list[int]:
    out = draftree.generate(model, prompt, drafter=drafter, max_new_tokens=NEW, runner=runner)
    found: list[int] = out.sequences[0].tolist()
    return found


def small(model: Any) -> Any:
    return draftree.DraftModel(copy.deepcopy(model))


DRAFTERS: dict[str, Callable[[Any], Any]] = {
    **OF_DEMO,
    "draft-model": small,
    "merge": lambda model: draftree.Merge([draftree.Lookahead(), draftree.demo_drafter("medusa", model)]),
}


@pytest.mark.parametrize(("name", "runner"), crossed(DRAFTERS, ["auto", "hooked"]))
def test_one_drafter_in_eight_threads(name: str, runner: str) -> None:
    model = copy_of("demo")
    expected = [ours(model, prompt) for prompt in PROMPTS]
    drafter = DRAFTERS[name](model)
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda prompt: ours(model, prompt, drafter, runner), PROMPTS * 2))
    assert found == expected * 2


def test_logits_of_states_wait_for_the_pass_of_another_thread() -> None:
    """Its hooks cut what the model's head reads to the rows whose logits the pass returns."""
    model = copy_of("demo")
    runner = open_runner(model, "hooked")
    states = torch.randn(1, 3, model.config.hidden_size)
    expected = runner.logits(states)
    with ThreadPoolExecutor(1) as pool:
        asked: list[Future[torch.Tensor]] = []

        def ask(*_: Any) -> None:
            if not asked:
                asked.append(pool.submit(runner.logits, states))
                wait(asked, timeout=1)

        model.model.norm.register_forward_pre_hook(ask)
        ours(model, PROMPTS[0], runner="hooked")
        assert torch.equal(asked[0].result(), expected)


def test_shapes_pruners_runners_and_recorders_are_shared_as_well() -> None:
    model = copy_of("demo")
    expected = [ours(model, prompt) for prompt in PROMPTS]
    head = draftree.demo_early_head(model)
    shared = {
        "drafter": draftree.Merge([draftree.Lookahead(), draftree.demo_drafter("medusa", model)]),
        "shape": draftree.DynamicTree(),
        "pruner": draftree.EarlyPruning(head, always=True),
        "recorder": draftree.Recorder(),
        "runner": open_runner(model, "hooked"),
    }

    def call(prompt: torch.Tensor) -> list[int]:
        found: list[int] = draftree.generate(model, prompt, max_new_tokens=NEW, **shared).sequences[0].tolist()
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(call, PROMPTS * 3)) == expected * 3
