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
from draftree.drafting import DraftModel, Lookahead, PromptLookup

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
