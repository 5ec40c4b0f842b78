"""Models that cannot be driven are refused at once, in one sentence that says what to do."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import zoo
from runner_driver import Run, Tree, one_thread  # noqa: F401
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    EncoderDecoderConfig,
    EncoderDecoderModel,
)

from draftree.drafting.base import Place, RequestState, Step
from draftree.engine import Engine, generate
from draftree.runner import open_runner
from draftree.runner.cpu import t5
from draftree.runner.hooked.runner import HookedRunner
from draftree.runner.plan import PassResult
from draftree.runner.target import inspect_model
from draftree.tree import TokenTree


def _message(model: Any, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        inspect_model(model)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    assert len(message) < 300
    return message


@pytest.mark.parametrize("member", [m.id for m in zoo.REFUSED])
def test_recurrent_families(member: str) -> None:
    message = _message(zoo.build(member), ValueError)
    assert "recurrent state" in message
    assert zoo.MEMBERS[member].model_type in message


def test_layers_of_an_unknown_type() -> None:
    model = copy.deepcopy(zoo.build("gemma3"))
    model.config.layer_types = ["full_attention", "spiral_attention"] * 2
    assert "spiral_attention" in _message(model, ValueError)


def test_meta_device() -> None:
    config = AutoConfig.for_model("llama", **zoo.LLAMA_LIKE)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert "meta device" in _message(model, ValueError)


def test_no_language_model_head() -> None:
    config = AutoConfig.for_model("llama", **zoo.LLAMA_LIKE)
    assert "AutoModelForCausalLM" in _message(AutoModel.from_config(config), TypeError)


def test_a_masked_language_model() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    assert "writes text" in _message(BertForMaskedLM(BertConfig(vocab_size=97, **sizes)), TypeError)


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_attention_without_explicit_masks(attention: str) -> None:
    model = copy.deepcopy(zoo.build("llama"))
    model.config._attn_implementation_internal = attention  # what loading with it would leave, kernel or not
    message = _message(model, ValueError)
    assert attention in message
    assert "attn_implementation='sdpa'" in message


@pytest.mark.parametrize(
    ("member", "settings", "advice"),
    [
        ("gemma", {"use_bidirectional_attention": True}, "attn_implementation='eager'"),
        ("gemma3", {"use_bidirectional_attention": True}, "Hugging Face's generate"),
        ("llama", {"is_causal": False}, "Hugging Face's generate"),
    ],
)
def test_prompts_that_are_read_both_ways(member: str, settings: dict[str, Any], advice: str) -> None:
    message = _message(zoo.construct(zoo.MEMBERS[member], **settings), ValueError)
    assert "both ways" in message
    assert advice in message


@pytest.mark.parametrize(
    ("name", "noise"),
    [
        ("falcon", {"hidden_dropout": 0.3}),
        ("bloom", {"hidden_dropout": 0.3}),
        ("starcoder2", {"attention_dropout": 0.0, "residual_dropout": 0.3}),
        ("gpt_bigcode", {"attn_pdrop": 0.3, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
        ("mixtral", {"router_jitter_noise": 0.3}),
    ],
)
def test_noise_of_training_under_every_name(name: str, noise: dict[str, float]) -> None:
    model = zoo.construct(zoo.MEMBERS[name], **noise)
    open_runner(model)
    with pytest.raises(ValueError, match="training mode and uses dropout"):
        generate(model.train(), torch.tensor([[5, 9, 3]]), max_new_tokens=2)


def test_architectures_that_fail_in_a_pass() -> None:
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    one, other = BertConfig(**sizes), BertConfig(**sizes, is_decoder=True, add_cross_attention=True)
    both = EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(one, other))
    assert "no list of its decoder layers" in _message(both, ValueError)
    for family, settings in (("openai-gpt", zoo.GPT_LIKE), ("cpmant", zoo.LLAMA_LIKE | {"dim_head": 16, "dim_ff": 50})):
        config = AutoConfig.for_model(family, **settings)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with pytest.raises(ValueError, match="cannot be driven as draftree tries it"):
            open_runner(model)


def test_drafters_that_read_one_hidden_state_a_row() -> None:
    runner = HookedRunner(inspect_model(zoo.build("llama")))
    hidden = torch.zeros(4, 1, 3, 64)
    request = RequestState(0, [1], 1, 9, place=Place(runner, runner.new_cache(1), None, 0))
    result = PassResult(hidden, [], {4: hidden}, runner)
    step = Step([request], TokenTree.roots(torch.tensor([1])), result, [0], 0)
    with pytest.raises(ValueError, match="several hidden states a row"):
        step.own_logits(4, [[0]])


def test_activations_quantised_per_tensor() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao says where its successor lives
        model = torch.ao.quantization.quantize_dynamic(copy.deepcopy(zoo.build("llama")), {nn.Linear})
    assert "weight-only" in _message(model, ValueError)


@pytest.mark.parametrize("thing", [None, "gpt2", nn.Linear(2, 2), nn.Transformer(8, 2, 1, 1, 8)], ids=str)
def test_not_a_hugging_face_model(thing: Any) -> None:
    assert "draftree drives Hugging Face models" in _message(thing, TypeError)


def test_prompt_learning_adapters() -> None:
    class Adapter:
        is_prompt_learning, peft_type = True, "PREFIX_TUNING"

    model = copy.deepcopy(zoo.build("llama"))
    model.peft_config = {"default": Adapter()}
    assert "PREFIX_TUNING" in _message(model, ValueError)


def test_gradient_checkpointing_while_training() -> None:
    model = zoo.construct(zoo.MEMBERS["llama"])
    run, tree = Run(HookedRunner(inspect_model(model))).prefill(), Tree.random(4, 1)
    model.train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # its name changed
    with pytest.raises(ValueError, match="drops the cache"):
        run.step([tree])
    model.eval()  # checkpointing rests outside training
    assert run.error([tree], run.step([tree])) < 1e-4


def test_a_model_that_is_gone() -> None:
    model = zoo.construct(zoo.MEMBERS["llama"])
    runner = HookedRunner(inspect_model(model))
    del model
    with pytest.raises(RuntimeError, match="keep a reference"):
        Run(runner).prefill()


@pytest.mark.parametrize("member", ["gpt2", "llama", "t5"])
def test_active_dropout_stops_every_runner(member: str) -> None:
    overrides = {"gpt2": {"resid_pdrop": 0.1}, "llama": {"attention_dropout": 0.1}, "t5": {"dropout_rate": 0.1}}[member]
    model = zoo.construct(zoo.MEMBERS[member], **overrides)
    ids = torch.tensor([[5, 9, 3]])
    generate(model, ids, max_new_tokens=2)
    engine = Engine(model)
    model.train()
    with pytest.raises(ValueError, match=r"dropout.*model\.eval\(\)"):
        generate(model, ids, max_new_tokens=2)
    if member != "t5":
        with pytest.raises(ValueError, match=r"dropout.*model\.eval\(\)"):
            engine.add([5, 9, 3], max_new_tokens=2)


def test_a_runner_of_another_model_is_refused() -> None:
    one, other = zoo.build("llama"), copy.deepcopy(zoo.build("llama"))
    runner, ids = open_runner(one), torch.tensor([[5, 9, 3]])
    with pytest.raises(ValueError, match="opened for another model"):
        generate(other, ids, runner=runner, max_new_tokens=2)
    with pytest.raises(ValueError, match="opened for another model"):
        Engine(other, runner=runner)
    generate(one, ids, runner=runner, max_new_tokens=2)


def test_a_t5_that_is_too_large_to_copy_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(t5, "may_copy", lambda *args, **kwargs: False)
    with pytest.raises(ValueError, match="too little free memory"):
        open_runner(copy.deepcopy(zoo.build("t5")), "cpu")
    assert open_runner(copy.deepcopy(zoo.build("t5"))).name == "hooked"
