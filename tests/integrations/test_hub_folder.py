"""The Hub's generation method works from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, TextIteratorStreamer

import draftree

FOLDER = Path(__file__).parents[2] / "integrations" / "hub"


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Return arguments that choose the folder; transformers copies its code to a temporary place."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return {"custom_generate": str(FOLDER), "trust_remote_code": True}


def inputs(demo: Any, text: str = "Tell me about the sea.") -> Any:
    messages = [{"role": "user", "content": text}]
    options: dict[str, Any] = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    return demo.tokenizer.apply_chat_template(messages, **options)


def test_greedy_and_sampled(demo: Any, door: dict[str, Any]) -> None:
    given = inputs(demo)
    plain = demo.model.generate(**given, max_new_tokens=40, do_sample=False)
    assert torch.equal(demo.model.generate(**given, **door, max_new_tokens=40, do_sample=False), plain)
    torch.manual_seed(3)
    drawn = demo.model.generate(**given, max_new_tokens=40, do_sample=True, temperature=0.8)
    torch.manual_seed(3)
    assert torch.equal(demo.model.generate(**given, **door, max_new_tokens=40, do_sample=True, temperature=0.8), drawn)


def test_stop_strings_of_a_config(demo: Any, door: dict[str, Any]) -> None:
    given = inputs(demo)
    config = GenerationConfig(stop_strings=["e "], max_new_tokens=40, do_sample=False)
    plain = demo.model.generate(**given, generation_config=config, tokenizer=demo.tokenizer)
    assert plain.shape[1] < given["input_ids"].shape[1] + 40
    ours = demo.model.generate(**given, **door, generation_config=config, tokenizer=demo.tokenizer)
    assert torch.equal(ours, plain)
    assert config.stop_strings == ["e "]


def test_drafters_and_streamers(demo: Any, door: dict[str, Any]) -> None:
    given = inputs(demo)
    plain = demo.model.generate(**given, max_new_tokens=40, do_sample=False)
    drafter = draftree.PromptLookup()
    assert torch.equal(demo.model.generate(**given, **door, max_new_tokens=40, drafter=drafter), plain)
    streamer = TextIteratorStreamer(demo.tokenizer, skip_prompt=True)
    demo.model.generate(**given, **door, max_new_tokens=40, streamer=streamer)
    assert "".join(streamer) == demo.tokenizer.decode(plain[0, given["input_ids"].shape[1] :])


def test_refusals(demo: Any, door: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="num_beams"):
        demo.model.generate(**inputs(demo), **door, num_beams=2)
