"""Parts left out of a pass: the logits of a stock model whose parts are silent, on every runner; nothing stays.

The context is the whole model's in any case: only the rows of the pass leave something out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from few import few
from runner_driver import BUSHY, Run, Tree, difference, one_thread, runners_for
from torch import Tensor
from zoo import CAUSAL, CORE, ENCODER_DECODER, build

from draftree.runner import HookedRunner, inspect_model
from draftree.runner.hooked.bypass import omitted_modules
from draftree.runner.layout.skip import Omitted, Skip

__all__ = ["one_thread"]
SKIPS = {
    "exit": Skip.behind(2, 4),
    "layer": Skip.of([1], [1]),
    "attention": Skip.of([2, 3]),
    "mlp": Skip.of([], [1, 3]),
    "mixed": Skip.of([1, 3], [2, 3]),
}
FAMILIES = few([m.id for m in CAUSAL + ENCODER_DECODER], CORE)


def silence(model: Any, skip: Skip) -> ExitStack:
    """Stock modules that run as ever, and whose say is replaced afterwards."""

    def hook(zeros: bool) -> Any:
        def replace(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
            stream = args[0] if args else next(v for v in kwargs.values() if isinstance(v, Tensor))
            residual = kwargs.get("residual", args[1] if len(args) > 1 and type(module).__name__ in RESIDUAL else None)
            said = output[0] if isinstance(output, tuple) else output
            said = residual if residual is not None else 0 * said if zeros else stream
            return (said, *output[1:]) if isinstance(output, tuple) else said

        return replace

    stack = ExitStack()
    for i, layer in enumerate(inspect_model(model).layers):
        if skip.at(i):
            # Of an MLP in two linears the second one's say is the MLP's.
            for module, zeros in omitted_modules(layer, skip.at(i))[-1:]:
                stack.callback(module.register_forward_hook(hook(zeros), with_kwargs=True).remove)
    return stack


RESIDUAL = ("BloomAttention", "BloomMLP", "MptMLP")


@torch.no_grad()
def stock(model: Any, text: Tensor, source: Tensor | None) -> Callable[[Skip, Tensor], Tensor]:
    """What gives logits [V] at the end of a branch behind `text`, which the whole model has read."""
    given = {"input_ids": text} if source is None else {"input_ids": source, "decoder_input_ids": text}
    read = model(**{name: ids[None] for name, ids in given.items()}, use_cache=True)
    encoded = {} if source is None else {"encoder_outputs": (read.encoder_last_hidden_state,)}

    @torch.no_grad()
    def behind(skip: Skip, branch: Tensor) -> Tensor:
        given = encoded | {"input_ids" if source is None else "decoder_input_ids": branch[None]}
        with silence(model, skip):
            out = model(**given, past_key_values=copy.deepcopy(read.past_key_values), use_cache=True)
        logits: Tensor = out.logits[0, -1]
        return logits

    return behind


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_that_leave_parts_out(name: str) -> None:
    model = build(name)
    trees = [Tree(BUSHY, 3), Tree.random(9, 4)]
    texts = Run(HookedRunner(inspect_model(model)), (21, 13)).prefill()
    references = [stock(model, *of_one) for of_one in zip(texts.texts, texts.sources, strict=True)]
    for kind, skip in SKIPS.items():
        expected = {
            (b, node): references[b](skip, tree.tokens[tree.branches[node]])
            for b, tree in enumerate(trees)
            for node in (0, tree.size // 2, tree.size - 1)
        }
        for runner in runners_for(model):
            run = Run(runner, (21, 13)).prefill()
            plain = run.step(trees).logits
            logits = run.step(trees, skip=skip).logits
            assert difference(logits[0], plain[0]) > 0.1, (kind, runner.name)
            for (b, node), wanted in expected.items():
                assert difference(logits[b, node], wanted) < 3e-4, (kind, runner.name, b, node)
            assert difference(run.step(trees).logits, plain) == 0, (kind, runner.name)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_failing_pass_leaves_nothing_behind() -> None:
    model = build("llama")
    run = Run(HookedRunner(inspect_model(model)), (9,)).prefill()
    tree = Tree(BUSHY, 3)
    tree.tokens = tree.tokens + 1000  # no such tokens
    with pytest.raises(IndexError):
        run.step([tree], skip=Skip.behind(1, 4))
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_model_is_watched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in is found in one more pass of a row, the first time; later passes cost what they leave in."""
    runner = HookedRunner(inspect_model(build("t5")))
    run = Run(runner, (9,)).prefill()
    watched = []
    one_row = runner.bypass._one_row
    monkeypatch.setattr(runner.bypass, "_one_row", lambda: (watched.append(1), one_row()))
    for _ in range(3):
        run.step([Tree((-1,), 3)], skip=Skip.behind(2, 4))
    for _ in range(3):
        run.step([Tree((-1,), 3)], leaves=lambda ran, before, behind: ran == 2)
    assert len(watched) == 2  # the later layers, then the rest


def test_a_part_that_is_not_found_is_told() -> None:
    with pytest.raises(ValueError, match="leave out whole layers"):
        omitted_modules(torch.nn.Linear(2, 2), Omitted.MLP)
