"""Prompts with images: the ids of Hugging Face's `generate`, by every door; what does not fit is refused."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from few import few
from in_model_driver import MAKERS, make
from seeing_models import FAMILIES, IMAGE, image_prompts, seeing_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import draftree
from draftree.drafting.published.block import DFlash
from draftree.drafting.published.eagle import Eagle3
from draftree.integrations.custom_generate import REPEATED
from draftree.training import speculators

NEW = 24
TINY = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SIX = draftree.Fixed(6)
QUICK = ("qwen2_vl", "gemma3", "idefics3", "llava", "qwen3_5")
FEW = few(FAMILIES, QUICK)
TOGETHER = few([family for family in FAMILIES if family != "paligemma"], QUICK)  # It takes no prompts of text alone.


@cache
def model_of(family: str) -> Any:
    return seeing_model(family)


def same_texts(ours: Tensor, theirs: Tensor) -> None:
    """Rows that end early are padded by Hugging Face to the longest, as by draftree."""
    width = min(ours.shape[1], theirs.shape[1])
    assert ours[:, :width].tolist() == theirs[:, :width].tolist()


@pytest.mark.parametrize("family", few(FAMILIES, (*FAMILIES[:7], "gemma4", "lfm2_vl", "qwen3_5")))
def test_answers_about_images_are_those_of_hugging_face(family: str) -> None:
    """One image, then two, then a ragged batch with a prompt of text alone; each twice, the second time drafted."""
    model, drafter = model_of(family), draftree.Lookahead()
    for counts in ([1], [2], [1, int(family == "paligemma"), 2]):
        inputs = image_prompts(model, counts)
        expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        for _ in range(2):
            out = draftree.generate(model, **inputs, drafter=drafter, shape=SIX, max_new_tokens=NEW, do_sample=False)
            same_texts(out.sequences, expected)
        assert out.stats.total.accepted > 4


@pytest.mark.parametrize("family", FEW)
def test_sampling_at_a_seed_is_that_of_hugging_face(family: str) -> None:
    model = model_of(family)
    inputs = image_prompts(model, [1], seed=3)
    torch.manual_seed(5)
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=True, temperature=0.8, top_k=0)
    drafter = draftree.PromptLookup()
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 5, "max_new_tokens": NEW}
    same_texts(draftree.generate(model, **inputs, drafter=drafter, **sampling).sequences, expected)


@pytest.mark.parametrize("family", FEW)
@pytest.mark.parametrize("copies", [1, 2])
def test_hugging_faces_door(family: str, copies: int) -> None:
    """The call leaves the model as it was: a text after it is read without the image's positions."""
    model = model_of(family)
    inputs = image_prompts(model, [1, 2], seed=4)
    options = {"max_new_tokens": NEW, "do_sample": copies > 1, "top_k": 1, "num_return_sequences": copies}
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False).repeat_interleave(copies, 0)
    loop = draftree.custom_generate(drafter=draftree.Lookahead(), shape=SIX)
    own = model.model.get_image_features
    with patch.object(model.model, "get_image_features", autospec=True, side_effect=own) as encode:
        same_texts(model.generate(**inputs, **options, custom_generate=loop), expected)
    assert encode.call_count == 1 or (family in REPEATED and copies > 1)
    if family == "paligemma":
        return
    text = torch.arange(5, 15)[None]
    alone = model.generate(text, max_new_tokens=NEW, do_sample=False)
    same_texts(draftree.generate(model, text, max_new_tokens=NEW).sequences, alone)


