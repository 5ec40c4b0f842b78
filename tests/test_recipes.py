"""Recipes run from end to end on a few rows: what they write is a model that drafts."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftree.bench.models import encode_prompt
from draftree.drafting import DraftModel
from draftree.engine import generate
from draftree.shaping import Fixed

RECIPES = Path(__file__).parent.parent / "recipes"


@pytest.mark.slow
def test_a_small_causal_model(demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (Path(__file__).parent.parent / "src/draftree/data/prompts.jsonl").read_text().splitlines()[:41]
    with (tmp_path / "rows.jsonl").open("w") as file:
        for line in lines:
            ids = encode_prompt(demo.tokenizer, json.loads(line)["prompt"])
            answer = generate(demo.model, torch.tensor([ids]), max_new_tokens=12).sequences[0, len(ids) :].tolist()
            file.write(json.dumps({"prompt_ids": ids, "answer_ids": answer}) + "\n")
    out = tmp_path / "small"
    options = ["--data", str(tmp_path), "--out", str(out), "--minutes", "0.05", "--tokens", "1024", "--hidden", "32"]
    monkeypatch.setattr(sys, "argv", ["small_causal.py", *options, "--mlp", "48"])
    runpy.run_path(str(RECIPES / "small_causal.py"), run_name="__main__")
    report = json.loads((out / "recipe.json").read_text())
    assert (report["texts"], report["held_out"]["texts"]) == (40, 1)
    small = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert sum(p.numel() for p in small.parameters()) == report["parameters"] < 200_000
    prompt = torch.tensor([ids])
    drafted = generate(demo.model, prompt, drafter=DraftModel(small), shape=Fixed(4), max_new_tokens=12)
    assert drafted.sequences[0, len(ids) :].tolist() == answer
    assert drafted.stats.total.drafted > 0
