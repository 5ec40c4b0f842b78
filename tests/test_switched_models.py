"""Models whose hooks, adapters or modules are exchanged between two texts, so that little or nothing of it shows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from generate_driver import prompts
from test_altered_models import fresh, layer, louder, stock_text, text
from torch import nn

import draftree
from draftree.runner import anatomy_of
from draftree.runner.weights.stock import alteration


def test_a_hook_in_place_of_another_is_seen() -> None:
    """The second one lies where the first one lay, and does something else."""
    model, ids = fresh(), prompts((24,))[0]

    def scaled(factor: float) -> Callable[..., Any]:
        return lambda module, inputs, output: output * factor

    handle = layer(model).mlp.register_forward_hook(scaled(1.5))
    with draftree.Engine(model, slots=1, keep_prefixes=True) as engine:
        engine.add(ids, max_new_tokens=4)
        engine.run()
        handle.remove()
        del handle
        layer(model).mlp.register_forward_hook(scaled(-0.5))
        with pytest.raises(ValueError, match="has changed"):
            engine.add(ids, max_new_tokens=4)
    assert text(model, "lookahead") == stock_text(model)


class Switched(nn.Linear):
    """As an adapter has it: what it does depends on private settings."""

    _active: str = "plain"

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__(whole.in_features, whole.out_features, bias=False)
        self.weight, self._active, self.scaling = whole.weight, "plain", {"plain": 1.0, "turned": -1.5}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scaling[self._active]


@pytest.mark.parametrize("change", ["switch", "scaling"])
def test_a_switched_adapter_is_seen(change: str) -> None:
    model, ids = fresh(), prompts((24,))[0]
    adapter = layer(model).mlp.down_proj = Switched(layer(model).mlp.down_proj)
    with draftree.Engine(model, slots=1, keep_prefixes=True) as engine:
        engine.add(ids, max_new_tokens=4)
        engine.run()
        if change == "switch":
            adapter._active = "turned"
        else:
            adapter.scaling["plain"] = -1.5
        with pytest.raises(ValueError, match="has changed"):
            engine.add(ids, max_new_tokens=4)
    assert text(model, "lookahead") == stock_text(model)


def test_a_packed_linear_with_a_method_or_a_bias_of_ones_own_is_altered() -> None:
    model = fresh()
    draftree.pack_weights(model)
    assert alteration(model) is None
    linear = layer(model).mlp.down_proj
    linear.forward = louder(linear.forward)
    assert alteration(model) is not None
    assert text(model, "lookahead") == stock_text(model)
    del linear.forward
    assert alteration(model) is None
    layer(model).self_attn.k_proj.bias = nn.Parameter(torch.ones(layer(model).self_attn.k_proj.out_features))
    assert alteration(model) is not None
    assert text(model, "lookahead") == stock_text(model)


def test_training_and_pruning_see_a_replaced_module() -> None:
    model = fresh()
    assert anatomy_of(model).closing[0] is model.model.norm
    model.model.norm = copy.deepcopy(model.model.norm)
    assert anatomy_of(model).closing[0] is model.model.norm
