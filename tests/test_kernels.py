"""The kernels of recorded passes against torch's operations, on a CUDA device.

Where there is none, `TRITON_INTERPRET=1 pytest tests/test_kernels.py` runs them in Triton's interpreter, if Triton is
installed. It rounds 16 bits otherwise, so that there float32 is compared alone.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

CUDA = torch.cuda.is_available()
if find_spec("triton") is None or not (CUDA or os.environ.get("TRITON_INTERPRET")):
    pytest.skip("there is no CUDA device with Triton, and no TRITON_INTERPRET=1", allow_module_level=True)
kernels: Any = pytest.importorskip("draftree.runner.cuda_graphs.kernels")

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
    """Equal up to the last bits, of numbers that are not far from 1; float32 is summed in another order."""
    assert ours.shape == expected.shape
    assert ours.dtype == expected.dtype
    allowed = (16 if ours.dtype == torch.float32 else 4) * torch.finfo(ours.dtype).eps
    assert float(((ours.float() - expected.float()).abs() / (1 + expected.float().abs())).max()) < allowed


@pytest.mark.parametrize("width", [64, 100, 4096])
def test_sums_and_norms(width: int, dtype: torch.dtype) -> None:
    x, more, weight = random(dtype, 2, 3, width), random(dtype, 2, 3, width), random(dtype, width)
    total, out = kernels.add_norm(x, more, weight, EPSILON)
    assert torch.equal(total, x + more)
    close(out, F.rms_norm(total, (width,), weight, EPSILON))
    alone, out = kernels.add_norm(x, None, weight.float(), EPSILON)
    assert alone is x
    close(out, F.rms_norm(x.float(), (width,), weight.float(), EPSILON).to(dtype))


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("width", [96, 1300])
def test_gates(width: int, activation: str, dtype: torch.dtype) -> None:
    gate, up = random(dtype, 2, 3, 2 * width).chunk(2, -1)
    expected = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    close(kernels.gated(gate, up, activation), expected * up)


@pytest.mark.parametrize(("kv", "groups", "dim"), [(2, 2, 20), (3, 1, 64), (1, 4, 128)])
def test_heads_are_turned_and_kept(kv: int, groups: int, dim: int, dtype: torch.dtype) -> None:
    """Also what is no number: it is kept as 0."""
    batch, n, capacity, queries = 2, 3, 70, kv * groups
    given = random(dtype, batch, n, (queries + 2 * kv) * dim)
    given[0, 0, -1], given[1, 1, -3] = float("inf"), float("nan")
    given[0, 1, queries * dim] = float("-inf")
    query, key, value = given.split([queries * dim, kv * dim, kv * dim], -1)
    cosine, sine = random(dtype, batch, n, 1, dim), random(dtype, batch, n, 1, dim)
    partner = torch.arange(dim, device=DEVICE).roll(dim // 2)
    stores = random(dtype, batch, kv, capacity, dim), random(dtype, batch, kv, capacity, dim)
    expected = [store.clone() for store in stores]
    starts = torch.tensor([5, 40], device=DEVICE)
    ours = kernels.turn_and_keep(query, key, value, cosine, sine, partner, starts, stores, groups)
    heads = given.view(batch, n, -1, dim)
    both = heads[:, :, : queries + kv]
    turned = torch.addcmul(both * cosine, both.index_select(-1, partner), sine)
    of_query = turned[:, :, :queries].view(batch, n, kv, groups, dim).permute(0, 2, 3, 1, 4)
    close(ours, of_query.reshape(batch, kv, groups * n, dim))
    for b, start in enumerate(starts.tolist()):
        for store, kept in zip(expected, (turned[b, :, queries:], heads[b, :, queries + kv :]), strict=True):
            store[b, :, start : start + n] = kept.transpose(0, 1).nan_to_num(0.0, 0.0, 0.0)
    close(stores[0], expected[0])
    assert torch.equal(stores[1], expected[1])


def attention(dtype: torch.dtype, band: int, starts: list[int], n: int, groups: int = 2, dim: int = 64) -> Any:
    """Arguments of `attend`, with a mask that leaves out half of what lies before, and what torch makes of them."""
    batch, kv = len(starts), 2
    at = torch.tensor(starts, device=DEVICE)
    keys, values = random(dtype, batch, kv, band + 30, dim), random(dtype, batch, kv, band + 30, dim)
    keys, values = keys[:, :, :band], values[:, :, :band]
    seen = torch.rand(batch, n, band, device=DEVICE) < 0.5
    seen[:, :, 0] = True
    seen &= torch.arange(band, device=DEVICE) < (at + n)[:, None, None]
    mask = torch.zeros(batch, n, band, dtype=dtype, device=DEVICE).masked_fill_(~seen, torch.finfo(dtype).min)
    query = random(dtype, batch, kv, groups * n, dim)
    expected = F.scaled_dot_product_attention(
        query.float(), keys.float(), values.float(), attn_mask=mask.float()[:, None].repeat(1, 1, groups, 1), scale=0.1
    )
    expected = expected.view(batch, kv, groups, n, dim).permute(0, 3, 1, 2, 4).reshape(batch, n, -1)
    return (query, keys, values, mask, at, groups, 0.1), expected.to(dtype)


@pytest.mark.parametrize("starts", [[5, 40], [700, 300], [1200, 3]])
@pytest.mark.parametrize("n", [1, 5, 40])
def test_attention(starts: list[int], n: int, dtype: torch.dtype) -> None:
    """Over one span of columns and several, some of which a request does not reach."""
    given, expected = attention(dtype, 1280 if max(starts) > 100 else 256, starts, n)
    close(kernels.attend(*given), expected)


@pytest.mark.parametrize(("dim", "groups"), [(20, 1), (80, 3), (128, 4), (256, 2)])
def test_attention_of_other_heads(dim: int, groups: int, dtype: torch.dtype) -> None:
    for n in (1, 30):
        given, expected = attention(dtype, 768, [600, 50], n, groups, dim)
        close(kernels.attend(*given), expected)


def test_queries_may_lie_anyhow(dtype: torch.dtype) -> None:
    (query, *rest), expected = attention(dtype, 256, [100, 50], 5)
    lying = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert not lying.is_contiguous()
    close(kernels.attend(lying, *rest), expected)


@pytest.mark.parametrize(("kv", "groups", "dim"), [(2, 2, 20), (1, 4, 64), (4, 1, 128)])
def test_a_try_of_all_kernels_passes_and_finds_wrong_attention(
    kv: int, groups: int, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (kv, groups, dim, "silu", dtype, torch.device(DEVICE))
    kernels.check(*arguments)
    right = kernels.attend
    monkeypatch.setattr(kernels, "attend", lambda *given: right(*given) * 1.2)
    with pytest.raises(RuntimeError, match="attention is off by"):
        kernels.check(*arguments)


def test_a_row_attends_alike_among_others_and_in_wider_bands(dtype: torch.dtype) -> None:
    if CUDA and dtype == torch.float32:
        pytest.skip("products of float32 are added in an order that depends on how many there are")
    (query, keys, values, mask, starts, groups, scaling), _ = attention(dtype, 1280, [700, 600], 6, groups=1)
    whole = kernels.attend(query, keys, values, mask, starts, groups, scaling)
    narrow = 1024
    again = kernels.attend(query, keys[:, :, :narrow], values[:, :, :narrow], mask[:, :, :narrow],
                           starts, groups, scaling)  # fmt: skip
    assert torch.equal(whole, again)
    less = starts - 300  # of one span, and of two whose second one holds nothing
    some = [kernels.attend(query, keys[:, :, :band], values[:, :, :band], mask[:, :, :band], less, groups, scaling)
            for band in (512, 1024)]  # fmt: skip
    assert torch.equal(*some)
    for b in range(2):
        row = kernels.attend(query[b : b + 1, :, 2:3], keys[b : b + 1], values[b : b + 1],
                             mask[b : b + 1, 2:3], starts[b : b + 1] + 5, groups, scaling)  # fmt: skip
        assert torch.equal(row[0, 0], whole[b, 2])
