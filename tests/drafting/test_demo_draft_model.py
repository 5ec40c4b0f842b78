"""The small model that ships with the package: that it drafts for the embedded one, and for no other."""

from __future__ import annotations

import copy
import json
from importlib import resources
from typing import Any

import pytest
import torch
from generate_driver import same

from draftree.by_name import make_drafter
from draftree.drafting import DraftModel
from draftree.drafting.folder import demo_drafter
from draftree.engine import generate
from draftree.models import encode_prompt
from draftree.shaping import Fixed

PROMPTS = (
    "Describe the restaurant: name[The Rice Boat], food[Fast food], area[city centre]",
    "Tom has 12 apples and buys 30 more. How many apples does he have?",
    "Write a Python function that returns the sum of a list of numbers.",
)


def test_the_small_model_drafts_for_the_embedded_one(demo: Any) -> None:
    small = demo_drafter("draft-model", demo.model).model
    for beam in (1, 4):
        steps = emitted = 0
        for prompt in PROMPTS:
            ids = torch.tensor([encode_prompt(demo.tokenizer, prompt)])
            plain = generate(demo.model, ids, max_new_tokens=48)
            drafter = DraftModel(small, beam=beam, confidence=0)
            out = generate(demo.model, ids, drafter=drafter, shape=Fixed(16), max_new_tokens=48)
            same(out.sequences, plain.sequences)
            steps, emitted = steps + out.stats.total.steps, emitted + out.stats.total.emitted
        assert emitted / steps > 1.8


def test_the_small_model_is_small_and_told_of() -> None:
    folder = resources.files("draftree") / "data" / "chat_600k"
    assert sum(p.stat().st_size for p in folder.iterdir()) < 3_000_000
    recipe = json.loads((folder / "recipe.json").read_text())
    assert recipe["parameters"] < 700_000
    assert recipe["held_out"]["top 1"] > 0.5
    assert recipe["seconds"] < 30 * 60
    assert "/" + "work" not in json.dumps(recipe)


def test_the_small_model_is_the_embedded_ones(demo: Any) -> None:
    other = copy.deepcopy(demo.model)
    with torch.no_grad():
        other.model.norm.weight += 1
    with pytest.raises(ValueError, match="drafts for the embedded model"):
        demo_drafter("draft-model", other)


def test_the_command_line_takes_a_folder_of_a_small_model(demo: Any, tmp_path: Any) -> None:
    demo_drafter("draft-model", demo.model).model.save_pretrained(tmp_path)
    assert isinstance(make_drafter(str(tmp_path), demo.tokenizer, demo.model), DraftModel)
