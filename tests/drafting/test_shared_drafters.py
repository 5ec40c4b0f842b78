"""One drafter object in two engines whose steps alternate: each engine's text is its own model's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drafters_for_tests import InModel
from generate_driver import drafters, noisy, prompts
from zoo import build

from draftree.drafting import BiTA, Drafter, HiddenTransfer, Medusa, Merge, PromptLookup
from draftree.engine import Engine, Request, State
from draftree.pruning import EarlyHead, EarlyPruning
from draftree.pruning.pruner import STAY_FIRST
from draftree.runner.target import Target, inspect_model
from draftree.shaping import Fixed

PROMPTS, NEW = prompts((9, 6)), 16
KINDS = [name for name, make in drafters({}).items() if not isinstance(make(), InModel)]
INSIDE = {"bita": BiTA, "hidden-transfer": HiddenTransfer, "medusa": Medusa}


def deeper(model: Any) -> Any:
    """A model of the same vocabulary with one layer more and wider."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers += 1
    config.hidden_size, config.intermediate_size = 2 * config.hidden_size, 2 * config.intermediate_size
    torch.manual_seed(8)
    return type(model)(config).eval()


def plain(model: Any) -> list[list[int]]:
    """What the model says by itself."""
    engine = Engine(model, slots=2)
    requests = [engine.add(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    engine.run()
    return texts(requests)


def texts(requests: list[Request]) -> list[list[int]]:
    return [[emitted.token for emitted in request.output] for request in requests]


def alternating(drafter: Drafter, models: list[Any], **options: Any) -> None:
    """Each engine opens when those before it are under way; then they take turns."""
    engines: list[Engine] = []
    requests: list[list[Request]] = []
    for model in models:
        engines.append(Engine(model, drafter=drafter, shape=Fixed(6), slots=2, **options))
        requests.append([engines[-1].add(prompt, max_new_tokens=NEW) for prompt in PROMPTS])
        for engine in engines:
            engine.step()
    while any(request.state is not State.FINISHED for own in requests for request in own):
        for engine in engines:
            engine.step()
    for model, own in zip(models, requests, strict=True):
        assert texts(own) == plain(model)


@pytest.mark.parametrize("name", KINDS)
def test_models_of_other_sizes(name: str) -> None:
    model = build("llama")
    alternating(drafters({})[name](), [model, deeper(model)])


def test_an_early_head_and_models_of_other_types() -> None:
    model = build("llama")
    pruner = EarlyPruning(EarlyHead.fresh(model, layer=2), top_k=3, always=True)
    alternating(PromptLookup(), [model, copy.deepcopy(model).double()], pruner=pruner)
    assert pruner._looks.stay != STAY_FIRST  # it did look


@pytest.mark.parametrize("name", INSIDE)
def test_models_of_other_types(name: str) -> None:
    model = build("llama")
    other = copy.deepcopy(noisy("llama")).double()
    alternating(INSIDE[name].fresh(model), [model, other, model])


@pytest.mark.parametrize("merged", [False, True])
def test_a_deep_prefix_is_of_the_engines_own_model(*, merged: bool) -> None:
    """Also where an engine of another model is made by another thread in the middle of it."""
    model = build("llama")
    other = copy.deepcopy(model).double()

    class Interrupted(BiTA):
        def bind(self, target: Target, *, eos_token_ids: Sequence[int] = ()) -> None:
            super().bind(target, eos_token_ids=eos_token_ids)
            super().bind(inspect_model(other if target.dtype == torch.float32 else model), eos_token_ids=eos_token_ids)

    drafter = Interrupted.fresh(model)
    for own in (model, other):
        prefix = Engine(own, drafter=Merge([drafter, PromptLookup()]) if merged else drafter).cache.prefix
        assert prefix is not None
        assert prefix[0][0].dtype == own.dtype
