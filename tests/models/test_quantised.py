"""Quantised checkpoints by the packages that people quantise with: those that run, and those that round activations.

`make test-8bit` has the packages but for gptqmodel, which wants a newer torch: install it with --no-deps for this test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from zoo import MEMBERS, construct

import draftree
from draftree.checkpoints import pretrained
from draftree.runner import open_runner
from draftree.runner.weights.stock import rounding_linear

GROUP = 32
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 8}
IDS = torch.tensor([[5, 17, 60, 33, 5, 17, 60, 8, 41, 22, 5, 17]])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SCHEME = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
GROUPS = {"group_0": {"targets": ["Linear"], "weights": SCHEME}}
FORMATS: dict[str, dict[str, Any]] = {
    "gptq": {"bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, "checkpoint_format": "gptq"},
    "awq": {"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "compressed-tensors": {
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": GROUPS,
    },
    "fp8": {"weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"},
}


def eights(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack numbers of four bits [..., 8 n] into int32 [..., n]."""
    some = numbers.long().unflatten(-1, (-1, 8))
    words = sum(some[..., own] << (4 * place) for place, own in enumerate(order))
    return torch.as_tensor(words).to(torch.int32)


def packed(name: str, weight: Tensor, method: str) -> dict[str, Tensor]:
    """The tensors of a weight [outputs, inputs] in four bits, or in eight for "fp8", as each format stores them."""
    outputs, inputs = weight.shape
    if method == "fp8":
        blocks = weight.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        inverse = blocks.abs().amax((1, 3)) / 448
        held = (blocks / inverse[:, None, :, None]).reshape(outputs, inputs).to(torch.float8_e4m3fn)
        return {f"{name}.weight": held, f"{name}.weight_scale_inv": inverse}
    grouped = weight.unflatten(1, (-1, GROUP))
    scales = grouped.abs().amax(-1) / 7
    numbers = ((grouped / scales[..., None]).round() + 8).flatten(1)
    zeros = torch.full((inputs // GROUP, outputs), 8)
    if method == "compressed-tensors":
        shape = torch.tensor([outputs, inputs])
        found = {"weight_packed": eights(numbers), "weight_scale": scales, "weight_shape": shape}
    elif method == "awq":
        found = {"qweight": eights(numbers.T, AWQ_ORDER), "qzeros": eights(zeros, AWQ_ORDER), "scales": scales.T.half()}
    else:
        of_inputs = {"qweight": eights(numbers).T, "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP}
        found = of_inputs | {"qzeros": eights(zeros - 1), "scales": scales.T.half()}
    return {f"{name}.{part}": tensor.contiguous() for part, tensor in found.items()}


def quantised_folder(method: str, folder: Path) -> None:
    construct(MEMBERS["llama"], **SIZES).save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        part = name.removesuffix(".weight")
        tensors |= packed(part, tensor, method) if part.endswith("_proj") else {name: tensor}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = FORMATS[method] | {"quant_method": method}
    (folder / "config.json").write_text(json.dumps(config))


def drafted_as_by_hugging_face(model: Any, theirs: Any) -> None:
    told: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    expected = theirs.generate(IDS, attention_mask=torch.ones_like(IDS), **told)
    drafter = draftree.Lookahead()
    for _ in range(2):  # The second answer is drafted from the first.
        out = draftree.generate(model, IDS, drafter=drafter, **told)
        assert torch.equal(out.sequences, expected)
    assert out.stats.total.accepted > 8


@pytest.mark.parametrize(
    ("method", "package", "runner"),
    [
        ("gptq", "gptqmodel", "hooked"),
        ("awq", "gptqmodel", "hooked"),
        ("compressed-tensors", "compressed_tensors", "cpu"),  # Unpacked to ordinary weights.
        ("fp8", "accelerate", "cpu"),  # The same.
    ],
)
def test_quantised_folders(method: str, package: str, runner: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    quantised_folder(method, tmp_path)
    model = pretrained(tmp_path, dtype=torch.float32).eval()
    assert open_runner(model).name == (open_runner(construct(MEMBERS["llama"])).name if runner == "cpu" else runner)
    drafted_as_by_hugging_face(model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval())


def by_torchao(name: str, **settings: Any) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    transformers = pytest.importorskip("transformers")
    if name == "IntxWeightOnlyConfig":
        settings = {"weight_dtype": torch.int4, "granularity": quantization.PerGroup(GROUP)}
    return transformers.TorchAoConfig(getattr(quantization, name)(**settings))


def by_quanto(weights: str) -> Any:
    pytest.importorskip("optimum.quanto")
    return pytest.importorskip("transformers").QuantoConfig(weights=weights)


def by_bitsandbytes(**settings: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    return pytest.importorskip("transformers").BitsAndBytesConfig(**settings)


@pytest.mark.parametrize(
    "made", [lambda: by_torchao("IntxWeightOnlyConfig"), lambda: by_quanto("int4"), lambda: by_quanto("int8")]
)
def test_weights_that_are_rounded_alone(made: Callable[[], Any], tmp_path: Path) -> None:
    quantization = made()
    construct(MEMBERS["llama"], **SIZES).save_pretrained(tmp_path)
    given = {"dtype": torch.float32, "quantization_config": quantization}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **given).eval()
    assert open_runner(model).name == "hooked"
    assert rounding_linear(model) is None
    drafted_as_by_hugging_face(model, model)


@pytest.mark.parametrize(
    "made",
    [
        lambda: by_torchao("Int8DynamicActivationInt8WeightConfig"),
        lambda: by_bitsandbytes(load_in_8bit=True),
        lambda: by_bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    ],
)
def test_packages_that_round_activations(made: Callable[[], Any], tmp_path: Path) -> None:
    quantization = made()
    construct(MEMBERS["llama"], **SIZES).save_pretrained(tmp_path)
    given = {"dtype": torch.float32, "quantization_config": quantization}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **given).eval()
    with pytest.raises(ValueError, match=r"This model rounds activations .* quantise the weights alone"):
        open_runner(model)


class Rounded(nn.Linear):
    """Rounds its input to 8 bits, with one scale for all rows."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().max() / 127
        return F.linear((x / scale).round() * scale, self.weight, self.bias)


def test_the_reason_is_that_activations_are_rounded() -> None:
    model = construct(MEMBERS["llama"])
    assert rounding_linear(model) is None
    assert rounding_linear(construct(MEMBERS["qwen2"]).to(torch.bfloat16)) is None, "which has biases"
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = Rounded
    with pytest.raises(ValueError, match=r"rounds activations \(Rounded 'model.layers.0.mlp.down_proj'\)"):
        open_runner(model)
