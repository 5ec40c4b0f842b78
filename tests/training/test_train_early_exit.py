"""Training for early exits: both losses, a copy of the model, a stock folder whose exit drafts for the whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runner_driver import one_thread
from test_training import OPTIONS, data_for
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from zoo import MEMBERS, build, construct

import draftree
from draftree.drafting.early_exit import early_exit_model
from draftree.training.early_exit import exit_weights, train_early_exit
from draftree.training.rows import Row, collate
from draftree.training.whole_model import EarlyExitObjective

__all__ = ["one_thread"]


def test_the_exit_learns_and_the_model_is_another(tmp_path: Path) -> None:
    model = construct(MEMBERS["llama"])
    data = data_for(model, tmp_path / "data")
    before = [p.clone() for p in model.parameters()]
    options = replace(OPTIONS, steps=24, learning_rate=1e-2)
    told: list[str] = []
    recipe = train_early_exit(model, data, tmp_path / "out", 2, options=options, report=told.append)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert recipe["agreement"]["before"]["model"] == 1.0, "the data is its own"
    assert recipe["agreement"]["after"]["exit"] > recipe["agreement"]["before"]["exit"]
    assert recipe == json.loads((tmp_path / "out" / "recipe.json").read_text())
    assert told
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert len(trained.model.layers) == 4
    assert not torch.equal(trained.lm_head.weight, model.lm_head.weight)
    ids = torch.tensor([[5, 9, 3, 0, 7]])
    plain = draftree.generate(trained, ids, torch.ones_like(ids), max_new_tokens=16)
    drafter = draftree.SelfSpeculative(exit_layer=2)
    drafted = draftree.generate(trained, ids, torch.ones_like(ids), drafter=drafter, max_new_tokens=16)
    assert torch.equal(plain.sequences, drafted.sequences)


@pytest.mark.parametrize("name", ["llama", "gemma2", "t5"])
def test_losses_are_those_of_two_stock_models(name: str) -> None:
    model = build(name)
    source = ((9, 8, 7, 6), (5, 4)) if name == "t5" else ((), ())
    rows = [Row((0, 5, 6, 7, 8, 9), 2, source[0]), Row((0, 1, 2, 3), 1, source[1])]
    batch = collate([(row, None) for row in rows], None)
    objective = EarlyExitObjective(model, {2: 0.5}).eval()
    with torch.no_grad():
        out = objective(**batch)
        expected, cases = [0.0, 0.0], 0
        for row in rows:
            ids = torch.tensor([row.tokens])
            given = (
                {"input_ids": ids}
                if not row.source
                else {"input_ids": torch.tensor([row.source]), "decoder_input_ids": ids}
            )
            for i, one in enumerate((early_exit_model(model, 2), model)):
                logits = one(**given).logits[0, row.start - 1 : -1]
                expected[i] += float(F.cross_entropy(logits, ids[0, row.start :], reduction="sum"))
            cases += len(row) - row.start
    assert float(out["loss"]) == pytest.approx(sum(expected) / 2 / cases, rel=1e-4)
    assert out["seen"].tolist() == [cases, cases]


def test_weights_of_layers() -> None:
    assert exit_weights(2, 4, every_layer=False) == {2: 0.5}
    every = exit_weights(2, 4, every_layer=True)
    assert every == {2: 0.2, 1: 0.1, 3: 0.3}
    assert next(iter(every)) == 2
    with pytest.raises(ValueError, match="give 1 to 3"):
        exit_weights(4, 4, every_layer=False)
    with pytest.raises(ValueError, match="is no data set"):
        train_early_exit(build("llama"), Path("/nowhere"), Path("/nowhere"), 2)
