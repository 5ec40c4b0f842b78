"""Drafters by their names on the Hugging Face hub, which tests do not reach: its download is replaced."""

from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoModelForCausalLM
from zoo import build

import draftree
from draftree.by_name import check_drafter, make_drafter
from draftree.drafting import second_model

DATA = Path(__file__).parents[1] / "data" / "drafters"


def test_published_drafters(monkeypatch):
    asked = []

    def snapshot(name, allow_patterns):
        asked.append(allow_patterns)
        return str(DATA / "original_eagle3")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    target = AutoModelForCausalLM.from_pretrained(DATA / "target", dtype=torch.float32).eval()
    for load in (draftree.load_drafter, lambda name, model: make_drafter(name, None, model)):
        asked.clear()
        assert load("someone/EAGLE3", target).name == "eagle-3"
        assert "pytorch_model*.bin*" in asked[1]
    merged = make_drafter("lookahead+someone/EAGLE3", None, target)
    assert [drafter.name for drafter in merged.drafters] == ["lookahead", "eagle-3"]


def test_small_models(monkeypatch, tmp_path):
    small = build("llama")
    small.save_pretrained(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(tmp_path))
    asked = []

    def loaded(name, **options):
        asked.append(name)
        return small

    monkeypatch.setattr(second_model, "pretrained", loaded)
    assert make_drafter("someone/small", None, build("llama")).name == "draft-model"
    assert asked == ["someone/small"]


def test_no_drafter(monkeypatch, tmp_path):
    def snapshot(name, allow_patterns):
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ValueError, match=r"'someone/EAGLE3' is no drafter folder, and the hub gave no such repository"):
        check_drafter("someone/EAGLE3")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(tmp_path))
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 3}')
    with pytest.raises(ValueError, match="which draftree does not run"):
        check_drafter("someone/medusa")
