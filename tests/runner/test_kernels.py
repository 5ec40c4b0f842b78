"""The kernels of recorded passes against torch's operations, on a CUDA device.

Where there is none, `TRITON_INTERPRET=1 pytest tests/runner/test_kernels.py` runs them in Triton's
interpreter, if Triton is installed. It rounds 16 bits otherwise, so that there float32 is compared alone.
"""

from __future__ import annotations

import copy
import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from runner_driver import Run, Tree, difference
from torch import Tensor
from torch.nn import functional as F
from zoo import build

from draftree.runner import CudaGraphRunner, EagerRunner, inspect_model
from draftree.runner.cuda_graphs import runner as graph_runner
from draftree.runner.plan import Surgery

CUDA = torch.cuda.is_available()
if find_spec("triton") is None or not (CUDA or os.environ.get("TRITON_INTERPRET")):
    pytest.skip("there is no CUDA device with Triton, and no TRITON_INTERPRET=1", allow_module_level=True)
kernels: Any = pytest.importorskip("draftree.runner.cuda_graphs.kernels")
products: Any = pytest.importorskip("draftree.runner.cuda_graphs.products")

DEVICE = "cuda" if CUDA else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if CUDA else (torch.float32,)
EPSILON = 1e-5


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    return request.param  # type: ignore[no-any-return]


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def close(ours: Tensor, expected: Tensor) -> None:
    """Compare numbers near 1 up to their last bits; float32 is summed in another order."""
    assert ours.shape == expected.shape
    assert ours.dtype == expected.dtype
    allowed = (16 if ours.dtype == torch.float32 else 4) * torch.finfo(ours.dtype).eps
    assert float(((ours.float() - expected.float()).abs() / (1 + expected.float().abs())).max()) < allowed


@pytest.mark.parametrize("width", [64, 100, 4096])
def test_sums_and_norms(width: int, dtype: torch.dtype) -> None:
    x, more, weight = random(dtype, 2, 3, width), random(dtype, 2, 3, width), random(dtype, width)
    total, out = kernels.add_norm(x, more[None], weight, EPSILON)
    assert torch.equal(total, x + more)
    close(out, F.rms_norm(total, (width,), weight, EPSILON))
    parts = random(torch.float32, 3, 2, 3, width)
    total, out = kernels.add_norm(x, parts, weight, EPSILON)
    assert torch.equal(total, x + (parts[0] + parts[1] + parts[2]).to(dtype))
    close(out, F.rms_norm(total, (width,), weight, EPSILON))
    assert torch.equal(kernels.add_norm(x, parts, None, EPSILON)[1], total)
    alone, out = kernels.add_norm(x, None, weight.float(), EPSILON)
    assert alone is x
    close(out, F.rms_norm(x.float(), (width,), weight.float(), EPSILON).to(dtype))


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("width", [96, 1300])
def test_gates(width: int, activation: str, dtype: torch.dtype) -> None:
    gate, up = random(dtype, 2, 3, 2 * width).chunk(2, -1)
    expected = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    close(kernels.gated(gate, up, activation), expected * up)


# ---------------------------------------------------------------- products

LINEARS = ([96], [32, 48], [40, 24, 24], [8192, 8, 16])  # outputs of linears with the same input


def linears_of(counts: list[int], width: int, dtype: torch.dtype, *, bias: bool) -> Any:
    """Return weights and biases whose results are near 1."""
    weights = [(random(torch.float32, count, width) / width**0.5).to(dtype) for count in counts]
    return [(weight, random(dtype, len(weight)) if bias else None) for weight in weights]


def multiplied(x: Tensor, linears: Any) -> Tensor:
    """Return the linears' results side by side, in float32."""
    return torch.cat([F.linear(x.float(), w.float(), None if b is None else b.float()) for w, b in linears], -1)


@pytest.mark.parametrize("bias", [False, True], ids=["bare", "bias"])
@pytest.mark.parametrize("width", [64, 100, 1300])
@pytest.mark.parametrize("counts", LINEARS[: None if CUDA else 3], ids=str)
def test_products(counts: list[int], width: int, bias: bool, dtype: torch.dtype) -> None:
    if CUDA and dtype == torch.float32:
        pytest.skip("of float32 torch makes the products")
    linears = linears_of(counts, width, dtype, bias=bias)
    for n in (1, 3, 70):
        x = random(dtype, 2, n, width)
        close(products.product(x, linears), multiplied(x, linears).to(dtype))
        parts = products.product_in_parts(x, linears[0])
        assert len(parts) == 1 or parts.dtype == torch.float32
        close(parts.sum(0).to(dtype), multiplied(x, linears[:1]).to(dtype))
    assert (len(parts) > 1) == (width > 512 and counts[0] < 8192)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(("width", "outputs", "bias"), [(64, 40, False), (100, 96, True), (640, 8200, False)])
