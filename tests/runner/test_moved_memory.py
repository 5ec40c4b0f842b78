"""Weights whose memory torch moves while requests run, as it does when a model is given to another process.

`share_memory` keeps every number and frees the memory where it lay, also under tensors that share it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from zoo import build

import draftree
from draftree.native import load_library

pytestmark = pytest.mark.skipif(load_library() is None, reason="not built: python hatch_build.py")


def answer(model: Any, *, move: bool) -> list[int]:
    """Of a request that is under way when the model's memory moves, and of one that comes then."""
    engine = draftree.Engine(model, slots=2, drafter=draftree.Jacobi(), runner="cpu")
    source = {"encoder_input": torch.arange(5, 25)} if model.config.is_encoder_decoder else {}
    prompt = [0] if source else list(range(5, 25))
    first = engine.add(prompt, max_new_tokens=30, eos_token_id=None, **source)
    for _ in range(4):
        engine.step()
    assert first.finish_reason is None
    later = []
    if move:
        model.share_memory()
        freed = [torch.full((p.numel(),), 7.0) for p in model.parameters() for _ in range(3)]  # what is freed is used
        later = [engine.add(prompt, max_new_tokens=30, eos_token_id=None, **source)]
        engine.run()
        del freed
    engine.run()
    answers = [[emitted.token for emitted in request.output] for request in (first, *later)]
    assert all(one == answers[0] for one in answers)
    return answers[0]


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_a_running_answer_goes_on(name: str, pack: bool) -> None:
    models = [copy.deepcopy(build(name)) for _ in range(2)]
    for model in models:
        if pack:
            draftree.pack_weights(model)
    still, moved = (answer(model, move=move) for model, move in zip(models, (False, True), strict=True))
    assert moved == still


def test_one_of_t5_goes_on() -> None:
    still, moved = (answer(copy.deepcopy(build("t5")), move=move) for move in (False, True))
    assert moved == still