@pytest.mark.parametrize("family", TOGETHER)
def test_requests_with_and_without_images_share_an_engine(family: str) -> None:
    """A second turn about the same image reuses its keys and values; other images of the same tokens do not."""
    model = model_of(family)
    one, other = (image_prompts(model, [1], seed=seed) for seed in (6, 7))
    other["input_ids"] = one["input_ids"]
    texts = [torch.arange(3, 3 + n)[None] for n in (7, 40)]

    def expected(ids: Tensor, inputs: dict[str, Tensor]) -> list[int]:
        given = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
        for name in {"mm_token_type_ids", "token_type_ids"} & set(given):
            given[name] = (ids == IMAGE).long()
        answer = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **given, max_new_tokens=NEW, do_sample=False
        )
        return answer[0, ids.shape[1] :].tolist()

    with draftree.Engine(model, slots=4, drafter=draftree.Lookahead(), keep_prefixes=True) as engine:
        asked = []
        for ids, inputs in [(texts[0], {}), (one["input_ids"], one), (texts[1], {}), (other["input_ids"], other)]:
            request = engine.add(ids[0], inputs=inputs or None, max_new_tokens=NEW, do_sample=False)
            asked.append((request, ids, inputs))
            engine.step()
        engine.run()
        for request, ids, inputs in asked:
            assert request.error is None
            assert request.tokens == expected(ids, inputs)
        first, ids, inputs = asked[1]
        assert asked[3][0].reused == 0
        turn = torch.tensor([[*ids[0].tolist(), *first.tokens, 11, 12, 13]])
        more = {name: value for name, value in inputs.items() if "token_type" not in name}
        more |= {name: (turn == IMAGE).long() for name in inputs if "token_type" in name}
        second = engine.add(turn[0], inputs=more, max_new_tokens=NEW, do_sample=False)
        engine.run()
        assert second.tokens == expected(turn, inputs)
        assert second.reused >= ids.shape[1] - 1


def test_prompts_that_are_read_both_ways_share_no_prefix() -> None:
    """PaliGemma's image sees the question behind it."""
    model = model_of("paligemma")
    inputs = image_prompts(model, [1], seed=6)
    with draftree.Engine(model, drafter=draftree.Lookahead(), keep_prefixes=True) as engine:
        for more in ([], [7, 8, 9]):
            ids = torch.tensor([[*inputs["input_ids"][0].tolist(), *more]])
            same = inputs | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            same["token_type_ids"] = torch.zeros_like(ids)
            expected = model.generate(**same, max_new_tokens=NEW, do_sample=False)
            request = engine.add(ids[0].tolist(), inputs=same, max_new_tokens=NEW, do_sample=False)
            engine.run()
            assert request.tokens == expected[0, ids.shape[1] :].tolist()
            assert request.reused == 0
    with pytest.raises(ValueError, match="takes images with each prompt"):
        draftree.generate(model, torch.tensor([[5, 6]]), max_new_tokens=2)


@pytest.mark.parametrize("family", few(("qwen2_vl", "gemma3", "llava"), ("qwen2_vl",)))
@pytest.mark.parametrize("make", [draftree.Lookahead, draftree.PromptLookup, "draft", "merge"])
def test_outside_drafters_draft_no_parts_of_images(family: str, make: Any) -> None:
    model = model_of(family)
    inputs = image_prompts(model, [1], seed=8)
    if make == "draft":
        config = AutoConfig.for_model("llama", vocab_size=128, **TINY)
        drafter: Any = draftree.DraftModel(AutoModelForCausalLM.from_config(config).eval())
    elif make == "merge":
        drafter = draftree.Merge([draftree.Lookahead(), draftree.PromptLookup()])
    else:
        drafter = make()
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    with draftree.Engine(model, drafter=drafter, shape=SIX) as engine:
        for _ in range(2):
            ids = inputs["input_ids"][0]
            request = engine.add(ids, inputs=inputs, max_new_tokens=NEW, do_sample=False, keep_trees=True)
            engine.run()
            assert request.tokens == expected[0, len(ids) :].tolist()
            assert not any(IMAGE in tree.tokens[1:] for tree in request.trees)


def head_for(model: Any, kind: str) -> Any:
    """Return a drafter that reads the model's hidden states, with random weights."""
    if kind in MAKERS:
        return make(kind, model)
    torch.manual_seed(0)
    made = getattr(speculators, kind)(model)
    return Eagle3(made.weights, made.taps) if kind == "eagle3" else DFlash(made.weights)


