"""Weights of 16 bits in a float32 model: held so by the CPU runner, and multiplied as float32.

To the last bit, but in matrix registers, which sum in another order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_driver import hf, prompts
from limited_library import limited_to
from torch import Tensor
from zoo import build

import draftree
from draftree.native import load_library
from draftree.runner import open_runner, pack_weights, unpack_weights
from draftree.runner.weights import packed as packed_weights
from draftree.runner.weights.packed import PackedLinear, in_16_bits, to_packed

pytestmark = pytest.mark.skipif(load_library() is None, reason="not built: python hatch_build.py")
HELD = [torch.bfloat16, torch.float16]


@pytest.fixture
def vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A library that computes in vectors alone."""
    yield from limited_to(16, tmp_path, monkeypatch)


def rounded(name: str, dtype: torch.dtype) -> Any:
    """A float32 model as one is that was loaded from a checkpoint of 16 bits."""
    return copy.deepcopy(build(name)).to(dtype).to(torch.float32)


def held(model: Any) -> set[torch.dtype]:
    """The types that the runner for a model holds its layers' weights in."""
    runner: Any = open_runner(model, "cpu")
    return {matrix._held.dtype for layer in runner._layers for matrix in layer._packed}


def whole(weight: Tensor) -> Tensor:
    """In place of `in_16_bits`."""
    return weight


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("dtype", HELD)
def test_every_finite_number_of_16_bits_is_held(dtype: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    numbers[~numbers.isfinite()] = 1.0
    weight = numbers.view(-1, 64)  # the smallest ones and both zeros among them
    found = in_16_bits(weight)
    assert found.dtype == dtype
    assert torch.equal(found.float(), weight)
    x = torch.randn(70, 64)
    linear = PackedLinear(to_packed(found), len(weight), None, torch.float32)
    plain = PackedLinear(to_packed(weight), len(weight), None, torch.float32)
    for rows in (1, 5, 12, 13, 70):
        with torch.no_grad():
            assert torch.equal(linear(x[:rows]), plain(x[:rows])), rows


@pytest.mark.parametrize("odd", [1 + 2**-11, float("nan"), float("inf"), 1e-30, 70000.1])
def test_what_16_bits_do_not_hold_stays(odd: float) -> None:
    weight = torch.randn(400, 32).half().float()
    assert in_16_bits(weight).dtype == torch.float16
    weight[399, 31] = odd
    assert in_16_bits(weight) is weight


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "gemma3", "phi3", "t5"])
@pytest.mark.parametrize("dtype", HELD)
def test_answers_are_those_of_32_bits(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = rounded(name, dtype), torch.tensor(prompts((9,)))
    small = open_runner(model, "cpu")
    out = draftree.generate(model, ids, runner="cpu", drafter=draftree.Lookahead(), max_new_tokens=12)
    with monkeypatch.context() as patch:
        patch.setattr(packed_weights, "in_16_bits", whole)
        other = copy.deepcopy(model)
        large = open_runner(other, "cpu")
        expected = draftree.generate(other, ids, runner="cpu", max_new_tokens=12)
    assert small.copied_bytes == large.copied_bytes / 2
    assert torch.equal(out.sequences, expected.sequences)


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("dtype", HELD)
def test_logits_are_those_of_32_bits_to_the_last_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = rounded("qwen2", dtype)
    assert held(model) == {dtype}
    pack_weights(model)
    assert {m.packed.dtype for m in model.modules() if isinstance(m, PackedLinear)} == {dtype}
    assert held(model) == {dtype}, "read where they are"
    with monkeypatch.context() as patch:
        patch.setattr("draftree.runner.cpu.runner.in_16_bits", whole)
        other = rounded("qwen2", dtype)
        pack_weights(other)
    ids = torch.tensor(prompts((70,)))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, other(ids).logits)


@pytest.mark.parametrize("dtype", HELD)
@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj"])
def test_one_weight_of_32_bits_keeps_its_matrix_so(name: str, dtype: torch.dtype) -> None:
    """Also beside a matrix on the same input that is held in 16 bits."""
    model = rounded("llama", dtype)
    with torch.no_grad():
        model.model.layers[0].get_submodule(name).weight[3, 5] += 1e-6
    ids = torch.tensor(prompts((9,)))
    assert held(model) == {torch.float32, dtype}
    wanted = hf(model, ids, max_new_tokens=12)
    assert torch.equal(draftree.generate(model, ids, runner="cpu", max_new_tokens=12).sequences, wanted)
    pack_weights(model)
    assert held(model) == {torch.float32, dtype}
    assert torch.equal(draftree.generate(model, ids, runner="cpu", max_new_tokens=12).sequences, wanted)


@pytest.mark.parametrize("dtype", HELD)
def test_a_packed_model_stays_on_the_cpu_in_its_type(dtype: torch.dtype) -> None:
    model, stock = rounded("qwen2", dtype), rounded("qwen2", dtype)
    pack_weights(model)
    for cast in (torch.float64, torch.bfloat16, torch.float16, "meta"):
        with pytest.raises(ValueError, match=r"call draftree\.unpack_weights\(model\) first"):
            model.model.layers[0].mlp.to(cast)
    for same in (lambda m: m.to("cpu"), lambda m: m.float(), lambda m: m.share_memory()):
        same(model)
        saved = model.state_dict()
        assert all(torch.equal(saved[name], tensor) for name, tensor in stock.state_dict().items())
    assert open_runner(model).name == "cpu"
    unpack_weights(model)
    assert model.lm_head.weight.dtype == torch.float32
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in stock.state_dict().items())
