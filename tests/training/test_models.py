"""Training of packed, adapted, frozen, quantised and 16-bit models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from few import few
from torch import nn
from training_driver import METHODS, OPTIONS, data_for, zoo_data
from zoo import MEMBERS, construct

import draftree
from draftree.training.align import align
from draftree.training.run import train

__all__ = ["zoo_data"]
Case = tuple[Any, Path]
Answers = dict[torch.dtype, Case]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Return, by dtype, a tiny llama in 16 bits and its data."""
    models = {dtype: construct(MEMBERS["llama"]).to(dtype) for dtype in (torch.bfloat16, torch.float16)}
    return {d: (model, data_for(model, tmp_path_factory.mktemp("data") / "made")) for d, model in models.items()}


class Adapted(nn.Module):
    """Stand for a linear with PEFT's LoRA."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: Any) -> Any:
        return self.base_layer(x)


Adapted.__module__ = "peft.tuners.lora.layer"


def adapt(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.q_proj = Adapted(attention.q_proj)


def quantise(model: Any) -> None:
    model.hf_quantizer = object()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (draftree.pack_weights, "packed and cannot be trained so: call draftree.unpack_weights"),
        (adapt, r"has an adapter, which a stock Hugging Face folder does not hold.*merge_and_unload"),
        (lambda model: model.requires_grad_(False), r"frozen: call model.requires_grad_\(True\)"),
        (quantise, "quantised and cannot be trained: load it without"),
    ],
    ids=["packed", "adapted", "frozen", "quantised"],
)
def test_models_that_cannot_be_trained_are_refused(
    change: Callable[[Any], Any], sentence: str, zoo_data: Case, tmp_path: Path
) -> None:
    large, data = zoo_data
    model = construct(MEMBERS["llama"])
    change(model)
    with pytest.raises(ValueError, match=sentence):
        align(large, model, data, tmp_path / "out", options=OPTIONS)
    assert not (tmp_path / "out").exists(), "before any work"


@pytest.mark.parametrize(
    ("method", "settings", "dtype", "mixed"),
    few(
        [
            ("medusa", {}, torch.bfloat16, False),
            ("medusa", {"own_head": True}, torch.float16, False),
            ("hidden-transfer", {}, torch.bfloat16, False),
            ("hidden-transfer", {}, torch.float16, False),
            ("bita", {}, torch.float16, True),
            ("bita", {"prompting": "shallow"}, torch.float16, True),
        ],
        [
            ("medusa", {}, torch.bfloat16, False),
            ("hidden-transfer", {}, torch.float16, False),
            ("bita", {}, torch.float16, True),
        ],
    ),
)
def test_drafters_are_trained_for_models_in_16_bits(
    method: str, settings: dict[str, Any], dtype: torch.dtype, mixed: bool, tmp_path: Path, answers: Answers
) -> None:
    model, data = answers[dtype]
    options = replace(OPTIONS, steps=8, evaluations=1, learning_rate=1e-2, bf16=mixed)
    settings = METHODS[method] | settings
    recipe = train(method, model, data, tmp_path, settings=settings, options=options, report=lambda line: None)
    first = json.loads((tmp_path / "curve.json").read_text())["dev_loss"][0][1]
    assert math.isfinite(recipe["dev_loss"])
    assert recipe["dev_loss"] < first or method == "bita", "which takes longer to learn"


def test_a_model_that_cannot_be_moved_stays(zoo_data: Case, tmp_path: Path) -> None:
    """Weights of torchao and models spread by accelerate cannot be moved."""
    _, data = zoo_data
    model = construct(MEMBERS["llama"])

    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError("Couldn't swap Linear.weight")

    model.to = refuse
    recipe = train("medusa", model, data, tmp_path / "out", options=OPTIONS, report=lambda line: None)
    assert recipe["steps"] == OPTIONS.steps
