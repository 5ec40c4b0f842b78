"""The compiled layers for processors of every width of registers, each in a copy of the library."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from limited_library import limited_to

import draftree
from draftree.native import load_library
from draftree.runner import open_runner
from draftree.runner.base import top_tokens
from draftree.runner.weights.packed import PackedLinear, to_packed

pytestmark = pytest.mark.skipif(load_library() is None, reason="the library is not built")
PROMPT = torch.tensor([[5, 9, 20, 30, 5, 9, 20]])


@pytest.fixture(params=[4, 8, 16, 256])
def widest(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The most floats of a register that the library computes with during a test."""
    for _ in limited_to(request.param, tmp_path, monkeypatch):
        yield request.param


def test_products(widest: int) -> None:
    torch.manual_seed(0)
    for outputs, inputs in ((48, 33), (130, 64)):
        weight, bias = torch.randn(outputs, inputs, dtype=torch.float32), torch.randn(outputs, dtype=torch.float32)
        linear = PackedLinear(to_packed(weight), outputs, torch.nn.Parameter(bias), weight.dtype)
        if inputs % 2 == 0:  # of 16 bits, the same to the last bit; in bfloat16 matrix registers sum in another order
            for dtype in (torch.bfloat16, torch.float16)[widest == 256 :]:
                held = weight.to(dtype)
                of_16 = PackedLinear(to_packed(held), outputs, None, torch.float32)
                of_32 = PackedLinear(to_packed(held.float()), outputs, None, torch.float32)
                for rows in (1, 3, 8, 25, 60):
                    x = torch.randn(rows, inputs, dtype=torch.float32)
                    with torch.no_grad():
                        assert torch.equal(of_16(x), of_32(x)), (dtype, rows)
        for rows in (*range(1, 15), 25):
            x = torch.randn(rows, inputs, dtype=torch.float32)
            with torch.no_grad():
                found = linear(x)
            assert torch.allclose(found, x @ weight.T + bias, atol=1e-4), rows
            assert torch.equal(found[:1], linear(x[:1]).detach()), "a row does not depend on the others"


@pytest.mark.parametrize("width", [5, 16, 127, 128, 8193])
def test_top_tokens(widest: int, width: int) -> None:
    torch.manual_seed(width)
    logits = 20 * torch.randn(2, 3, width, dtype=torch.float32)
    logits[0, 1] = -torch.inf
    logits[1, 0, 2:] = -torch.inf  # two tokens alone are possible
    logits[1, 2] = logits[1, 2].sort().values  # every one is better than those before it
    tokens, logp = map(torch.from_numpy, top_tokens(logits, 4))
    expected = logits.double().log_softmax(-1).topk(4)
    whole = torch.ones(2, 3, 4, dtype=torch.bool)
    whole[0, 1], whole[1, 0, 2:] = False, False
    assert torch.equal(tokens[whole], expected.indices[whole])
    assert torch.allclose(logp[whole], expected.values[whole].float(), rtol=0, atol=1e-5)
    assert tokens[~whole].eq(0).all()
    assert logp[~whole].isneginf().all()
    for odd in (torch.nan, torch.inf):
        broken = logits[1:, 1].clone()
        broken[0, width // 2] = odd
        none, never = top_tokens(broken, 4)
        assert (none == 0).all()
        assert np.isneginf(never).all()
    halves = top_tokens(logits.bfloat16(), 1)
    assert (halves[0] == logits.bfloat16().argmax(-1, keepdim=True).numpy())[whole.numpy()[..., :1]].all()


@pytest.mark.parametrize("flush", [False, True])
def test_every_number_of_16_bits(widest: int, flush: bool) -> None:
    """The smallest ones too, and where torch takes floats for 0 that have no exponent."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    numbers[~numbers.isfinite()] = 1.0
    weight, x = numbers.view(-1, 64), torch.eye(64, dtype=torch.float32)
    linear = PackedLinear(to_packed(weight.half()), len(weight), None, torch.float32)
    torch.set_flush_denormal(flush)
    try:
        with torch.no_grad():
            for rows in (x[:1], x[:7], x, x.repeat(2, 1)):
                assert torch.equal(linear(rows), weight.T[:64].repeat(2, 1)[: len(rows)])
    finally:
        torch.set_flush_denormal(False)


@pytest.fixture(scope="module", params=[torch.float16, torch.bfloat16])
def published(request: pytest.FixtureRequest, demo: Any) -> tuple[Any, torch.Tensor]:
    """The embedded model, rounded to 16 bits, and Hugging Face's answer, which no width of ours has a part in."""
    model = copy.deepcopy(demo.model).to(request.param).float()
    return model, model.generate(PROMPT, max_new_tokens=24, do_sample=False)


def test_answers(widest: int, published: tuple[Any, torch.Tensor]) -> None:
    model, expected = copy.deepcopy(published[0]), published[1]
    assert open_runner(model).name == "cpu"
    for drafter in (None, draftree.Lookahead()):
        drafted = draftree.generate(
            model, PROMPT, drafter=drafter, shape=drafter and draftree.Fixed(12), max_new_tokens=24
        )
        assert torch.equal(drafted.sequences, expected)
