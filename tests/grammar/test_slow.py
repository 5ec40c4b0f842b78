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
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile without end until the test ends, in all places."""
    over = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(llguidance, "SECONDS", 0.05)
        for _ in range(2):
            with pytest.raises(GrammarError, match="was not compiled within"):
                llguidance._in_time("regex", "a", over.wait)
        yield
        over.set()
    assert Grammar.regex("a text that is compiled when they have ended")


@pytest.mark.usefixtures("busy")
def test_a_client_is_asked_to_try_again(demo: Any) -> None:
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
