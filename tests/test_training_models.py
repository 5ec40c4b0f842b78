"""Models in states that trainings have to bear or to refuse: packed, adapted, frozen, quantised, in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_training import OPTIONS, zoo_data
from torch import nn
from zoo import MEMBERS, construct

import draftree
from draftree.training.align import align
from draftree.training.early_exit import train_early_exit

__all__ = ["zoo_data"]
Case = tuple[Any, Path]


class Adapted(nn.Module):
    """Stands for a linear with PEFT's LoRA, which gives the tensors other names."""

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
def test_what_cannot_be_trained_whole_is_refused(
    change: Callable[[Any], Any], sentence: str, zoo_data: Case, tmp_path: Path
) -> None:
    large, data = zoo_data
    model = construct(MEMBERS["llama"])
    change(model)
    with pytest.raises(ValueError, match=sentence):
        train_early_exit(model, data, tmp_path / "out", 1, options=OPTIONS)
    with pytest.raises(ValueError, match=sentence):
        align(large, model, data, tmp_path / "out", options=OPTIONS)
    assert not (tmp_path / "out").exists(), "before any work"
