"""Inflated drafters draft in the large model what they draft in the small one, step by step."""

from __future__ import annotations

import pytest
import torch
from few import crossed
from in_model_driver import MAKERS, make, randomised, recorded
from zoo import VOCABULARY, build

import draftree
from benchmarks.inflate.drafter import RULES, inflate_drafter
from benchmarks.inflate.model import inflate
from benchmarks.inflate.sizes import Size
from draftree.drafting import HiddenTransfer
from draftree.drafting.folder import base_of
from draftree.engine.generate import generate
from draftree.models import encode_prompt
from draftree.prompts import embedded_prompts
from draftree.pruning.early import EarlyHead
from draftree.registry import IN_MODEL
from draftree.shaping import Fixed

SIZES = {
    "same tokens": Size(128, 10, 8, 4, 32, 200, VOCABULARY),
    "more tokens": Size(96, 7, 4, 4, 24, 112, VOCABULARY + 15),  # and a key/value head for each query head
}


def steps_of(model, drafter, ids, nodes=8):
    seen = recorded(drafter)
    out = generate(model, ids, drafter=drafter, shape=Fixed(nodes), max_new_tokens=20)
    return seen, out


def same_steps(small, large, vocabulary):
    """The same tokens came, from the same walks, and each step drafted the same with the same probability."""
    assert torch.equal(small[1].sequences, large[1].sequences)
    assert len(small[0]) == len(large[0]) > 5
    for ours, theirs in zip(large[0], small[0], strict=True):
        assert (ours.tokens, ours.accepted) == (theirs.tokens, theirs.accepted)
        torch.testing.assert_close(ours.logp, theirs.logp, rtol=1e-3, atol=2e-3)
        assert torch.equal(ours.candidates[:, :2], theirs.candidates[:, :2])
        assert (ours.candidates < vocabulary).all()


@pytest.mark.parametrize(("size", "name"), crossed([*SIZES.values()], MAKERS))
def test_every_method_drafts_the_same(name, size):
    model = build("llama")
    large = inflate(model, shape=size)
    drafter = make(name, model)
    ids = torch.randint(0, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(3))
    expected = steps_of(model, drafter, ids)
    same_steps(expected, steps_of(large, inflate_drafter(drafter, large), ids), VOCABULARY)


@pytest.mark.parametrize("method", ["hidden-transfer", "medusa", "bita"])
def test_shipped_drafters_keep_their_acceptance(demo, method):
    large = inflate(demo.model, "20M")
    drafter = draftree.demo_drafter(method, demo.model)
    prompt = next(p for p in embedded_prompts() if p.set == "e2e" and not p.warm)
    ids = torch.tensor([encode_prompt(demo.tokenizer, prompt.text)])
    expected = steps_of(demo.model, drafter, ids)
    found = steps_of(large, inflate_drafter(drafter, large), ids)
    same_steps(expected, found, 4096)
    assert found[1].stats.total.accepted == expected[1].stats.total.accepted > 0


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@torch.no_grad()
def test_early_heads_say_the_same(rank, size):
    model = build("llama")
    large = inflate(model, shape=size)
    head = randomised(EarlyHead.fresh(model, layer=3, rank=rank, places=2))
    grown = inflate_drafter(head, large)
    assert grown.layer == 3 * size.layers // 4
    ids = torch.randint(0, VOCABULARY, (1, 12))
    states = model(ids, output_hidden_states=True).hidden_states[3]
    theirs = large(ids, output_hidden_states=True).hidden_states[grown.layer]
    said = torch.stack(grown.weights.ahead(theirs, large.get_output_embeddings()))
    expected = torch.stack(head.weights.ahead(states, model.get_output_embeddings()))
    torch.testing.assert_close(said[..., :VOCABULARY], expected, rtol=1e-3, atol=1e-3)
    assert (said[..., VOCABULARY:] < expected.min() - 1000).all()


def test_layers_of_transfers_are_those_of_the_same_share():
    model = build("llama")
    large = inflate(model, shape=Size(128, 10, 8, 4, 32, 200, VOCABULARY))
    grown = inflate_drafter(HiddenTransfer.fresh(model, transfer_layers=[1, 2, 3]), large)
    assert grown.transfer_layers == (2, 5, 7)


def test_every_method_has_rules():
    assert set(RULES) == set(IN_MODEL)


def test_what_does_not_fit_is_refused(demo):
    model = build("llama")
    drafter = HiddenTransfer.fresh(model)
    with pytest.raises(ValueError, match="This model was not inflated"):
        inflate_drafter(drafter, model)
    with pytest.raises(ValueError, match="made for a model with hidden_size 64, and the model was inflated from one"):
        inflate_drafter(drafter, inflate(demo.model, "20M"))
    drafter.base = base_of(build("llama-tied"))
    with pytest.raises(ValueError, match="was trained for 'llama', and the model was inflated from another"):
        inflate_drafter(drafter, inflate(model, shape=SIZES["same tokens"]))


def test_a_tensor_without_a_rule_is_named():
    model = build("llama")
    drafter = HiddenTransfer.fresh(model)
    drafter.weights.register_parameter("novel", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match="no rule to inflate 'novel' of a hidden-transfer drafter"):
        inflate_drafter(drafter, inflate(model, shape=SIZES["same tokens"]))
