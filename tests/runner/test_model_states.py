"""Models in states that their users put them into: quantised, offloaded, made or used in one of torch's modes.

Whatever a runner cannot drive as quickly goes through the hooked one, and the text is that of no drafter.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from few import crossed
from generate_driver import copy_of, left_pad, prompts
from torch import Tensor, nn
from transformers import LogitsProcessor

import draftree
from draftree.drafting.folder import base_of
from draftree.engine import generate
from draftree.runner import inspect_model, open_runner

NEW = 12
IDS, MASK = left_pad(prompts())
DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda model: None,
    "lookahead": lambda model: draftree.Lookahead(),
    "medusa": lambda model: draftree.Medusa.fresh(model),
}


def ask(model: Any, drafter: str = "none", **options: Any) -> list[list[int]]:
    settings = {"max_new_tokens": NEW, "eos_token_id": None} | options
    found: list[list[int]] = generate(model, IDS, MASK, drafter=DRAFTERS[drafter](model), **settings).sequences.tolist()
    return found


def by_torchao(model: Any) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def by_quanto(model: Any) -> Any:
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(model, weights=quanto.qint8, exclude="lm_head")
    quanto.freeze(model)
    return model


def by_bitsandbytes(model: Any) -> Any:
    """LLM.int8 without its outliers, which depend on all rows of a pass together."""
    bits = pytest.importorskip("bitsandbytes")
    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is nn.Linear and linear is not model.get_output_embeddings():
                made = bits.nn.Linear8bitLt(
                    linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False
                )
                made.load_state_dict(linear.state_dict())
                setattr(parent, name, made.to("cpu"))
    return model


@pytest.mark.parametrize(
    ("library", "family", "drafter"), crossed([by_torchao, by_quanto, by_bitsandbytes], ["demo", "qwen2"], [*DRAFTERS])
)
def test_weights_of_8_bits(library: Callable[[Any], Any], family: str, drafter: str) -> None:
    """`make test-8bit` has the libraries."""
    model = library(copy_of(family))
    assert open_runner(model).name == ("cpu" if library is by_torchao else "hooked")
    assert ask(model, drafter) == ask(model, runner="hooked")
    assert base_of(model).hash != base_of(copy_of(family)).hash


@pytest.mark.parametrize(
    ("where", "family", "drafter"), crossed(["cpu", "disk"], ["llama", "gpt2", "bloom", "bart"], [*DRAFTERS])
)
def test_offloaded_models(where: str, family: str, drafter: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    expected, model, device = ask(copy_of(family), runner="hooked"), copy_of(family), torch.device("cpu")
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device=device)
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device=device)
    assert all(p.is_meta for p in model.parameters())
    assert inspect_model(model).device == device
    assert ask(model, drafter) == expected


def test_an_offloaded_model_may_take_a_drafter_that_is_not_checked(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = copy_of("demo")
    draftree.demo_drafter("medusa", model).save_pretrained(tmp_path)
    expected = ask(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="same_weights=False"):
        draftree.load_drafter(tmp_path, model)
    drafter = draftree.load_drafter(tmp_path, model, same_weights=False)
    out = generate(model, IDS, MASK, drafter=drafter, max_new_tokens=NEW, eos_token_id=None)
    assert out.sequences.tolist() == expected


@pytest.mark.parametrize(("choice", "drafter"), crossed(["auto", "hooked"], DRAFTERS))
def test_one_engine_in_and_out_of_inference_mode(drafter: str, choice: str) -> None:
    model = copy_of("demo")
    made = DRAFTERS[drafter](model)
    options: dict[str, Any] = {"drafter": made, "runner": choice, "max_new_tokens": NEW, "eos_token_id": None}
    expected = ask(model)
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            assert generate(model, IDS, MASK, **options).sequences.tolist() == expected


@pytest.mark.parametrize(
    ("family", "drafter", "choice"),
    [
        *crossed(["demo", "gpt2", "t5-gated"], [*DRAFTERS], ["auto", "hooked"]),
        ("demo", "lookahead", "eager"),
        ("demo", "none", "cuda_graphs"),
    ],
)
def test_autocast_changes_no_text(family: str, drafter: str, choice: str) -> None:
    """Steps run in the model's own type."""
    model = copy_of(family)
    expected = ask(model, runner=choice)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ask(copy_of(family), drafter, runner=choice) == expected
        assert ask(model, drafter, runner=choice) == expected
    assert ask(model, drafter, runner=choice) == expected


@pytest.mark.parametrize("choice", ["auto", "hooked"])
def test_processors_get_usual_tensors_without_gradients(choice: str) -> None:
    """They may keep such tensors and train on them, as in Hugging Face's own loop."""
    model, kept, table = copy_of("demo"), [], nn.Embedding(5000, 4)

    class Keeping(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            assert not torch.is_grad_enabled()
            assert not scores.is_inference()
            kept.append(input_ids)
            return scores

    loop = draftree.custom_generate(runner=choice)
    model.generate(IDS[-1:], custom_generate=loop, max_new_tokens=4, logits_processor=[Keeping()])
    assert kept
    for tensor in kept:
        table(tensor).sum().backward()


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", ["demo", "gemma3"])
def test_training_leaves_nothing_behind(family: str, drafter: str) -> None:
    """In training mode without dropout, with gradients on and half of a step behind: the text, and no graph."""
    model = copy_of(family)
    expected = ask(model)
    model.train()
    model(input_ids=IDS).logits.sum().backward()
    with torch.enable_grad():
        out = generate(model, IDS, MASK, drafter=DRAFTERS[drafter](model), max_new_tokens=NEW, eos_token_id=None)
    assert out.sequences.tolist() == expected
    assert not out.sequences.requires_grad
    assert model.training
