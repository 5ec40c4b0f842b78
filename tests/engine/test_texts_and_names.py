"""Prompts as text and drafters by name: the same ids as by ids and by objects, and one sentence for what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zoo import MEMBERS, construct

import draftree
from draftree.encoding import encode_prompt

ASKED = ["Write a shell command using ls: List all files.", "Name three colours."]


def by_ids(demo: Any, text: str, new: int = 24) -> list[int]:
    ids = torch.tensor([encode_prompt(demo.tokenizer, text)])
    found: list[int] = draftree.generate(demo.model, ids, max_new_tokens=new).sequences[0, ids.shape[1] :].tolist()
    return found


def test_texts_are_answered_like_their_ids(demo: Any) -> None:
    one = draftree.generate(demo.model, ASKED[0], tokenizer=demo.tokenizer, drafter="lookahead", max_new_tokens=24)
    expected = [demo.tokenizer.decode(by_ids(demo, text), skip_special_tokens=True) for text in ASKED]
    assert one.text == expected[0]
    assert one.stats.total.drafted > 0
    both = draftree.generate(demo.model, ASKED, tokenizer=demo.tokenizer, drafter="prompt-lookup", max_new_tokens=24)
    assert both.texts == expected
    with pytest.raises(ValueError, match="there are 2: read texts"):
        _ = both.text


def test_an_encoder_decoder_reads_texts(demo: Any) -> None:
    model = construct(MEMBERS["t5"], vocab_size=len(demo.tokenizer))
    ids = torch.tensor([encode_prompt(demo.tokenizer, ASKED[0])])
    expected = draftree.generate(model, ids, max_new_tokens=6)
    found = draftree.generate(model, ASKED[0], tokenizer=demo.tokenizer, max_new_tokens=6)
    assert found.sequences.tolist() == expected.sequences.tolist()


@pytest.mark.parametrize("name", ["lookahead", "none", "lookahead+medusa", "medusa"])
def test_a_name_is_a_drafter_at_every_door(demo: Any, name: str) -> None:
    expected = by_ids(demo, ASKED[0])
    ids = torch.tensor([encode_prompt(demo.tokenizer, ASKED[0])])
    out = draftree.generate(demo.model, ids, drafter=name, max_new_tokens=24, shape=draftree.Fixed(4))
    assert out.sequences[0, ids.shape[1] :].tolist() == expected
    assert (out.stats.total.drafted > 0) == (name != "none")
    loop = draftree.custom_generate(name)
    for _ in range(2):
        found = demo.model.generate(ids, custom_generate=loop, max_new_tokens=24, do_sample=False)
        assert found[0, ids.shape[1] :].tolist() == expected
    with draftree.Engine(demo.model, drafter=name) as engine:
        request = engine.add(ids[0].tolist(), max_new_tokens=24)
        engine.run()
        assert request.tokens == expected
    with draftree.Chat(demo.model, demo.tokenizer, name, max_new_tokens=24) as chat:
        assert "".join(chat.send(ASKED[0])) == demo.tokenizer.decode(expected, skip_special_tokens=True)


def test_a_loop_by_name_keeps_its_drafter(demo: Any) -> None:
    ids = torch.tensor([encode_prompt(demo.tokenizer, ASKED[0])])
    told: list[Any] = []
    loop = draftree.custom_generate("lookahead", shape=draftree.Fixed(4), on_stats=told.append)
    for _ in range(2):
        demo.model.generate(ids, custom_generate=loop, max_new_tokens=24, do_sample=False)
    assert told[1].total.accepted > told[0].total.accepted, "it has learned the answer"


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ("Hi", {}, "needs the model's tokenizer: pass tokenizer="),
        (["Hi", " "], {"tokenizer": True}, "The prompt is empty"),
        ("Hi", {"tokenizer": True, "attention_mask": torch.ones(1, 1)}, "and the prompt is text: leave it out"),
        ([], {"tokenizer": True}, "must be a LongTensor"),
        ([1, 2], {"tokenizer": True}, "must be a LongTensor"),
        ("Hi", {"tokenizer": True, "drafter": "lokahead"}, "Did you mean 'lookahead'"),
    ],
)
def test_wrong_texts_and_names_are_one_sentence(demo: Any, prompt: Any, options: dict[str, Any], words: str) -> None:
    options |= {"tokenizer": demo.tokenizer} if options.get("tokenizer") else {}
    with pytest.raises(ValueError, match=words):
        draftree.generate(demo.model, prompt, **options)
    with pytest.raises(ValueError, match="pass tokenizer= to generate"):
        _ = draftree.generate(demo.model, torch.tensor([[5]]), max_new_tokens=1).text
