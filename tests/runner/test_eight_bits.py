"""Models whose weights torchao keeps in 8 bits, compiled; a class of the same make stands for torchao's here."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafters_for_tests import RandomTree
from generate_driver import prompts
from runner_driver import one_thread  # noqa: F401
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import MEMBERS, build, construct

from draftree import Lookahead
from draftree.engine.generate import generate
from draftree.native import WIDEST, library, load_library, started
from draftree.runner import open_runner, pack_weights
from draftree.runner.plan import Plan
from draftree.runner.target import inspect_model
from draftree.runner.weights.packed import Packed
from draftree.runner.weights.stock import eight_bits

LIBRARY_BUILT = load_library()
TYPES = (torch.float32, torch.bfloat16)
FAMILIES = ("llama", "qwen2", "phi3", "olmo2", "gemma", "gemma2", "mistral-window")
pytestmark = pytest.mark.skipif(LIBRARY_BUILT is None, reason="not built: python hatch_build.py")


class Int8Tensor(Tensor):
    """Whole numbers [outputs, inputs] with a scale for each output [outputs, 1], as torchao keeps them."""

    block_size, act_quant_kwargs, act_pre_scale = (1, 1 << 20), None, None

    @staticmethod
    def __new__(cls: Any, qdata: Tensor, scale: Tensor, dtype: torch.dtype) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=dtype)

    def __init__(self, qdata: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.qdata, self.scale = qdata, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["qdata", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, dtype: Any, size: Any, stride: Any) -> Any:
        return cls(inner["qdata"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].qdata, args[0].scale, args[0].dtype)
        if func is torch.ops.aten.slice.Tensor:
            own, dim, first, last = args
            assert dim == 0
            return cls(own.qdata[first:last], own.scale[first:last], own.dtype)
        whole = [(a.qdata * a.scale).to(a.dtype) if isinstance(a, cls) else a for a in args]
        return func(*whole, **(kwargs or {}))


Int8Tensor.__module__ = "torchao.stand_in"


def small(weight: Tensor) -> Int8Tensor:
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return Int8Tensor((weight.float() / scale).round().to(torch.int8), scale, weight.dtype)


def quantised(name: str, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    model = (construct(MEMBERS[name], **config) if config else copy.deepcopy(build(name))).to(dtype)
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is nn.Linear and module is not head:
            module.weight = nn.Parameter(small(module.weight.detach()), requires_grad=False)
    return model


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("inputs", [4, 12, 64, 300])
@pytest.mark.parametrize("outputs", [1, 16, 33, 401])
def test_products(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """Whole numbers are summed first, and the sums are scaled; in bfloat16 both are rounded, as torchao's are."""
    torch.manual_seed(inputs * outputs)
    weights = [small(torch.randn(n, inputs).to(dtype)) for n in (outputs, 5)]
    biases = [torch.randn(n).to(dtype) for n in (outputs, 5)]
    linears = [
        SimpleNamespace(weight=w, bias=b, out_features=len(b), in_features=inputs)
        for w, b in zip(weights, biases, strict=True)
    ]
    packed = Packed(linears)
    assert LIBRARY_BUILT is not None
    first = torch.randn(inputs).to(dtype).float()
    found = []
    for rows in (*range(1, 15), 25, 131):
        torch.manual_seed(rows)
        x = torch.randn(rows, inputs).to(dtype).float()
        x[0] = first
        out, scratch = torch.full((rows, outputs + 5), torch.nan), torch.empty_like(x)
        for threads in (1, 2):
            given = (packed.described, x.data_ptr(), rows, threads, 0, scratch.data_ptr(), out.data_ptr())
            LIBRARY_BUILT.layer_product(*given)
            expected = [
                (x @ w.qdata.float().T).to(dtype) * w.scale.to(dtype).T + b
                for w, b in zip(weights, biases, strict=True)
            ]
            bound = 1e-4 if dtype == torch.float32 else 0.02
            torch.testing.assert_close(out, torch.cat(expected, 1).float(), rtol=bound, atol=bound)
        found.append(out[0].clone())
    assert all(torch.equal(row, found[0]) for row in found), "a row does not depend on the rows beside it"


