"""Recurrent layers in C: against the stock model, the runner that calls its own functions, and each other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo
from few import crossed
from runner_driver import Run, Tree, one_thread  # noqa: F401
from torch import Tensor

import draftree
from draftree.native import WIDEST, library, load_library, started
from draftree.runner import open_runner, pack_weights
from draftree.runner.base import Runner
from draftree.runner.cpu.states import CompiledStates

pytestmark = pytest.mark.skipif(load_library() is None, reason="not built: python hatch_build.py")
PROMPTS = (5, 97, 64)  # Rows of a prompt go in blocks of 32.
# Heads as wide as a vector, wider and of no whole vector; one value head to a key head and several; other kernels.
EVEN = {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 24, "linear_value_head_dim": 40}
WIDE = {"linear_num_key_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 80, "linear_conv_kernel_dim": 2}
SHAPES: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("qwen3_5", {}), ("qwen3_5", EVEN), ("qwen3_5", WIDE)),
    *(("lfm2", {}), ("lfm2", {"conv_bias": True, "conv_L_cache": 5})),
)
FAMILIES = ("qwen3_5", "lfm2")


def steps(runner: Runner, count: int = 4, seed: int = 4) -> tuple[Run, list[Tensor], float]:
    """Commit paths of random trees in three ragged requests; return logits and the largest difference from stock."""
    run, found, worst = Run(runner, PROMPTS, seed=seed).prefill(), [], 0.0
    for step in range(count):
        trees = [Tree.random(1 + (step * 5 + 7 * b) % 12, 100 * step + b) for b in range(3)]
        result = run.step(trees, sizes=tuple(tree.size for tree in trees))
        found += [result.logits[b, : tree.size].float() for b, tree in enumerate(trees)]
        if runner.target.dtype == torch.float32:
            worst = max(worst, run.error(trees, result))
        run.commit(trees, [tree.branches[-1] for tree in trees], result)
    return run, found, worst


@pytest.mark.parametrize(("widest", "shape", "threads"), crossed([4, 8, 16, WIDEST], range(len(SHAPES)), [2, 1]))
def test_trees_and_their_commits(widest: int, shape: int, threads: int) -> None:
    name, settings = SHAPES[shape]
    model = zoo.construct(zoo.MEMBERS[name], **settings)
    assert started(library(), widest) is not None
    torch.set_num_threads(threads)
    try:
        runner = open_runner(model)
        assert runner.name == "cpu"
        run, _, error = steps(runner)
        assert error < 5e-5
    finally:
        torch.set_num_threads(1)
        started(library(), WIDEST)
    # States are those of the text read anew, whatever the steps were.
    again = runner.new_cache(1)
    assert isinstance(again, CompiledStates)
    assert isinstance(run.cache, CompiledStates)
    other = Run(runner, [len(run.texts[1])])
    other.cache, other.prompts = again, [run.texts[1]]
    other.prefill()
    for held, anew in zip(run.cache._recurrent_stores, again._recurrent_stores, strict=True):
        torch.testing.assert_close(held[1], anew[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_node_depends_on_its_path_alone(name: str, dtype: torch.dtype) -> None:
    """To the last bit: among other nodes, in a chain of its own, in a batch; and no pass leaves a trace."""
    model = copy.deepcopy(zoo.build(name)).to(dtype)
    run = Run(open_runner(model), [40]).prefill()
    assert isinstance(run.cache, CompiledStates)
    tree = Tree.random(14, 3)
    before = [held.clone() for held in run.cache._recurrent_stores]
    result = run.step([tree])
    for leaf in (5, 13):
        chain = Tree([-1, *range(len(tree.branches[leaf]) - 1)], 0)
        chain.tokens = tree.tokens[tree.branches[leaf]]
        assert torch.equal(run.step([chain]).logits[0], result.logits[0, tree.branches[leaf]])
    for held, kept in zip(run.cache._recurrent_stores, before, strict=True):
        assert torch.equal(held, kept)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_rounds_as_the_model(name: str) -> None:
    """Both runners differ from float32 by rounding, and less from each other."""
    model = zoo.build(name)
    exact = torch.cat(steps(open_runner(model, "hooked"))[1])
    halves = copy.deepcopy(model).bfloat16()
    stock, ours = (torch.cat(steps(open_runner(halves, name))[1]) for name in ("hooked", "cpu"))

    def far(one: Tensor, other: Tensor) -> float:
        return float((one - other).square().mean().sqrt())

    assert far(ours, exact) < 1.2 * far(stock, exact)
    assert far(ours, stock) < 0.5 * far(stock, exact)


@pytest.mark.parametrize(
    ("name", "settings"), [("qwen3_5", {}), ("qwen3_5", {"linear_num_value_heads": 16}), ("lfm2", {})]
)
def test_packed_weights(name: str, settings: dict[str, Any]) -> None:
    """The same to the last bit, and the model itself computes with them as before."""
    model: Any = zoo.construct(zoo.MEMBERS[name], **settings)
    packed = copy.deepcopy(model)
    pack_weights(packed)
    assert not any(type(linear) is torch.nn.Linear for linear in packed.model.layers[0].modules())
    for ours, theirs in zip(steps(open_runner(packed))[1], steps(open_runner(model))[1], strict=True):
        assert torch.equal(ours, theirs)
    assert steps(open_runner(packed, "hooked"), 1)[2] < 5e-5
    draftree.unpack_weights(packed)
    for name, tensor in model.state_dict().items():
        assert torch.equal(packed.state_dict()[name], tensor)


def test_a_pass_keeps_little_of_each_node() -> None:
    model = zoo.construct(zoo.MEMBERS["qwen3_5"], linear_key_head_dim=64, linear_value_head_dim=64)
    run = Run(open_runner(model), [100]).prefill()
    assert isinstance(run.cache, CompiledStates)
    run.step([Tree.random(8, 1)])
    kept = sum(t.numel() for _, made in run.cache._rows.values() for t in made if t is not None)
    states = sum(state[0].numel() for state in run.cache.states.values())
    assert kept < 8 * states / 8
