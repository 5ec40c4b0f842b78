"""The first layers of a model as a stock model: the same logits as rows that exit there, the same parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from few import few
from runner_driver import one_thread
from zoo import CAUSAL, CORE, ENCODER_DECODER, MEMBERS, build, construct

import draftree
from draftree.drafting.early_exit import early_exit_model
from draftree.runner import pack_weights
from draftree.runner.hooked.runner import HookedRunner
from draftree.runner.layout.skip import Skip
from draftree.runner.target import inspect_model

__all__ = ["one_thread"]
FAMILIES = few([m.id for m in CAUSAL + ENCODER_DECODER], CORE)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_says_what_the_layers_say(name: str) -> None:
    model = build(name)
    small = early_exit_model(model, 2)
    ids = torch.tensor([[5, 9, 3, 0, 7, 11, 4, 8, 2, 6, 13]])
    given = {"input_ids": ids}
    if MEMBERS[name].encoder_decoder:
        given = {"input_ids": ids.flip(1), "decoder_input_ids": ids}
    runner = HookedRunner(inspect_model(model))
    with runner.bypass.without(Skip.behind(2, 4)):
        expected = model(**given).logits
    torch.testing.assert_close(small(**given).logits, expected, rtol=0, atol=1e-5)
    own = dict(model.named_parameters())
    assert all(own[key] is parameter for key, parameter in small.named_parameters())
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())


def test_drafts_and_saves_as_any_model(tmp_path: Path) -> None:
    model = construct(MEMBERS["llama"])
    small = early_exit_model(model, 1)
    ids = torch.tensor([[5, 9, 3, 0, 7]])
    mask = torch.ones_like(ids)  # the pad token is one of the prompt's
    expected = draftree.generate(model, ids, mask, max_new_tokens=24).sequences
    pair = draftree.BiLD(small, fallback_threshold=0, lossless=True)
    for drafter, shape in ((draftree.DraftModel(small, depth=3, confidence=0), draftree.Fixed(8)), (pair, None)):
        out = draftree.generate(model, ids, mask, drafter=drafter, shape=shape, max_new_tokens=24)
        assert out.sequences.tolist() == expected.tolist()
        assert out.stats.total.drafted > 0
    small.save_pretrained(tmp_path)
    again = type(small).from_pretrained(tmp_path)
    assert len(again.model.layers) == 1
    torch.testing.assert_close(again(ids).logits, small(ids).logits)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()
    assert not small.model.layers[0].mlp.down_proj.weight.any()  # one set of weights


def test_what_cannot_be_is_refused() -> None:
    model = build("llama")
    for layers in (0, 4):
        with pytest.raises(ValueError, match="give 1 to 3"):
            early_exit_model(model, layers)
    packed = construct(MEMBERS["llama"])
    pack_weights(packed)
    with pytest.raises(ValueError, match="take the early layers of the model as it was loaded"):
        early_exit_model(packed, 2)
    with pytest.raises(TypeError):
        early_exit_model("llama", 2)
