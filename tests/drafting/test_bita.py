"""BiTA: a mask row's logits are those of a slow, obvious pass over one sequence with everything spelt out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from few import crossed
from generate_driver import NEW, left_pad, prompts
from in_model_driver import agree, randomised, recorded
from torch import Tensor
from transformers import DynamicCache
from zoo import build

import draftree
from draftree.drafting import BiTA, in_model
from draftree.engine import generate
from draftree.runner import EagerRunner, inspect_model
from draftree.runner.step_cost import StepCost
from draftree.shaping import DynamicTree, Fixed
from draftree.training.run import prepare


@torch.no_grad()
def slow(model: Any, drafter: BiTA, tokens: list[int]) -> Tensor:
    """Logits [M, V] of masks behind `tokens`: prompts as a stock cache, masks as the last embeddings."""
    weights = drafter.weights
    m, p, n = len(weights.mask_embeddings), weights.prompt_keys.shape[2], len(tokens)
    cache = DynamicCache()
    for layer in range(len(weights.prompt_keys) if p else 0):
        cache.update(weights.prompt_keys[layer : layer + 1], weights.prompt_values[layer : layer + 1], layer)
    embedded = model.get_input_embeddings()(torch.tensor([tokens]))
    visible = torch.ones(n + m, n + m).tril().bool()
    visible = torch.cat([(torch.arange(n + m) >= n)[:, None].expand(-1, p), visible], 1)
    mask = torch.zeros(1, 1, n + m, p + n + m).masked_fill(~visible, torch.finfo(torch.float32).min)
    out = model(
        inputs_embeds=torch.cat([embedded, weights.mask_embeddings[None]], 1),
        attention_mask=mask,
        position_ids=torch.arange(n + m)[None],
        past_key_values=cache,
    )
    return out.logits[0, n:]


def runners(name: str) -> list[str]:
    return ["cpu", "hooked"] if EagerRunner.qualifies(inspect_model(build(name))) else ["hooked"]


@pytest.mark.parametrize(
    ("name", "options"),
    crossed(
        ["llama", "qwen3", "gemma", "gpt2", "gpt_neox"], [{}, {"prompts": 0, "masks": 2}, {"prompts": 5, "groups": 1}]
    ),
)
def test_mask_rows_equal_a_slow_pass(name: str, options: dict[str, Any]) -> None:
    model = build(name)
    drafter = randomised(BiTA.fresh(model, **options))
    ids, mask = left_pad(prompts())
    for runner in runners(name):
        seen = recorded(drafter)
        generate(model, ids, mask, drafter=drafter, shape=Fixed(12), max_new_tokens=NEW, runner=runner)
        assert any(s.accepted for s in seen)
        for s in seen[::4]:
            # With one group, the root of the step spoke, and what was accepted is passed.
            passed = s.accepted if options.get("groups") else 0
            agree(s, slow(model, drafter, s.tokens[: len(s.tokens) - 1 - passed])[passed:], f"{name}, {runner}")


@pytest.mark.parametrize("shape", ["fixed", "dynamic"])
def test_the_nearest_ancestor_speaks_for_a_node_without_masks(shape: str) -> None:
    """Some groups: whoever spoke is one of the nodes passed, and the deepest whose slow pass agrees."""
    model = build("llama")
    drafter = randomised(BiTA.fresh(model, groups=3 if shape == "fixed" else None))
    seen = recorded(drafter)
    ids, mask = left_pad(prompts())
    cheap = StepCost((1, 64), (1.0, 1.2))
    sized = Fixed(16) if shape == "fixed" else DynamicTree(cost=cheap)
    generate(model, ids, mask, drafter=drafter, shape=sized, max_new_tokens=NEW)
    own = 0
    for s in seen[::2]:
        finite = int((s.logp > -torch.inf).any(-1).sum())
        passed = drafter.depth - finite
        assert 0 <= passed <= s.accepted
        agree(s, slow(model, drafter, s.tokens[: len(s.tokens) - 1 - passed])[passed:])
        own += passed == 0
    assert own > len(seen[::2]) // 2


def drafts(model: Any, drafter: BiTA) -> list[Tensor]:
    """Log-probabilities of what is drafted in an answer."""
    seen = recorded(drafter)
    generate(model, torch.tensor(prompts((9,))), drafter=drafter, shape=Fixed(6), max_new_tokens=4)
    return [s.logp for s in seen]


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_shallow_prompts_are_what_the_model_makes_of_embeddings(family: str) -> None:
    """Their keys and values are those of the model's own forward over the embeddings; drafting reads them."""
    model = build(family)
    drafter, objective = prepare("bita", model, {"prompts": 4, "prompting": "shallow"}, {})
    drafter.weights.prompt_embeddings.normal_(generator=torch.Generator().manual_seed(1))
    objective.eval().prefix(2)
    cache = model(inputs_embeds=drafter.weights.prompt_embeddings[None], use_cache=True).past_key_values
    for layer, held in enumerate(cache.layers):
        torch.testing.assert_close(drafter.weights.prompt_keys[layer], held.keys[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(drafter.weights.prompt_values[layer], held.values[0], atol=1e-5, rtol=1e-4)
    before = drafts(model, drafter)
    drafter.weights.prompt_embeddings.mul_(-1)
    objective.prefix(2)
    assert not torch.allclose(before[0], drafts(model, drafter)[0])


@pytest.mark.parametrize("family", ["llama", "mpt"])
def test_shallow_prompts_are_trained_through_the_model(family: str) -> None:
    """Every embedding gets a gradient, and what drops out differs by sequence."""
    model = copy.deepcopy(build(family)).requires_grad_(False)
    drafter, objective = prepare("bita", model, {"prompts": 4, "prompting": "shallow"}, {"prefix_dropout": 0.5})
    held = drafter.weights.prompt_keys.clone()
    keys, _ = objective.train().prefix(2)[1]
    assert keys.shape[0] == 2
    assert not torch.equal(keys[0], keys[1])
    assert torch.equal(drafter.weights.prompt_keys, held)
    keys.square().sum().backward()
    assert bool(drafter.weights.prompt_embeddings.grad.any(1).all())


def test_what_a_tree_costs() -> None:
    model = build("llama")
    assert BiTA.fresh(model, masks=3).rows(10, 2) == 40
    assert BiTA.fresh(model, masks=3, depth=2).rows(10, 2) == 30
    assert BiTA.fresh(model, masks=3, groups=1).rows(10, 2) == 16
    assert BiTA.fresh(model, masks=3, groups=4).rows(3, 1) == 12
    assert BiTA.fresh(model, masks=3).rows(10, 1, 2) == 16
    assert BiTA.fresh(model, masks=3, groups=1).rows(10, 1, 2) == 13


def test_added_parameters_at_the_size_of_7b() -> None:
    """BiTA, table 1: about 0.01 to 0.06 % of the model."""
    with torch.device("meta"):
        weights = draftree.drafting.bita.BiTAWeights(4096, 32, 32, 128, masks=3, prompts=16)
    assert sum(w.numel() for w in weights.parameters()) / 6.74e9 < 0.001


@pytest.mark.parametrize(
    "options", [{"masks": 0}, {"prompts": -1}, {"prompting": "deeper"}, {"groups": 0}, {"depth": 4}, {"tree": "full-0"}]
)
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        BiTA.fresh(build("llama"), **options)


def test_nodes_with_groups_are_chosen_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device the second time might give others, whose rows speak of another text."""
    chosen: list[Any] = []
    choose = in_model.likeliest_ends
    monkeypatch.setattr(in_model, "likeliest_ends", lambda *given: chosen.append(given) or choose(*given))
    model = build("llama")
    drafter = randomised(BiTA.fresh(model, groups=2))
    out = generate(model, torch.tensor([prompts()[0]]), drafter=drafter, max_new_tokens=NEW, shape=Fixed(6))
    assert 3 < len(chosen) <= out.stats.total.steps