def product(weight: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """x [rows, inputs] times weights [outputs, inputs] of 8 bits, compiled, in x's type."""
    assert LIBRARY_BUILT is not None
    linear = SimpleNamespace(
        weight=Int8Tensor(weight, scale, x.dtype), bias=None, out_features=len(weight), in_features=weight.shape[1]
    )
    packed, rows = Packed([linear]), x.float()
    out, scratch = torch.empty(len(x), len(weight)), torch.empty_like(rows)
    at = (packed.described, rows.data_ptr(), len(x), 2, 0, scratch.data_ptr(), out.data_ptr())
    LIBRARY_BUILT.layer_product(*at)
    return out


@pytest.fixture(params=[4, 8, 16, WIDEST])
def width(request: Any) -> Any:
    """Floats of the widest registers that compiled functions use; weights of 8 bits are made floats below 16."""
    assert started(library(), request.param) is not None
    yield request.param
    started(library(), WIDEST)


@pytest.mark.parametrize("outlier", [1, 100, 3000])
@pytest.mark.parametrize("rows", [1, 5, 13])
def test_products_are_about_as_exact_as_torchs(rows: int, outlier: int, width: int) -> None:
    """Also where one number of a row is much larger than the others, as the processor may see them as its fractions."""
    torch.manual_seed(rows * outlier)
    weight, scale = torch.randint(-128, 128, (40, 1152), dtype=torch.int8), torch.rand(40, 1)
    for dtype in TYPES:
        x = torch.randn(rows, 1152)
        x[:, 7] *= outlier
        x = x.to(dtype)
        exact = x.double() @ weight.double().T * scale.to(dtype).double().T
        found, theirs = product(weight, scale.to(dtype), x), F.linear(x, weight.to(dtype)) * scale.to(dtype).T
        off, usual = (float((got.double() - exact).norm() / exact.norm()) for got in (found, theirs))
        assert off < (max(8 * usual, 2e-6) if dtype == torch.float32 else 1.2 * usual)


@pytest.mark.parametrize("inputs", [8, 12, 65536, 65540])
def test_products_at_the_ends_of_whole_numbers(inputs: int) -> None:
    """Sums of whole numbers fit into 32 bits; beyond, and where rows are very short, floats are summed."""
    for sign in (1, -1):
        weight = torch.full((16, inputs), sign * 127, dtype=torch.int8)
        for x in (torch.ones(2, inputs), -torch.ones(2, inputs)):
            found = product(weight, torch.ones(16, 1), x)
            torch.testing.assert_close(found, x @ weight.float().T, rtol=1e-5, atol=0)


def test_rows_that_are_not_finite_say_so_and_others_are_as_they_are(width: int) -> None:
    torch.manual_seed(0)
    weight, scale = torch.randint(-127, 128, (33, 64), dtype=torch.int8), torch.rand(33, 1)
    x = torch.randn(6, 64)
    alone = product(weight, scale, x[:1])
    x[1, 3], x[2, 5], x[3, 63], x[4], x[5] = torch.nan, torch.inf, -torch.inf, 0, 1e-38
    found = product(weight, scale, x)
    assert not found[1:4].isfinite().any()
    assert not found[4].any()
    assert float(found[5].abs().max()) < 1e-30
    assert torch.equal(found[:1], alone)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_it_computes_what_the_model_does(name: str, dtype: torch.dtype) -> None:
    model = quantised(name, dtype)
    fast, stock = open_runner(model), open_runner(model, "hooked")
    assert fast.name == "cpu"
    assert "8 bits" not in str(fast.target.alteration)
    ids = torch.tensor(prompts((23,)))
    with fast.guard():
        ours = fast.run(Plan.causal(ids, 0), fast.new_cache(1)).logits.float()
    with stock.guard():
        theirs = stock.run(Plan.causal(ids, 0), stock.new_cache(1)).logits.float()
    bound = 1e-3 if dtype == torch.float32 else 0.05
    assert float((ours - theirs).square().mean().sqrt()) < bound * float(theirs.std())


@pytest.mark.parametrize("name", ["llama", "phi3"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_drafting_changes_nothing(name: str, dtype: torch.dtype) -> None:
    model = quantised(name, dtype)
    ids = torch.tensor(prompts((13, 13), seed=2))
    plain = generate(model, ids, max_new_tokens=24, eos_token_id=None).sequences
    answers = {tuple(prompt): answer for prompt, answer in zip(ids.tolist(), plain[:, 13:].tolist(), strict=True)}
    drafted = generate(model, ids, drafter=RandomTree(answers, 3), max_new_tokens=24, eos_token_id=None)
    assert torch.equal(drafted.sequences, plain)
    assert drafted.stats.total.accepted > 0
    by_trie = generate(model, ids, drafter=Lookahead(), max_new_tokens=24, eos_token_id=None)
    assert torch.equal(by_trie.sequences, plain)


def test_other_runners_refuse_them() -> None:
    model = quantised("llama")
    for choice in ("eager", "cuda_graphs"):
        with pytest.raises(ValueError, match=r"drives stock models alone, and its weights have 8 bits"):
            open_runner(model, choice)
    assert open_runner(model, "in_place").name == "hooked"
    with pytest.raises(ValueError, match="does not qualify for the eager runner"):
        pack_weights(model)
    assert open_runner(quantised("t5-gated")).name == "hooked"


@pytest.mark.parametrize("part", ["self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj"])
def test_linears_on_the_same_input_must_be_alike(part: str) -> None:
    mixed, whole = quantised("llama", torch.bfloat16), copy.deepcopy(build("llama")).to(torch.bfloat16)
    name, linear = part.split(".")
    setattr(getattr(mixed.model.layers[1], name), linear, copy.deepcopy(whole.model.layers[1].get_submodule(part)))
    with pytest.raises(ValueError, match="some have weights of 8 bits and some have not: use runner='auto'"):
        open_runner(mixed, "cpu")
    assert open_runner(mixed).name == "hooked"


def test_what_does_not_fit_goes_through_the_model() -> None:
    odd = quantised("llama", intermediate_size=30)
    with pytest.raises(ValueError, match="a linear of this model has no whole number of them: use runner='auto'"):
        open_runner(odd, "cpu")
    assert open_runner(odd).name == "hooked"
    embedded = quantised("llama")
    embedding = embedded.get_input_embeddings()
    embedding.weight = nn.Parameter(small(embedding.weight.detach()), requires_grad=False)
    assert "has weights of the class Int8Tensor" in str(inspect_model(embedded).alteration)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("act_quant_kwargs", object()),  # rows are of 8 bits as well
        ("act_pre_scale", torch.ones(1)),
        ("block_size", (1, 32)),
        ("zero_point", torch.ones(1, dtype=torch.int8)),
    ],
)
def test_weights_that_are_multiplied_otherwise_go_through_the_model(name: str, value: Any) -> None:
    model = quantised("llama")
    weight = model.model.layers[0].mlp.up_proj.weight
    setattr(weight, name, value)
    assert eight_bits(weight) is None
    assert open_runner(model).name == "hooked"


@pytest.mark.parametrize("part", ["qdata", "scale"])
def test_weights_that_change_are_copied_anew(part: str) -> None:
    model = quantised("llama")
    ids = torch.tensor(prompts((9,)))
    before = generate(model, ids, max_new_tokens=16, eos_token_id=None).sequences
    getattr(model.model.layers[0].mlp.down_proj.weight, part).mul_(-1)
    after = generate(model, ids, max_new_tokens=16, eos_token_id=None).sequences
    assert not torch.equal(before, after)
    assert torch.equal(after, generate(model, ids, runner="hooked", max_new_tokens=16, eos_token_id=None).sequences)
