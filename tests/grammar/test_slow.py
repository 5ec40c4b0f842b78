"""Grammars that are slow to compile or to mask do not delay other requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from serve_driver import serving

from draftree import Grammar
from draftree.grammar import GrammarError, llguidance


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[threading.Thread]]:
    """Yield threads that compile until the test ends."""
    over, left = threading.Event(), list[threading.Thread]()
    with monkeypatch.context() as patch:
        patch.setattr(llguidance, "SECONDS", 0.05)
        patch.setattr(llguidance, "_left_behind", left)
        for _ in range(llguidance.MOST_LEFT_BEHIND):
            with pytest.raises(GrammarError, match="was not compiled within"):
                llguidance._in_time("regex", "a", over.wait)
        patch.setattr(llguidance, "SECONDS", 10.0)
        yield left
        over.set()
        for thread in left:
            thread.join()
    assert Grammar.regex("a text that is compiled when they have ended")


def test_the_client_is_told_to_come_again(demo: Any, endless: list[threading.Thread]) -> None:
    with serving(*demo) as server:
        asked = {"prompt": "Hi", "max_tokens": 2}
        refused = server.post("/v1/completions", **asked, structured_outputs={"regex": "another text, and a new one"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "60")
        assert server.post("/v1/completions", **asked).status_code == 200


def test_a_grammar_whose_masks_would_hold_up_all_others_is_refused(demo: Any) -> None:
    """The cost of a mask grows with the longest text, not with the number of texts or of a schema's parts."""
    vocabulary, ends = demo.model.config.vocab_size, [demo.tokenizer.eos_token_id]
    wide = {"type": "object", "properties": {f"field {i}": {"type": "string"} for i in range(300)}}
    for light in (Grammar.choice([f"city {i}" for i in range(5000)]), Grammar.json_schema(wide)):
        light.compile(demo.tokenizer, vocabulary, ends)
    long = " ".join(map(str, range(20_000)))
    for heavy in (Grammar.choice([long]), Grammar.json_schema({"const": long}), Grammar.regex("(abcdefghij){10000}")):
        with pytest.raises(GrammarError, match="ms for each token of an answer, and at most 10 are given: shorten"):
            heavy.compile(demo.tokenizer, vocabulary, ends)
