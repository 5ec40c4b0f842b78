"""Stock models are recognised; altered ones give Hugging Face's text and are refused by runners with own layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from few import few
from generate_driver import left_pad, prompts
from torch import nn
from transformers import LlamaForCausalLM

import draftree
from draftree.runner import open_runner
from draftree.runner.weights.stock import alteration

IDS, MASK = left_pad(prompts())


def fresh(family: str = "llama") -> Any:
    return copy.deepcopy(zoo.build(family))


def stock_text(model: Any) -> list[list[int]]:
    found: list[list[int]] = model.generate(IDS, attention_mask=MASK, max_new_tokens=12, do_sample=False).tolist()
    return found


def text(model: Any, drafter: Any = None) -> list[list[int]]:
    found: list[list[int]] = draftree.generate(model, IDS, MASK, drafter=drafter, max_new_tokens=12).sequences.tolist()
    return found


class Doubled(nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2 + 0.1


class Own(LlamaForCausalLM):
    """A class of the user's own."""

    def forward(self, *args: Any, **options: Any) -> Any:
        out = super().forward(*args, **options)
        out.logits = out.logits + torch.arange(out.logits.shape[-1]) * 0.05
        return out


def steered(model: Any) -> Any:
    vector = torch.randn(64, generator=torch.Generator().manual_seed(0))
    model.model.layers[1].mlp.register_forward_hook(lambda module, given, out: out + vector)
    return model


def replaced_method(model: Any) -> Any:
    usual = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: usual(x) * -1.5
    return model


def replaced_module(model: Any) -> Any:
    old = model.lm_head
    model.lm_head = Doubled(old.in_features, old.out_features, bias=False)
    model.lm_head.weight = nn.Parameter(old.weight.detach().flip(0))
    return model


def own_class(model: Any) -> Any:
    own = Own(model.config).eval()
    own.load_state_dict(model.state_dict())
    return own


def with_adapter(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


ALTERATIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hook": (steered, "has hooks"),
    "method": (replaced_method, "has a forward of its own"),
    "module": (replaced_module, "is a Doubled"),
    "class": (own_class, "Own is no class of transformers"),
    "adapter": (with_adapter, "is a LoraModel|is a Linear"),
}


@pytest.mark.parametrize("name", ALTERATIONS)
def test_altered_models_answer_as_they_are(name: str) -> None:
    before = stock_text(fresh())
    model = ALTERATIONS[name][0](fresh())
    expected = stock_text(model)
    assert expected != before
    for drafter in (None, draftree.Lookahead()):
        assert text(model, drafter) == expected
    with pytest.raises(ValueError, match=r"drives stock models alone, and .*: use runner='hooked' or runner='auto'\.$"):
        open_runner(model, "eager")
    with pytest.raises(ValueError, match=ALTERATIONS[name][1]):
        open_runner(model, "eager")


@pytest.mark.parametrize("name", ["hook", "adapter"])
def test_models_that_are_altered_between_two_texts(name: str) -> None:
    """As where activations are steered, or training of an adapter begins."""
    model = fresh()
    before = text(model, draftree.Lookahead())
    altered = ALTERATIONS[name][0](model)
    expected = stock_text(altered)
    assert text(altered, draftree.Lookahead()) == expected != before
    if name == "hook":
        model.model.layers[1].mlp._forward_hooks.clear()
        assert text(model) == before


@pytest.mark.parametrize("family", ["llama", "gemma3", "t5"])
def test_stock_models_are_known(family: str) -> None:
    model = fresh(family)
    assert alteration(model) is None
    model(IDS[:1], **({"decoder_input_ids": IDS[:1]} if family == "t5" else {}), output_hidden_states=True)
    assert alteration(model) is None, "transformers has put hooks there that look on"
    if family != "t5":
        draftree.pack_weights(model)
        assert alteration(model) is None


def test_layers_that_were_taken_out() -> None:
    model = fresh()
    before = text(model)
    model.model.layers = model.model.layers[:3]
    with pytest.raises(ValueError, match=r"set config\.num_hidden_layers"):
        text(model)
    model.config.num_hidden_layers = 3
    assert text(model, draftree.Lookahead()) == stock_text(model) != before


@pytest.mark.parametrize("name", few([*zoo.MEMBERS], [*zoo.MEMBERS][::3]))
def test_members_of_the_zoo_are_stock(name: str) -> None:
    assert alteration(zoo.build(name)) is None


def test_a_model_compiled_by_torch_is_stock() -> None:
    model = fresh()
    model.compile(backend="eager")
    assert alteration(model) is None
