"""The compiled layers against the same layers in tensor operations, and what their products promise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from few import crossed
from runner_driver import Tree, one_thread  # noqa: F401
from torch import Tensor, nn
from zoo import MEMBERS, VOCABULARY, build, construct

from draftree import native
from draftree.native import LIBRARY, load_library
from draftree.runner import open_runner, pack_weights
from draftree.runner.cpu.runner import CpuRunner
from draftree.runner.eager.runner import EagerRunner
from draftree.runner.kv.cache import SlotCache
from draftree.runner.plan import PassResult, Plan, Segment, Surgery
from draftree.runner.target import inspect_model
from draftree.runner.weights.packed import Packed, scratch_for

TYPES = (torch.float32, torch.bfloat16)
# Of a checkpoint, and those that it is loaded in.
LOADED = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32))
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "glm", "glm4", "olmo2", "gemma"),
    *("gemma2", "gemma3", "olmo3", "mistral-window", "phi3-window"),
)
LIBRARY_BUILT = load_library()
ONE = torch.ones(1, 1, 1, dtype=torch.bool)
pytestmark = pytest.mark.skipif(LIBRARY_BUILT is None, reason="not built: python hatch_build.py")


def model_of(family: str, *types: torch.dtype) -> nn.Module:
    """Cast to one type after the other."""
    model: nn.Module = build(family)
    for dtype in types:
        model = model if model.dtype == dtype else copy.deepcopy(model).to(dtype)
    return model


def multiply(packed: Packed, x: Tensor, threads: int = 1, out: Tensor | None = None) -> Tensor:
    added = out is not None
    if out is None:
        out = torch.full((len(x), packed.described.outputs), torch.nan)
    assert LIBRARY_BUILT is not None
    scratch = scratch_for(*x.shape)
    given = (packed.described, x.data_ptr(), len(x), threads, added, scratch.data_ptr(), out.data_ptr())
    LIBRARY_BUILT.layer_product(*given)
    return out


@pytest.mark.parametrize("inputs", [1, 7, 64, 300])
@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 33, 96, 401])
def test_products(inputs: int, outputs: int) -> None:
    torch.manual_seed(inputs * outputs)
    linears = [nn.Linear(inputs, outputs), nn.Linear(inputs, 5)]
    packed = Packed(linears)
    for rows in (*range(1, 27), 40, 131):
        x = torch.randn(rows, inputs)
        expected = torch.cat([m(x) for m in linears], 1).detach()
        torch.testing.assert_close(multiply(packed, x), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(multiply(packed, x, 2), expected, rtol=1e-4, atol=1e-4)
        before = torch.randn_like(expected)
        torch.testing.assert_close(multiply(packed, x, 1, before.clone()), expected + before, rtol=1e-4, atol=1e-4)


def rounded(x: Tensor) -> Tensor:
    """To what bfloat16 has, as float32."""
    return x.bfloat16().float()


@pytest.mark.parametrize("inputs", [2, 6, 64, 300])
@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 33, 96, 401])
def test_products_with_weights_in_bfloat16(inputs: int, outputs: int) -> None:
    """They are summed in float32 and rounded to bfloat16, and so is what they are added to."""
    torch.manual_seed(inputs * outputs)
    linears = [nn.Linear(inputs, outputs).bfloat16(), nn.Linear(inputs, 5).bfloat16()]
    packed = Packed(linears)
    for rows in (*range(1, 27), 40, 131):
        x = rounded(torch.randn(rows, inputs))
        exact = torch.cat([m.float()(x) for m in copy.deepcopy(linears)], 1).detach()
        near = {"rtol": 2**-7, "atol": 1e-5}  # sums in another order may fall to the next number
        for threads in (1, 2):
            found = multiply(packed, x, threads)
            torch.testing.assert_close(found, rounded(exact), **near)
            assert torch.equal(found, rounded(found))
        assert (found == rounded(exact)).float().mean() > 0.9
        before = rounded(torch.randn_like(exact))
        assert torch.equal(multiply(packed, x, 1, before.clone()), rounded(before + found))


@pytest.mark.parametrize("inputs", [4, 32])
def test_what_is_no_number_stays_none_in_bfloat16(inputs: int) -> None:
    packed = Packed([SimpleNamespace(weight=torch.ones(4, inputs, dtype=torch.bfloat16), bias=None, out_features=4)])
    x = rounded(torch.tensor([[torch.inf, 1, 1, 1], [torch.nan, 1, 1, 1], [3e38, 3e38, 1, 1], [3e38, 1, 1, 1]]))
    x = torch.nn.functional.pad(x, (0, inputs - 4))
    found = multiply(packed, x)
    assert (found[0] == torch.inf).all()
    assert found[1].isnan().all()
    assert (found[2] == torch.inf).all()
    assert torch.equal(found[3], x[3, :1].expand(4))


@pytest.mark.parametrize("inputs", [64, 1024])
def test_floats_times_bfloat16_are_as_exact_as_float32(inputs: int) -> None:
    """Of weights that are held in 16 bits, by whatever the processor multiplies them with.

    Rounding after every addition is off by a few units of the sum of all sizes; numbers cut to 16 bits are by 2 ** -9.
    """
    torch.manual_seed(inputs)
    linear = nn.Linear(inputs, 98, bias=False).bfloat16().float()
    packed = Packed([linear])
    assert packed.nbytes == 2 * linear.weight.numel()
    for rows in (1, 5, 6, 11, 16, 33, 70):
        x = torch.randn(rows, inputs, dtype=torch.float32) * 10.0 ** torch.randint(-9, 9, (rows, 1))
        exact = x.double() @ linear.weight.detach().double().T
        size = x.double().abs() @ linear.weight.detach().double().abs().T
        found = multiply(packed, x, 2)
        assert ((found - exact).abs() <= size * 2**-22).all(), rows
        added = multiply(packed, x, 1, torch.ones_like(found))
        assert torch.equal(added, 1 + found)


def test_all_24_bits_of_a_float_are_multiplied() -> None:
    """A float is the sum of three numbers in bfloat16 where matrix registers multiply it."""
    weight = torch.eye(64, dtype=torch.float32) * -2
    packed = Packed([SimpleNamespace(weight=weight, bias=None, out_features=64)])
    bits = torch.randint(-(2**31), 2**31, (200, 64), dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    # With a third part that bfloat16 has, whatever its last bit is, and a result that is finite.
    x = torch.where((x.abs() > 1e-25) & (x.abs() < 1e38), x, 1.0)
    for rows in (1, 4, 200):
        assert torch.equal(multiply(packed, x[:rows].contiguous()), -2 * x[:rows])


def test_what_is_no_number_stays_none_in_float32() -> None:
    """And in its row, as the largest number does."""
    packed = Packed([SimpleNamespace(weight=torch.ones(4, 64, dtype=torch.float32), bias=None, out_features=4)])
    x = torch.zeros(6, 64, dtype=torch.float32)
    x[:, 3] = torch.tensor([torch.inf, torch.nan, -torch.inf, torch.finfo(torch.float32).max, 1 + 2**-23, 0])
    for rows in range(1, 7):
        found = multiply(packed, x[:rows].contiguous())
        assert torch.equal(found.nan_to_num(7.0, 8.0, 9.0), x[:rows, 3:4].nan_to_num(7.0, 8.0, 9.0).expand(rows, 4))


@pytest.mark.parametrize("inputs", [300, 320])  # matrix registers want multiples of 32
@pytest.mark.parametrize("types", LOADED, ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(types: tuple[torch.dtype, torch.dtype], inputs: int) -> None:
    """To the last bit, for any number of rows and threads."""
    torch.manual_seed(0)
    packed = Packed([nn.Linear(inputs, 210, bias=False).to(types[0]).to(types[1])])
    x = torch.randn(64, inputs).to(types[1]).float()
    alone = torch.cat([multiply(packed, row[None]) for row in x])
    for rows in range(1, 65):
        for threads in (1, 2):
            assert torch.equal(multiply(packed, x[:rows].clone(), threads), alone[:rows])


@pytest.mark.parametrize(("family", "threads", "types"), crossed(FAMILIES, [1, 2], LOADED))
def test_a_tree_gives_the_bits_of_its_branches(
    family: str, threads: int, types: tuple[torch.dtype, torch.dtype]
) -> None:
    """Each node in a ragged batch of trees has the logits of token by token decoding, to the last bit."""
    torch.manual_seed(5)
    torch.set_num_threads(threads)
    model = model_of(family, *types)
    runner = CpuRunner(inspect_model(model))
    prompts = [torch.randint(0, VOCABULARY, (1, n)) for n in (5, 23)]
    trees = [Tree.random(13, seed) for seed in (1, 2)]

    def prefilled(slots: int) -> SlotCache:
        cache = runner.new_cache(slots)
        for slot in range(slots):
            n = prompts[slot].shape[1]
            square = torch.ones(1, n, n, dtype=torch.bool).tril()
            result = runner.run(Plan(prompts[slot], torch.arange(n)[None], square), cache, slot)
            cache.commit([list(range(n))], result.segments)
        return cache

    try:
        cache = prefilled(2)
        starts = torch.tensor(cache.lengths)[:, None]
        plan = Plan(
            torch.stack([tree.tokens for tree in trees]),
            starts + torch.tensor([tree.depths for tree in trees]),
            torch.stack([tree.visible(13) for tree in trees]),
        )
        together = runner.run(plan, cache).logits
        assert runner.packs
        for sizes in ((4, 13), (13, 1)):  # the same without the rows behind them, which others do not see
            cache = prefilled(2)
            packed = runner.run(replace(plan, sizes=sizes), cache).logits
            for b, size in enumerate(sizes):
                assert torch.equal(packed[b, :size], together[b, :size])
            cache.commit([[0, 2, 3], [0]], [Segment(0, None, plan.positions, plan.visible)])
            follow = Plan(torch.tensor([[5], [6]]), torch.tensor(cache.lengths)[:, None], ONE.expand(2, -1, -1))
            behind = runner.run(follow, cache).logits
            cache = prefilled(2)
            runner.run(plan, cache)
            cache.commit([[0, 2, 3], [0]], [Segment(0, None, plan.positions, plan.visible)])
            assert torch.equal(runner.run(follow, cache).logits, behind)
        for b, tree in enumerate(trees):
            for node, branch in enumerate(tree.branches):
                cache = prefilled(2)
                start = cache.lengths[b]
                for depth, above in enumerate(branch):
                    step = Plan(tree.tokens[above].view(1, 1), torch.tensor([[start + depth]]), ONE)
                    result = runner.run(step, cache, b)
                    cache.commit([[0]], result.segments)
                assert torch.equal(result.logits[0, 0], together[b, node])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_last_layer_leaves_out_unread_rows(family: str, dtype: torch.dtype) -> None:
    """Logits, and the keys and values for later passes, are the same to the last bit."""
    torch.manual_seed(6)
    model = model_of(family, dtype)
    runner = CpuRunner(inspect_model(model))
    tokens, last = torch.randint(0, VOCABULARY, (1, 70)), len(runner.target.layers)
    run, unread = runner.stack._run, []
    runner.stack._run = lambda *given: (unread.append(given[3]), run(*given))
    found = []
    for taps in ((), (last,)):  # states behind the last layer are read, of all rows
        cache = runner.new_cache(1, 128)
        for begin, end in ((0, 5), (5, 64)):
            plan = Plan.causal(tokens[:, begin:end], begin, first_logit_row=end - begin - 2, taps=taps)
            result = runner.run(plan, cache)
            cache.commit([list(range(end - begin))], result.segments)
            found.append(result.logits)
        found.append(runner.run(Plan.causal(tokens[:, 64:], 64), cache).logits)
    half = len(found) // 2
    assert all(torch.equal(one, other) for one, other in zip(found[:half], found[half:], strict=True))
    assert found[0].shape[1] == 2
    assert sorted({*unread}) == [0, 3, 57]


def passes(runner: EagerRunner, seed: int) -> list[PassResult]:
    """Prompts, a ragged batch of trees with a pruning and rows joining, and a step behind what was kept."""
    torch.manual_seed(seed)
    vocabulary, width = runner.target.vocab_size, runner.target.hidden_size
    kv, _, dim = runner._layers[0].parts.heads
    prefix = [(torch.randn(kv, 3, dim), torch.randn(kv, 3, dim)) for _ in runner.target.layers] if seed % 2 else None
    cache = runner.new_cache(4, 300, prefix)
    results = []
    for slot, length in enumerate((5, 131, 17)):
        tokens = torch.randint(0, vocabulary, (1, length))
        causal = torch.ones(1, length, length, dtype=torch.bool).tril()
        results.append(runner.run(Plan(tokens, torch.arange(length)[None], causal), cache, slot))
        cache.commit([list(range(length))], results[-1].segments)
    rows, kept, joined = 7, 4, 2
    lengths = torch.tensor(cache.lengths[:3])[:, None]
    keep = torch.tensor([[0, 1, 3, 6], [0, 2, 3, 4], [0, 1, 2, -1]])
    visible = torch.ones(3, joined, kept + joined, dtype=torch.bool).tril(kept)
    surgeries = (
        Surgery(1, keep=keep),
        Surgery(2, append=lambda x: x[:, :joined] * 0.5, positions=lengths + 9 + torch.arange(joined), visible=visible),
    )
    plan = Plan(
        torch.randint(0, vocabulary, (3, rows)),
        lengths + torch.arange(rows),
        torch.ones(3, rows, rows, dtype=torch.bool).tril(),
        embeddings=torch.randn(3, 1, width),
        prefix_rows=None if prefix is None else torch.rand(3, rows) < 0.5,
        surgeries=surgeries,
        taps=(0, 1, 2, len(runner.target.layers)),
    )
    results.append(runner.run(plan, cache))
    cache.commit([[0, 1], [0], [0, 1, 2]], results[-1].segments)
    start = torch.tensor(cache.lengths[:3])[:, None]
    results.append(runner.run(Plan(torch.randint(0, vocabulary, (3, 1)), start, torch.ones(3, 1, 1).bool()), cache))
    return results


@pytest.mark.parametrize(("family", "threads", "seed"), crossed(FAMILIES, [1, 2], [2, 3]))
def test_same_as_tensor_operations(family: str, threads: int, seed: int) -> None:
    target = inspect_model(build(family))
    fast, plain = CpuRunner(target), EagerRunner(target)
    assert (fast.form, plain.form) == (f"cpu {native.ABI}", "eager")
    torch.set_num_threads(threads)
    try:
        results, expected = passes(fast, seed), passes(plain, seed)
    finally:
        torch.set_num_threads(1)
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
        for layer, hidden in theirs.hidden.items():
            torch.testing.assert_close(ours.hidden[layer], hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_the_model_as_tensor_operations(family: str) -> None:
    """The model's own logits, and its hidden states behind the first layers: both ways differ from them by rounding."""
    model = model_of(family, torch.bfloat16)
    torch.manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (1, 40))
    with torch.no_grad():
        said = model(tokens, output_hidden_states=True)
    target = inspect_model(model)
    plan = replace(Plan.causal(tokens, 0), taps=(1, 2))
    far = []
    for way in (CpuRunner(target), EagerRunner(target)):
        found = way.run(plan, way.new_cache(1))
        assert found.logits.dtype == found.hidden[1].dtype == torch.bfloat16
        parts = [(found.logits, said.logits), *((found.hidden[i], said.hidden_states[i]) for i in plan.taps)]
        far.append([float((ours.float() - own.float()).square().mean().sqrt()) for ours, own in parts])
    scale = float(said.logits.float().std())
    assert far[0][0] < 0.03 * scale
    for ours, theirs in zip(*far, strict=True):
        assert ours <= 1.5 * theirs + 2**-6 * scale


