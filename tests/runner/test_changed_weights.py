"""A model that was changed between two calls answers with its new weights, however they were changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from zoo import MEMBERS, construct

import draftree
from draftree.engine import Engine
from draftree.runner import open_runner

PROMPT = torch.tensor([[5, 9, 3, 17, 4]])


def by_fused_optimizer(model: Any) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    model(PROMPT, labels=PROMPT).loss.backward()
    optimizer.step()
    model.eval()


def by_data(model: Any) -> None:
    model.get_output_embeddings().weight.data.neg_()


def by_assigning_data(model: Any) -> None:
    for parameter in model.model.layers[0].parameters():
        parameter.data = -parameter.data


WAYS = (by_fused_optimizer, by_data, by_assigning_data)


def own(model: Any) -> list[int]:
    with torch.no_grad():
        return model.generate(PROMPT, max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()


def ours(model: Any, runner: str, drafter: Any = None) -> list[int]:
    out = draftree.generate(model, PROMPT, drafter=drafter, runner=runner, max_new_tokens=12, do_sample=False)
    return out.sequences[0].tolist()


@pytest.mark.parametrize("runner", ["auto", "eager", "hooked", "cuda_graphs"])
@pytest.mark.parametrize("change", WAYS)
def test_the_next_answer_is_that_of_the_changed_model(runner: str, change: Callable[[Any], None]) -> None:
    model, drafter = construct(MEMBERS["llama"]), draftree.Lookahead()
    before = own(model)
    assert ours(model, runner, drafter) == ours(model, runner) == before
    change(model)
    after = own(model)
    assert after != before, "the change is one that shows"
    assert ours(model, runner) == after
    assert ours(model, runner, drafter) == after


@pytest.mark.parametrize("change", WAYS)
def test_an_engine_does_not_answer_with_old_weights(change: Callable[[Any], None]) -> None:
    model = construct(MEMBERS["llama"])
    engine = Engine(model, slots=2)
    first, second = engine.add([5, 9, 3]), engine.add([4, 4])
    engine.run()
    assert first.output
    assert second.output
    engine.add([7])
    change(model)
    engine.add([8])  # while requests run nothing is looked at
    engine.run()
    with pytest.raises(ValueError, match="model has changed since this engine was made"):
        engine.add([5, 9, 3])
    assert Engine(model).add([5, 9, 3]) is not None


def test_a_runner_opened_before_the_change_is_refused() -> None:
    model = construct(MEMBERS["llama"])
    runner: Any = open_runner(model)
    ours(model, runner)
    by_data(model)
    with pytest.raises(ValueError, match="since this runner was opened"):
        ours(model, runner)
    with pytest.raises(ValueError, match="since this runner was opened"):
        model.generate(PROMPT, custom_generate=draftree.custom_generate(runner=runner), max_new_tokens=4)
    assert ours(model, "auto") == own(model)


def test_packed_weights_that_change_are_noticed() -> None:
    model = construct(MEMBERS["llama"])
    draftree.runner.pack_weights(model)
    before = ours(model, "auto")
    model.model.layers[0].mlp.down_proj.packed.neg_()
    model.model.layers[1].mlp.down_proj.packed.data.neg_()
    assert ours(model, "auto") == own(model) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda model: None,
        lambda model: model.to(torch.bfloat16),
        lambda model: model.model.layers[1].register_forward_pre_hook(lambda module, args: None),
        by_data,
    ],
    ids=["none", "type", "hook", "weights"],
)
def test_a_runner_serves_as_long_as_the_model_stays_as_it_is(change: Callable[[Any], Any]) -> None:
    model = construct(MEMBERS["llama"])
    runner = open_runner(model)
    assert open_runner(model) is open_runner(model, "cpu") is runner
    assert open_runner(model, "hooked") is open_runner(model, "hooked") is not runner
    unchanged = change(model) is None and change is not by_data
    assert (open_runner(model) is runner) == unchanged
    assert runner.outdated != unchanged


def test_keys_that_old_weights_made_are_not_taken_over() -> None:
    """The hooked runner reads the weights as they are, so that nothing is old but what earlier prompts left."""
    model = construct(MEMBERS["llama"])
    begun = [5, 6, 7, 8, 9, 10]
    with draftree.Engine(model, slots=2, keep_prefixes=True, runner="hooked") as engine:
        first = engine.add(begun, max_new_tokens=6)
        engine.run()
        again = engine.add([*begun, *first.tokens, 4], max_new_tokens=6)
        engine.run()
        assert again.reused == len(begun) + len(first.tokens) - 1, "as nothing has changed"
        model.model.layers[0].mlp.down_proj.weight.data.mul_(-1.5)
        changed = engine.add([*begun, *first.tokens, 4], max_new_tokens=6)
        engine.run()
        assert changed.reused == 0
        assert changed.tokens == ours_of(model, [*begun, *first.tokens, 4], "hooked")
        assert changed.tokens != again.tokens


def ours_of(model: Any, prompt: list[int], runner: str) -> list[int]:
    out = draftree.generate(model, torch.tensor([prompt]), runner=runner, max_new_tokens=6, do_sample=False)
    return out.sequences[0, len(prompt) :].tolist()
