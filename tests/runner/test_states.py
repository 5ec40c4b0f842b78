"""Models in other states than fp32 as built: 16 bits, tied weights, wrapped, given their own device maps."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from runner_driver import BUSHY, Run, Tree, one_thread, prune, runners_for  # noqa: F401

from draftree.engine import generate
from draftree.runner import open_runner
from draftree.runner.eager.runner import EagerRunner
from draftree.runner.hooked.runner import HookedRunner
from draftree.runner.target import inspect_model

SIXTEEN_BIT = ("llama", "gemma3", "gpt2", "falcon-alibi", "mpt", "gpt_neo", "t5", "umt5", "bart", "phi3-longrope")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("member", SIXTEEN_BIT)
def test_16_bit(member: str, dtype: torch.dtype) -> None:
    """Within rounding of the stock model in the same type, and no further from it than it is from fp32."""
    model = copy.deepcopy(zoo.build(member)).to(dtype)
    for runner in runners_for(model):
        run, bushy = Run(runner).prefill(), Tree(BUSHY, 2)
        result = run.step([bushy])
        assert result.logits.dtype == dtype
        stock = run.stock(0, bushy).float()
        exact = Run(HookedRunner(inspect_model(zoo.build(member)))).prefill().stock(0, bushy)
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
    plain = Run(HookedRunner(inspect_model(zoo.build("llama")))).prefill()
    bushy = Tree(BUSHY, 2)
    for runner in runners_for(wrapped):
        run = Run(runner).prefill()
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


def test_injected_adapters_take_effect_on_every_runner() -> None:
    model = copy.deepcopy(zoo.build("llama"))
    for layer in model.model.layers:
        layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
    plain, bushy = Run(HookedRunner(inspect_model(zoo.build("llama")))).prefill(), Tree(BUSHY, 2)
    for runner in runners_for(model):
        run = Run(runner).prefill()
        result = run.step([bushy])
        assert run.error([bushy], result) < 1e-4
        assert plain.error([bushy], result) > 1e-2


def _is_plain(model: Any) -> bool:
    return EagerRunner.qualifies(inspect_model(model))


def test_the_eager_runner_takes_stock_models_only() -> None:
    model = copy.deepcopy(zoo.build("llama"))
    assert _is_plain(model)
    with torch.no_grad():
        model(torch.tensor([[1, 2]]), output_hidden_states=True)  # leaves hooks of transformers behind
    assert _is_plain(model)
    handle = model.model.layers[0].register_forward_hook(lambda module, args, output: output)
    assert not _is_plain(model)
    handle.remove()
    model.model.layers[0].mlp.up_proj = Lora(model.model.layers[0].mlp.up_proj)
    assert not _is_plain(model)


def test_a_runner_serves_as_long_as_the_model_stays_as_it_is() -> None:
    changes: list[Callable[[Any], Any]] = [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.load_state_dict({name: 2 * weight for name, weight in zoo.build("mistral").state_dict().items()}),
        lambda m: m.model.layers[2].mlp.up_proj.weight.detach().mul_(2),
        lambda m: m.model.layers[1].register_forward_pre_hook(lambda module, args: None),
        lambda m: setattr(m.model.layers[0].mlp, "up_proj", Lora(m.model.layers[0].mlp.up_proj)),
    ]
    for change in changes:
        model = copy.deepcopy(zoo.build("llama"))
        runner = open_runner(model)
        assert open_runner(model) is runner
        assert open_runner(model, "cpu") is runner
        assert open_runner(model, "hooked") is open_runner(model, "hooked") is not runner
        change(model)
        assert open_runner(model) is not runner


def test_a_model_that_can_no_longer_be_driven_is_refused() -> None:
    model = copy.deepcopy(zoo.build("llama"))
    open_runner(model)
    with pytest.raises(ValueError, match="meta device"):
        open_runner(model.to("meta"))


def test_auto_takes_the_runner_that_is_open_already() -> None:
    """A runner may hold a copy of the weights: one is enough."""
    model = copy.deepcopy(zoo.build("llama"))
    runner = open_runner(model, "cpu")
    assert open_runner(model, "auto") is runner


def test_a_model_that_calls_its_cache_as_older_code_does() -> None:
    """Transformers before 5.24, and code that comes with weights, say past_key_values."""
    model = copy.deepcopy(zoo.build("llama"))
    ids = torch.arange(2, 9)[None]
    expected = generate(zoo.build("llama"), ids, max_new_tokens=8, runner="hooked").sequences
    stock, seen = type(model).forward, []
    name = inspect_model(model).cache_argument

    def forward(
        self: Any, input_ids: Any = None, position_ids: Any = None, past_key_values: Any = None, **given: Any
    ) -> Any:
        seen.append(past_key_values)
        return stock(self, input_ids, position_ids=position_ids, **{name: past_key_values}, **given)

    class Older(type(model)):  # type: ignore[misc]
        """As a user's own code has it."""

    Older.forward = forward
    model.__class__ = Older
    assert inspect_model(model).cache_argument == "past_key_values"
    assert torch.equal(generate(model, ids, max_new_tokens=8, runner="hooked").sequences, expected)
    assert seen[-1] is not None
