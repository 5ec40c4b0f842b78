"""The memory of a model is free when its last reference goes, without Python's garbage collection.

A full memory of a GPU or a machine does not make Python collect.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from generate_driver import prompts
from zoo import build

import draftree
from draftree import runner as runners
from draftree.drafting import DraftModel, Lookahead, PromptLookup
from draftree.runner import open_runner

DRAFTERS = {
    "none": lambda model: None,
    "trie": lambda model: Lookahead(),
    "lookup": lambda model: PromptLookup(),
    "draft-model": lambda model: DraftModel(copy.deepcopy(model)),
    "medusa": lambda model: draftree.Medusa.fresh(model, heads=2),
}


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.filterwarnings("ignore:The small model is no smaller")
@pytest.mark.parametrize(
    ("name", "runner", "drafter"),
    [
        ("llama", "cpu", "trie"),
        ("llama", "cpu", "medusa"),
        ("llama", "eager", "none"),
        ("llama", "hooked", "lookup"),
        ("llama", "cuda_graphs", "none"),
        ("llama", "cuda_graphs", "draft-model"),
        ("gpt2", "auto", "trie"),
        ("t5", "auto", "lookup"),
        ("t5", "hooked", "none"),
    ],
)
def test_a_deleted_model_leaves_nothing(name: str, runner: str, drafter: str) -> None:
    model = copy.deepcopy(build(name))
    alive = [weakref.ref(parameter) for parameter in model.parameters()]
    ids = torch.tensor(prompts((9,)))
    made: Any = DRAFTERS[drafter](model)
    draftree.generate(model, ids, torch.ones_like(ids), drafter=made, max_new_tokens=6, runner=runner)
    del model, made
    assert not any(parameter() is not None for parameter in alive)


@pytest.mark.usefixtures("no_collection")
def test_copies_of_old_weights_are_freed_before_new_ones_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(build("llama"))
    old = [weakref.ref(open_runner(model, choice)) for choice in ("auto", "eager")]
    assert all(runner() is not None for runner in old)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    choose, left = runners.choose, []

    def choosing(*given: Any) -> Any:
        left.extend(runner() for runner in old)
        return choose(*given)

    monkeypatch.setattr(runners, "choose", choosing)
    assert open_runner(model, "auto").name == "cpu"
    assert left == [None, None]
