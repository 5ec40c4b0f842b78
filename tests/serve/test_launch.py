"""A server that is tried before others make it leaves nothing behind."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
from zoo import build

from draftree.drafting import Lookahead
from draftree.serve import launch
from draftree.serve.launch import Launch


def parts(model: Any, tokenizer: Any) -> dict[str, Any]:
    return {"drafter": Lookahead(), "pruner": None}


def test_a_launch_that_was_checked_keeps_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    load, seen = launch.load_model, []

    def watched(*arguments: Any) -> Any:
        model, tokenizer = load(*arguments)
        seen.append(weakref.ref(model))
        return model, tokenizer

    monkeypatch.setattr(launch, "load_model", watched)
    Launch(None, parts).check()
    assert [model() for model in seen] == [None]


def test_a_launch_of_an_encoder_decoder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "load_model", lambda *_: (build("t5"), None))
    with pytest.raises(ValueError, match=r"decoder-only models: use draftree\.generate"):
        Launch(None, parts).check()