def test_gated_products(width: int, outputs: int, bias: bool, activation: str, dtype: torch.dtype) -> None:
    if CUDA and dtype == torch.float32:
        pytest.skip("of float32 torch makes the products")
    if outputs > 1000 and not CUDA:
        outputs = 70
    linears = linears_of([outputs, outputs], width, dtype, bias=bias)
    x = random(dtype, 1, 5, width)
    gate, up = multiplied(x, linears).to(dtype).chunk(2, -1)
    opened = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    ours, expected = products.gated_product(x, *linears, activation).float(), (opened * up).float()
    # A gate that is rounded the other way than torch's differs by a bit, and so does what it is multiplied with.
    assert float(((ours - expected).abs() / (1 + expected.abs())).max()) < 20 * torch.finfo(dtype).eps


@pytest.mark.skipif(not CUDA, reason="the interpreter's products depend on their rows")
@pytest.mark.parametrize("width", [896, 4096, 11008])
def test_rows_of_products_do_not_depend_on_each_other(width: int, dtype: torch.dtype) -> None:
    """Compare bits in every form and for many numbers of rows, beside rows of other sizes and infinite ones."""
    if dtype == torch.float32:
        pytest.skip("of float32 torch makes the products")
    linears = linears_of([4096, 1024, 1024], width, dtype, bias=True)
    wide = linears_of([8192, 8192], width, dtype, bias=False)
    x = random(dtype, 300, width)
    forms = {
        "several": lambda x: products.product(x, linears),
        "wide": lambda x: products.product(x, wide),
        "parts": lambda x: products.product_in_parts(x, linears[0]).float().sum(0),
        "gated": lambda x: products.gated_product(x, *wide, "silu"),
        "gated, narrow": lambda x: products.gated_product(x, *linears[1:], "silu"),
    }
    for name, form in forms.items():
        whole = form(x)
        for n in (1, 2, 5, 8, 16, 17, 33, 64, 65, 128, 200):
            assert torch.equal(form(x[:n]), whole[:n]), (name, n)
            assert torch.equal(form(x[300 - n :]), whole[300 - n :]), (name, n)
        others = x.clone()
        others[1::2] = float("inf")
        others[2::4] *= 1000
        assert torch.equal(form(others)[4::4], whole[4::4]), name


