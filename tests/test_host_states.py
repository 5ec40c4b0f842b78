"""Models in other states than fp32 as built: 16 bits, tied weights, wrapped, given their own device maps."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from host_driver import BUSHY, Run, Tree, hosts_for, one_thread, prune  # noqa: F401

from draftree.host import open_host
from draftree.host.hooked import HookedHost
from draftree.host.loop import LoopHost
from draftree.host.target import inspect_model

SIXTEEN_BIT = ("llama", "gemma3", "gpt2", "falcon-alibi", "mpt", "gpt_neo", "t5", "umt5", "bart", "phi3-longrope")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("member", SIXTEEN_BIT)
def test_16_bit(member: str, dtype: torch.dtype) -> None:
    """Within rounding of the stock model in the same type, and no further from it than it is from fp32."""
    model = copy.deepcopy(zoo.build(member)).to(dtype)
    for host in hosts_for(model):
        run, bushy = Run(host).prefill(), Tree(BUSHY, 2)
        result = run.step([bushy])
        assert result.logits.dtype == dtype
        stock = run.stock(0, bushy).float()
        exact = Run(HookedHost(inspect_model(zoo.build(member)))).prefill().stock(0, bushy)
        ours = (result.logits[0].float() - stock).pow(2).mean().sqrt()
        rounding = (stock - exact).pow(2).mean().sqrt()
        assert ours <= 2 * rounding
        assert rounding < 0.05 * exact.std()
        kept = [0, 1, 2, 4, 7, 10]
        cut = run.step([bushy], surgeries=prune(2, torch.tensor([kept])))
        assert (cut.logits[0].float() - stock[kept]).pow(2).mean().sqrt() <= 2 * rounding


def test_a_compiled_wrapper_is_driven_by_the_model_inside() -> None:
    model = zoo.build("llama")
    compiled: Any = torch.compile(model, backend="eager")
    assert inspect_model(compiled).model is model


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_lora() -> None:
    from peft import LoraConfig, get_peft_model

    model = copy.deepcopy(zoo.build("llama"))
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    wrapped.eval()
    plain = Run(HookedHost(inspect_model(zoo.build("llama")))).prefill()
    bushy = Tree(BUSHY, 2)
    for host in hosts_for(wrapped):
        run = Run(host).prefill()
        result = run.step([bushy])
        assert run.error([bushy], result) < 1e-4
        assert plain.error([bushy], result) > 1e-2  # the adapter does something


class Lora(torch.nn.Module):
    """What an injected adapter does to a linear."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.base = base
        self.down = torch.nn.Parameter(torch.randn(4, base.in_features, generator=generator) / 8)
        self.up = torch.nn.Parameter(torch.randn(base.out_features, 4, generator=generator) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def test_injected_adapters_take_effect_on_every_host() -> None:
    model = copy.deepcopy(zoo.build("llama"))
    for layer in model.model.layers:
        layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
    plain, bushy = Run(HookedHost(inspect_model(zoo.build("llama")))).prefill(), Tree(BUSHY, 2)
    for host in hosts_for(model):
        run = Run(host).prefill()
        result = run.step([bushy])
        assert run.error([bushy], result) < 1e-4
        assert plain.error([bushy], result) > 1e-2


def _has_loop(model: Any) -> bool:
    return LoopHost.qualifies(inspect_model(model))


def test_the_loop_host_takes_stock_models_only() -> None:
    model = copy.deepcopy(zoo.build("llama"))
    assert _has_loop(model)
    with torch.no_grad():
        model(torch.tensor([[1, 2]]), output_hidden_states=True)  # leaves hooks of transformers behind
    assert _has_loop(model)
    handle = model.model.layers[0].register_forward_hook(lambda module, args, output: output)
    assert not _has_loop(model)
    handle.remove()
    model.model.layers[0].mlp.up_proj = Lora(model.model.layers[0].mlp.up_proj)
    assert not _has_loop(model)


def test_a_host_serves_as_long_as_the_model_stays_as_it_is() -> None:
    changes: list[Callable[[Any], Any]] = [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.load_state_dict(zoo.build("mistral").state_dict()),
        lambda m: m.model.layers[2].mlp.up_proj.weight.detach().mul_(2),
        lambda m: m.model.layers[1].register_forward_pre_hook(lambda module, args: None),
        lambda m: setattr(m.model.layers[0].mlp, "up_proj", Lora(m.model.layers[0].mlp.up_proj)),
        lambda m: m.set_attn_implementation("eager"),
    ]
    for change in changes:
        model = copy.deepcopy(zoo.build("llama"))
        host = open_host(model)
        assert open_host(model) is host
        assert open_host(model, "loop") is host
        assert open_host(model, "hooked") is open_host(model, "hooked") is not host
        change(model)
        assert open_host(model) is not host


def test_a_model_that_can_no_longer_be_driven_is_refused() -> None:
    model = copy.deepcopy(zoo.build("llama"))
    open_host(model)
    with pytest.raises(ValueError, match="meta device"):
        open_host(model.to("meta"))


def test_auto_takes_the_host_that_is_open_already() -> None:
    """A loop host may hold a copy of the weights: one is enough."""
    model = copy.deepcopy(zoo.build("llama"))
    host = open_host(model, "loop")
    assert open_host(model, "auto") is host