def test_logits_and_heads_of_states_are_those_of_a_pass() -> None:
    """What drafters ask for behind a pass, in the model's type."""
    model = model_of("qwen3", torch.bfloat16)
    runner = CpuRunner(inspect_model(model))
    count = len(runner.target.layers)
    plan = replace(Plan.causal(torch.arange(3, 12)[None], 0), taps=(count,))
    found = runner.run(plan, runner.new_cache(1))
    again = runner.logits(found.hidden[count])
    assert again.dtype == torch.bfloat16
    assert torch.equal(again, found.logits)
    read = runner.head(runner.close(found.hidden[count]))
    torch.testing.assert_close(read, found.logits, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("change", [lambda m: m.to(torch.float16), lambda m: m.double()])
def test_only_float32_and_bfloat16(change: Callable[[nn.Module], nn.Module]) -> None:
    model = change(copy.deepcopy(build("llama")))
    assert open_runner(model).name != "cpu"
    with pytest.raises(ValueError, match="runner='cpu' is for float32 and bfloat16 on a CPU"):
        open_runner(model, "cpu")


def test_an_odd_number_of_inputs_is_refused_in_bfloat16() -> None:
    model = construct(MEMBERS["llama"], intermediate_size=33)
    assert open_runner(model).name == "cpu"
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert open_runner(half).name == "eager"
    with pytest.raises(ValueError, match="a linear of this model has no whole number of them: use runner='auto'"):
        open_runner(half, "cpu")
    with pytest.raises(ValueError, match="a linear of this model has no whole number of them: leave it as it is"):
        pack_weights(half)


@pytest.mark.parametrize("damage", ["missing", "stale", "no library"])
def test_without_a_library_tensor_operations_do(damage: str, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "_draftree.so"
    if damage == "no library":
        path.write_text("no library")
    if damage == "stale":
        path = LIBRARY
        monkeypatch.setattr(native, "ABI", native.ABI + 1)
    monkeypatch.setattr(native, "LIBRARY", path)
    assert load_library.__wrapped__() is None