@pytest.mark.parametrize(("kv", "groups", "dim"), [(2, 2, 20), (3, 1, 64), (1, 4, 128)])
def test_heads_are_rotated_and_stored(kv: int, groups: int, dim: int, dtype: torch.dtype) -> None:
    """Rotate heads, with infinities and NaN among them, which are stored as 0."""
    batch, n, capacity, queries = 2, 3, 70, kv * groups
    given = random(dtype, batch, n, (queries + 2 * kv) * dim)
    given[0, 0, -1], given[1, 1, -3] = float("inf"), float("nan")
    given[0, 1, queries * dim] = float("-inf")
    query, key, value = given.split([queries * dim, kv * dim, kv * dim], -1)
    cosine, sine = random(dtype, batch, n, 1, dim), random(dtype, batch, n, 1, dim)
    partner = torch.arange(dim, device=DEVICE).roll(dim // 2)
    stores = random(dtype, 4, kv, capacity, dim), random(dtype, 4, kv, capacity, dim)
    expected = [store.clone() for store in stores]
    slots, starts = torch.tensor([3, 1], device=DEVICE), torch.tensor([5, 40], device=DEVICE)
    ours = kernels.rotate_and_store(query, key, value, cosine, sine, partner, slots, starts, stores, groups)
    heads = given.view(batch, n, -1, dim)
    both = heads[:, :, : queries + kv]
    turned = torch.addcmul(both * cosine, both.index_select(-1, partner), sine)
    of_query = turned[:, :, :queries].view(batch, n, kv, groups, dim).permute(0, 2, 3, 1, 4)
    close(ours, of_query.reshape(batch, kv, groups * n, dim))
    for b, start in enumerate(starts.tolist()):
        for store, kept in zip(expected, (turned[b, :, queries:], heads[b, :, queries + kv :]), strict=True):
            store[slots[b], :, start : start + n] = kept.transpose(0, 1).nan_to_num(0.0, 0.0, 0.0)
    close(stores[0], expected[0])
    assert torch.equal(stores[1], expected[1])


def attention(dtype: torch.dtype, band: int, starts: list[int], n: int, groups: int = 2, dim: int = 64) -> Any:
    """Return arguments of `attend`, with a mask that hides half of the context, and torch's result."""
    batch, kv = len(starts), 2
    at, slots = torch.tensor(starts, device=DEVICE), torch.tensor([2, 0], device=DEVICE)
    held = random(dtype, 3, kv, band + 32, dim)[:, :, :band], random(dtype, 3, kv, band + 32, dim)[:, :, :band]
    keys, values = held[0][slots], held[1][slots]
    seen = torch.rand(batch, n, band, device=DEVICE) < 0.5
    seen[:, :, 0] = True
    seen &= torch.arange(band, device=DEVICE) < (at + n)[:, None, None]
    mask = torch.zeros(batch, n, band, dtype=dtype, device=DEVICE).masked_fill_(~seen, torch.finfo(dtype).min)
    query = random(dtype, batch, kv, groups * n, dim)
    expected = F.scaled_dot_product_attention(
        query.float(), keys.float(), values.float(), attn_mask=mask.float()[:, None].repeat(1, 1, groups, 1), scale=0.1
    )
    expected = expected.view(batch, kv, groups, n, dim).permute(0, 3, 1, 2, 4).reshape(batch, n, -1)
    return (query, *held, mask, slots, at, groups, 0.1), expected.to(dtype)


@pytest.mark.parametrize("starts", [[5, 40], [700, 300], [1200, 3]])
@pytest.mark.parametrize("n", [1, 5, 40])
def test_attention(starts: list[int], n: int, dtype: torch.dtype) -> None:
    """Attend over two spans and more, some of which a request does not reach."""
    given, expected = attention(dtype, 1280 if max(starts) > 100 else 256, starts, n)
    close(kernels.attend(*given), expected)


@pytest.mark.parametrize(("dim", "groups"), [(20, 1), (80, 3), (128, 4), (256, 2)])
def test_attention_of_other_heads(dim: int, groups: int, dtype: torch.dtype) -> None:
    for n in (1, 30):
        given, expected = attention(dtype, 768, [600, 50], n, groups, dim)
        close(kernels.attend(*given), expected)


def test_all_kernels_run_once_when_a_model_is_opened(dtype: torch.dtype) -> None:
    for kv, groups, dim in ((2, 2, 20), (1, 4, 64), (4, 1, 128)):
        kernels.check(kv, groups, dim, "silu", dtype, torch.device(DEVICE))
    for activation in ("silu", "gelu_pytorch_tanh"):
        products.check(activation, dtype, torch.device(DEVICE))


@pytest.mark.parametrize(("groups", "dim"), [(1, 64), (2, 20), (4, 128), (80, 20)])
def test_rows_attend_one_by_one_as_in_passes_of_their_own(groups: int, dim: int, dtype: torch.dtype) -> None:
    """Compare bits, over one span and more, with positions of other branches between those that a row sees."""
    for starts in ([100, 7], [700, 300])[: 2 if CUDA or groups == 2 else 1]:
        n, band = 5, 1280 if max(starts) > 256 else 512
        (query, keys, values, *_), _ = attention(dtype, band, starts, n, groups, dim)
        drawn = torch.rand(2, n, n, device=DEVICE) < 0.5
        drawn |= torch.eye(n, dtype=torch.bool, device=DEVICE)
        seen = torch.arange(band, device=DEVICE).expand(2, n, -1) < torch.tensor(starts, device=DEVICE)[:, None, None]
        for b, start in enumerate(starts):
            seen[b, :, start : start + n] = drawn[b].tril()
        positions = torch.arange(band, device=DEVICE)
        order = torch.where(seen, positions, positions + band).argsort(-1)
        own = seen.sum(-1) - 1
        mask = torch.zeros(2, n, band, dtype=dtype, device=DEVICE).masked_fill_(~seen, torch.finfo(dtype).min)
        mask[:, :, 3:6] = torch.finfo(dtype).min  # as a window does
        slots = torch.tensor([2, 0], device=DEVICE)
        found = kernels.attend(query, keys, values, mask, slots, own, groups, 0.1, order)
        begins = torch.tensor(starts, device=DEVICE)
        close(found, kernels.attend(query, keys, values, mask, slots, begins, groups, 0.1))
        as_they_lie = positions.expand(1, 1, -1)
        by_row = query.view(2, -1, groups, n, dim)
        for b in range(2):
            for i in range(n):
                at = order[b, i, : band if i % 2 else band - 256]  # in a narrower band as well
                alone = [held[slots[b], None, :, at].contiguous() for held in (keys, values)]
                expected = kernels.attend(
                    by_row[b : b + 1, :, :, i].contiguous(), *alone, mask[b : b + 1, i : i + 1, at], slots[1:],
                    own[b : b + 1, i : i + 1], groups, 0.1, as_they_lie[..., : len(at)],
                )  # fmt: skip
                assert torch.equal(found[b, i], expected[0, 0]), (b, i)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_passes_by_the_kernels_are_those_of_tensor_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees in a ragged batch, with states that leave behind the second layer and enter the third."""
    monkeypatch.setattr(graph_runner, "has_kernels", lambda *given: True)
    model = copy.deepcopy(build(name)).to(DEVICE)
    target = inspect_model(model)
    trees, found = [Tree.random(5, 1), Tree.random(3, 2)], []
    keep = Surgery(2, keep=torch.tensor([[0, 1, 3], [0, 2, -1]], device=DEVICE))
    for runner in (EagerRunner(target), CudaGraphRunner(target)):
        run = Run(runner, (9, 14)).prefill()
        found.append([run.step(trees).logits, run.step(trees, taps=(1,), surgeries=(keep,)).logits])
    for ours, expected in zip(*found, strict=True):
        assert difference(ours[0], expected[0]) < 1e-4
        assert difference(ours[1, :2], expected[1, :2]) < 1e-4
