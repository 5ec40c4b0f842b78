"""Stock models are known as such, and stay so whatever passes leave on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from few import few
from generate_driver import prompts

import draftree
from draftree.engine import Engine, SamplingParams, generate
from draftree.runner.weights import stock

IDS = prompts((16,))[0]


def fresh(name: str = "llama", **settings: Any) -> Any:
    return zoo.construct(zoo.MEMBERS[name], **settings)


def theirs(model: Any) -> list[int]:
    ids = torch.tensor([IDS])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    found: list[int] = out[0, len(IDS) :].tolist()
    return found


def ours(model: Any) -> list[int]:
    out = generate(model, torch.tensor([IDS]), drafter=draftree.Lookahead(), max_new_tokens=12, do_sample=False)
    found: list[int] = out.sequences[0, len(IDS) :].tolist()
    return found


@pytest.mark.parametrize("name", few([*zoo.MEMBERS], [*zoo.MEMBERS][::3]))
def test_members_of_the_zoo_are_stock(name: str) -> None:
    assert stock.alteration(zoo.build(name)) is None


# ---------------------------------------------------------------- as they were


def answer(engine: Engine, prompt: list[int]) -> list[int]:
    request = engine.add(prompt, SamplingParams(3))
    engine.run()
    return request.tokens


DYNAMIC = {
    "full_attention": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("phi3-longrope", {}),
        ("llama-dynamic", {}),
        ("gemma3", {"max_position_embeddings": 64, "rope_parameters": DYNAMIC}),
    ],
)
def test_a_stock_pass_of_any_length_changes_no_model(name: str, settings: dict[str, Any]) -> None:
    model = fresh(name, **settings)
    with Engine(model) as engine:
        first = answer(engine, IDS)
        for length in (10, 100, 10):  # across the length at which frequencies change
            with torch.no_grad():
                model(torch.tensor([[5] * length]))
            assert answer(engine, IDS) == first


def test_a_pass_that_checks_the_model_does_not_change_it() -> None:
    model = fresh("phi3-longrope")
    model.model.layers[1].mlp.register_forward_hook(lambda module, given, out: out * 0.9)
    with Engine(model) as engine:
        assert len(answer(engine, IDS)) == 3


def test_nothing_is_kept_where_a_hook_may_do_something_else_the_next_time() -> None:
    model, strength = fresh(), [1.5]
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, out: out * strength[0])
    with Engine(model, slots=1, keep_prefixes=True) as engine:
        turn = [*IDS, *answer(engine, IDS), 4]
        strength[0] = -0.5
        found = answer(engine, turn)
    with Engine(model, slots=1) as engine:
        assert answer(engine, turn) == found


def test_a_model_compiled_by_torch_is_stock() -> None:
    model = fresh()
    model.compile(backend="eager")
    assert stock.alteration(model) is None
