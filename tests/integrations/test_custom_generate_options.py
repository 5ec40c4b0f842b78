"""`custom_generate` takes the options of `draftree.generate`, and refuses inputs that its passes would lose."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters_for_tests import RandomTree
from generate_driver import LENGTHS, NEW, hf, left_pad, prompts, references_of, same
from torch import Tensor
from transformers import DynamicCache, Gemma3Config, Gemma3ForConditionalGeneration, GenerationConfig
from zoo import build

import draftree
from draftree import custom_generate
from draftree.acceptance import LossyTypical
from draftree.engine import RunStats, generate
from draftree.pruning import EarlyHead, EarlyPruning
from draftree.shaping import Fixed


def through(name: str, ids: Tensor, mask: Tensor | None = None, *, options: Any = None, **given: Any) -> Tensor:
    """Our text through Hugging Face's door; `given` goes to `custom_generate`, `options` to `generate`."""
    options = {"max_new_tokens": NEW, "do_sample": False} | (options or {})
    text: Tensor = build(name).generate(ids, attention_mask=mask, custom_generate=custom_generate(**given), **options)
    return text


def own(name: str, ids: Tensor, mask: Tensor | None = None, *, options: Any = None, **given: Any) -> Tensor:
    """The same through our own door."""
    return generate(build(name), ids, mask, **{"max_new_tokens": NEW} | given | (options or {})).sequences


def test_every_argument_is_one_of_both_doors() -> None:
    ours = set(inspect.signature(draftree.generate).parameters)
    theirs = set(inspect.signature(build("llama").generate).parameters) | set(vars(GenerationConfig()))
    of_hugging_face = {"model", "input_ids", "attention_mask", "stopping_criteria", "generation_config", "tokenizer"}
    there = set(inspect.signature(custom_generate).parameters)
    assert ours - of_hugging_face - (theirs - {"streamer"}) - {"options"} <= there


def test_the_page_lists_every_argument() -> None:
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, re.M) == list(inspect.signature(custom_generate).parameters)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_pruner(name: str) -> None:
    """Trees are pruned inside the pass, and the text stays."""
    ids, mask = left_pad(prompts())
    if name == "t5":
        ids, mask = ids.flip(1), mask.flip(1)
    expected = hf(build(name), ids, mask)
    start = {(int(expected[0, 0]),): expected[0, 1:].tolist()} if name == "t5" else references_of(prompts(), expected)
    got: list[RunStats] = []
    out = through(
        name,
        ids,
        mask,
        drafter=RandomTree(start, 1),
        pruner=EarlyPruning(EarlyHead.fresh(build(name), layer=1), top_k=30, always=True),
        shape=Fixed(16),
        on_stats=got.append,
    )
    same(out, expected)
    assert got[0].total.pruned > 0


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_large_batches_queue(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["draftree.engine.generate"], "MOST_SLOTS", 2)
    ids, mask = left_pad(prompts())
    if name == "t5":
        ids, mask = ids.flip(1), mask.flip(1)
    same(through(name, ids, mask), hf(build(name), ids, mask))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"drafter": 3}, "drafter is a int: pass a drafter object"),
        ({"drafter": "lokahead"}, "Did you mean 'lookahead'"),
        ({"drafter": RandomTree({}), "pruner": 3}, "pruner is a int: pass a pruner object"),
        ({"acceptance": LossyTypical(), "strict": True}, "strict=True asks for the plain engine's text"),
        ({"recorder": "run.jsonl"}, r"recorder is a str: pass draftree.Recorder\(\)"),
        ({"streamer": print}, "pass one of Hugging Face's, such as TextStreamer"),
        ({"on_stats": []}, "on_stats is a list: pass a function"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_one_sentence(given: dict[str, Any], told: str) -> None:
    ids = torch.tensor(prompts(LENGTHS[:1]))
    with pytest.raises((TypeError, ValueError), match=told) as raised:
        through("llama", ids, **given)
    assert "\n" not in str(raised.value)


def embeddings(name: str, ids: Tensor) -> Tensor:
    embedded: Tensor = build(name).get_input_embeddings()(ids)
    return embedded.detach()


@pytest.mark.parametrize(
    ("name", "made", "told"),
    [
        ("llama", lambda ids: {"inputs_embeds": embeddings("llama", ids)}, "inputs_embeds cannot be drafted for"),
        ("llama", lambda ids: {"position_ids": torch.arange(5, 5 + ids.shape[1])[None]}, "position_ids differ"),
        ("gpt2", lambda ids: {"token_type_ids": torch.zeros_like(ids)}, "leave token_type_ids out"),
        (
            "llama",
            lambda ids: {"past_key_values": DynamicCache(config=build("llama").config)},
            "neither be read nor filled",
        ),
        ("llama", lambda ids: {"output_attentions": True}, "output_attentions=True is not supported"),
        (
            "t5",
            lambda ids: {
                "decoder_input_ids": torch.tensor([[0, 5, 6]]),
                "decoder_attention_mask": torch.tensor([[0, 1, 1]]),
            },
            "decoder_attention_mask hides tokens",
        ),
    ],
)
def test_unused_inputs_are_refused(name: str, made: Callable[[Tensor], dict[str, Any]], told: str) -> None:
    ids = torch.tensor(prompts(LENGTHS[:1]))
    with pytest.raises(ValueError, match=told) as raised:
        through(name, ids, options=made(ids))
    assert "\n" not in str(raised.value)


def test_redundant_inputs_are_accepted() -> None:
    ids, mask = left_pad(prompts())
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = hf(build("llama"), ids, mask)
    same(through("llama", ids, mask, options={"position_ids": positions}), expected)
    source = ids[:1]
    expected = hf(build("t5"), source)
    loop = custom_generate()
    out = build("t5").generate(
        inputs_embeds=embeddings("t5", source), custom_generate=loop, max_new_tokens=NEW, do_sample=False
    )
    same(out, expected)


def test_a_model_of_images_refuses_images_without_placeholders() -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = shape | {"num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 100}
    config = Gemma3Config(
        vision_config=shape | {"image_size": 32, "patch_size": 16},
        text_config=text | {"initializer_range": 0.5},
        image_token_id=99,
        mm_tokens_per_image=4,
    )
    torch.manual_seed(0)
    model: Any = Gemma3ForConditionalGeneration(config).eval()
    ids, mask = left_pad(prompts())
    expected = hf(model, ids, mask)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    same(model.generate(ids, custom_generate=custom_generate(draftree.Lookahead()), **options), expected)
    pixels = torch.zeros(3, 3, 32, 32)
    with pytest.raises(ValueError, match="placeholder tokens of the batch do not fit its images"):
        model.generate(ids, pixel_values=pixels, custom_generate=custom_generate(), **options)