@pytest.mark.parametrize(
    ("family", "kind"),
    few(
        [
            *product(("qwen2_vl", "gemma3", "llava"), ("medusa", "bita", "hidden-transfer", "eagle3", "dflash")),
            *product(["qwen3_5"], ("eagle3", "dflash")),
        ],
        [*product(["qwen2_vl"], ("bita", "hidden-transfer", "eagle3", "dflash"))],
    ),
)
def test_drafters_that_read_hidden_states(family: str, kind: str) -> None:
    """Their rows have positions behind images, which the Qwen-VL line counts otherwise."""
    model = model_of(family)
    drafter, inputs = head_for(model, kind), image_prompts(model, [2, 0, 1], seed=9)
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    out = draftree.generate(model, **inputs, drafter=drafter, shape=SIX, max_new_tokens=NEW, do_sample=False)
    same_texts(out.sequences, expected)
    assert out.stats.total.drafted > 20


def test_a_draft_model_that_lacks_the_placeholder_drafts() -> None:
    """Gemma's text models have no rows for the placeholders of those that read images."""
    model = seeing_model("llava", image_token_id=127)
    inputs = image_prompts(model, [1], seed=8)
    inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, 127)
    text = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY, vocab_size=126)).eval()
    drafter = draftree.DraftModel(text, confidence=0)
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    out = draftree.generate(model, **inputs, drafter=drafter, shape=SIX, max_new_tokens=NEW, do_sample=False)
    same_texts(out.sequences, expected)
    assert out.stats.total.drafted


BAD: list[tuple[str, Any, str]] = [
    ("images", lambda i: {"input_ids": i["input_ids"].masked_fill(i["input_ids"] == IMAGE, 9)}, "no image placeholder"),
    ("placeholders", lambda i: {n: v for n, v in i.items() if n in ("input_ids", "attention_mask")}, "and no images"),
    ("context", lambda i: {"max_new_tokens": 250}, "lower max_new_tokens"),
    ("video", lambda i: {"pixel_values_videos": i["pixel_values"]}, "text and images"),
    ("no tensor", lambda i: {"pixel_values": [[1.0]]}, "no tensor"),
    ("types", lambda i: {"mm_token_type_ids": None}, "mm_token_type_ids"),
    ("grid", lambda i: {"image_grid_thw": i["image_grid_thw"] * torch.tensor([1, 2, 1])}, "its images have"),
]


@pytest.mark.parametrize(("change", "words"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_inputs_that_do_not_fit_are_refused_in_one_sentence(change: Any, words: str) -> None:
    model = model_of("qwen2_vl")
    inputs = image_prompts(model, [1])
    given = change(inputs) if words == "and no images" else inputs | change(inputs)
    with pytest.raises((TypeError, ValueError), match=words):
        draftree.generate(model, **{"max_new_tokens": 4} | given)


@pytest.mark.parametrize("family", ["gemma3", "idefics3"])
def test_a_batch_whose_placeholders_are_gone_is_refused(family: str) -> None:
    inputs = image_prompts(model_of(family), [1, 1])
    inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, 9)
    with pytest.raises(ValueError, match="placeholder token"):
        draftree.generate(model_of(family), **inputs, max_new_tokens=4)


def test_a_model_of_text_refuses_images_and_a_wrong_image_ends_its_request_alone(demo: Any) -> None:
    ids = torch.tensor([[5, 6]])
    with pytest.raises(ValueError, match="reads text alone"):
        draftree.generate(demo.model, ids, pixel_values=torch.zeros(1, 3, 16, 16))
    model = model_of("llava")
    inputs = image_prompts(model, [1])
    short = inputs["input_ids"][:, :-6]  # The processor's placeholders were cut.
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    with draftree.Engine(model, slots=2) as engine:
        good = engine.add(inputs["input_ids"][0], inputs=inputs, max_new_tokens=NEW, do_sample=False)
        bad = engine.add(short[0, :-2], inputs=inputs, max_new_tokens=NEW, do_sample=False)
        engine.run()
    assert good.tokens == expected[0, inputs["input_ids"].shape[1] :].tolist()
    assert bad.error is not None
    assert not bad.tokens
