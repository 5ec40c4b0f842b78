"""Bad input raises one clear sentence before any work, and changes nothing."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from drafters_for_tests import RandomTree
from generate_driver import copy_of, prompts
from torch import Tensor
from transformers import MaxTimeCriteria, TextStreamer
from zoo import MEMBERS, build, construct

from draftree.drafting import Lookahead, PromptLookup
from draftree.engine import Engine, SamplingParams, generate
from draftree.integrations import custom_generate
from draftree.runner import open_runner
from draftree.shaping import DynamicTree, Fixed

IDS = torch.tensor(prompts((9,)))
BATCH = torch.tensor(prompts((9, 9)))


class Quiet(TextStreamer):
    def __init__(self) -> None:
        pass


def ids(*values: int) -> Tensor:
    return torch.tensor([values])


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no tokens": ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, ValueError, "prompt is empty"),
    "one dimension": ({"input_ids": IDS[0]}, ValueError, "[batch, length]"),
    "a list": ({"input_ids": IDS.tolist()}, ValueError, "[batch, length]"),
    "beyond the vocabulary": ({"input_ids": ids(5, 97)}, ValueError, "token id 97, outside"),
    "negative id": ({"input_ids": ids(5, -1)}, ValueError, "token id -1, outside"),
    "prompt beyond the context": ({"input_ids": torch.full((1, 300), 5)}, ValueError, "shorten it to at most 255"),
    "text beyond the context": ({"max_new_tokens": 250}, ValueError, "leaves room for 247"),
    "no new tokens": ({"max_new_tokens": 0}, ValueError, "max_new_tokens"),
    "a length in words": ({"max_new_tokens": "3"}, ValueError, "give a whole number"),
    "options in place of a config": (
        {"generation_config": {"top_k": 3}},
        TypeError,
        "generation_config is a dict: pass a GenerationConfig",
    ),
    "a criterion alone": ({"stopping_criteria": MaxTimeCriteria(5.0)}, TypeError, "pass a list of them"),
    "max_length within the prompt": ({"max_length": 9}, ValueError, "leaves no room behind a prompt of 9"),
    "temperature in words": ({"do_sample": True, "temperature": "0.7"}, TypeError, "temperature is a str"),
    "attentions": ({"output_attentions": True}, ValueError, "output_attentions"),
    "a schema as grammar": ({"grammar": {"type": "object"}}, TypeError, "grammar is a dict: pass one such as"),
    "beams": ({"num_beams": 4}, ValueError, "leave num_beams at 1"),
    "contrastive search": ({"penalty_alpha": 0.6, "top_k": 4}, ValueError, "penalty_alpha"),
    "assisted": ({"prompt_lookup_num_tokens": 5}, ValueError, "draftree.PromptLookup()"),
    "assistant": ({"assistant_model": None}, TypeError, "give drafter=draftree.DraftModel(assistant_model)"),
    "part of another method": ({"num_assistant_tokens": 5}, TypeError, "no effect here"),
    "scores": ({"output_scores": True}, ValueError, "output_scores"),
    "unknown option": ({"max_new_token": 5}, TypeError, "Did you mean 'max_new_tokens'?"),
    "unknown option of ours": ({"drafer": None}, TypeError, "Did you mean 'drafter'?"),
    "drafter class": ({"drafter": Lookahead}, TypeError, "pass a drafter object"),
    "shape of another type": ({"shape": 16}, TypeError, "shape is a int"),
    "unknown runner": (
        {"runner": "fast"},
        ValueError,
        "choose 'auto', 'hooked', 'eager', 'cpu', 'cuda_graphs' or 'in_place'",
    ),
    "runner that does not fit": ({"model": "gpt2", "runner": "cpu"}, ValueError, "runner='hooked'"),
    "temperature 0": ({"do_sample": True, "temperature": 0.0}, ValueError, "do_sample=False"),
    "processors": ({"logits_processor": []}, TypeError, "draftree.custom_generate(...)"),
    "seed in words": ({"seed": "one"}, TypeError, "whole number"),
    "top_p beyond 1": ({"do_sample": True, "top_p": 1.5}, ValueError, "top_p"),
    "no copies": ({"do_sample": True, "num_return_sequences": 0}, ValueError, "num_return_sequences"),
    "all padding": (
        {"input_ids": BATCH, "attention_mask": torch.tensor([[1] * 9, [0] * 9])},
        ValueError,
        "all padding",
    ),
    "a hole in a prompt": (
        {"attention_mask": torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0, 0]])},
        ValueError,
        "leave them out of input_ids",
    ),
    "padding between tokens": ({"input_ids": ids(5, 0, 6)}, ValueError, "give a mask that shows them"),
    "mask of another shape": ({"attention_mask": torch.ones(1, 8)}, ValueError, "(1, 8)"),
    "streamer with a batch": ({"input_ids": BATCH, "streamer": Quiet()}, ValueError, "batch of 1"),
    "stop strings alone": ({"stop_strings": ["x"]}, ValueError, "tokenizer"),
    "pruner": ({"pruner": object()}, TypeError, "pruner is a object"),
    "strict with an encoder": ({"model": "t5", "strict": True}, ValueError, "decoder-only"),
    "source beyond the encoder": ({"model": "bart", "input_ids": torch.full((1, 300), 5)}, ValueError, "reads 256"),
    "source outside the vocabulary": ({"model": "t5", "input_ids": ids(5, 97)}, ValueError, "token id 97"),
    "not a model": ({"model": "a name"}, TypeError, "AutoModelForCausalLM"),
}


@cache
def counted(name: str) -> tuple[Any, list[int]]:
    """Return a copy of a model with a hook that counts its calls; its runner is opened and checked already."""
    model, calls = copy_of(name), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    open_runner(model)
    return model, calls


@pytest.mark.parametrize(("arguments", "kind", "words"), BAD.values(), ids=BAD.keys())
def test_one_sentence_before_any_work(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    drafter = Lookahead()
    arguments = {"model": "llama", "input_ids": IDS, "drafter": drafter, "max_new_tokens": 4} | arguments
    if "max_length" in arguments:
        arguments["max_new_tokens"] = None
    model = arguments.pop("model")
    if model in MEMBERS:
        model, calls = counted(model)
        calls.clear()
        with pytest.raises(kind) as raised:
            generate(model, **arguments)
        assert not calls
    else:
        with pytest.raises(kind) as raised:
            generate("nothing" if model == "a name" else model, **arguments)
    message = str(raised.value)
    assert words in message
    assert "\n" not in message.strip()
    assert drafter._trie is None  # No target was bound.


def test_meta_device() -> None:
    with torch.device("meta"):
        model = construct(MEMBERS["llama"])
    with pytest.raises(ValueError, match="meta device"):
        generate(model, IDS)


def test_recurrent_models() -> None:
    with pytest.raises(ValueError, match="recurrent state"):
        generate(build("rwkv"), IDS)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"slots": 0}, ValueError, "slots is 0"),
        ({"drafter": 3}, TypeError, "drafter is a int"),
        ({"drafter": "lokahead"}, ValueError, "Did you mean 'lookahead'"),
        ({"shape": "dynamic"}, TypeError, "shape is a str"),
        ({"pruner": "early", "drafter": PromptLookup()}, TypeError, "pruner is a str"),
    ],
)
def test_engine_options(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        Engine(build("llama"), **options)


def test_an_engine_that_refuses_a_prompt_goes_on() -> None:
    drafter = RandomTree({})
    engine = Engine(build("llama"), drafter=drafter, shape=Fixed(4))
    good = engine.add([5, 6, 7], SamplingParams(max_new_tokens=5))
    engine.step()
    for prompt, params in (
        ([], SamplingParams()),
        ([97], SamplingParams()),
        ([[5, 6]], SamplingParams()),
        ([5] * 200, SamplingParams(max_new_tokens=57)),
        ([5], SamplingParams(max_new_tokens=0)),
    ):
        with pytest.raises(ValueError, match=r"prompt|max_new_tokens"):
            engine.add(prompt, params)
    assert list(drafter.live) == [good.context.id]
    engine.run()
    assert good.finish_reason == "length"
    plain = generate(build("llama"), ids(5, 6, 7), max_new_tokens=5, eos_token_id=[])
    assert good.tokens == plain.sequences[0, 3:].tolist()


def test_an_option_of_the_engine_given_to_a_request() -> None:
    with Engine(build("llama")) as engine, pytest.raises(TypeError, match=r"^drafter belongs to draftree.generate or"):
        engine.add([5, 6], drafter=None)


def test_sampling_params_shapes_and_budgets() -> None:
    with pytest.raises(ValueError, match=r"max_new_tokens is 3.5: give a whole number"):
        SamplingParams(max_new_tokens=3.5)  # type: ignore[arg-type]
    for name in ("node_budget", "logprobs"):
        with pytest.raises(ValueError, match=f"{name} is -1"):
            SamplingParams(**{name: -1})
    with pytest.raises(ValueError, match="node_budget is -1"):
        Fixed(-1)
    with pytest.raises(ValueError, match="max_nodes is 0"):
        DynamicTree(0)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"num_beams": 2}, ValueError, "leave num_beams at 1"),
        ({"max_new_tokens": 250}, ValueError, "leaves room for 247"),
        ({"attention_mask": torch.ones(1, 8)}, ValueError, r"shape \(1, 8\) and input_ids \(1, 9\): give one value"),
        ({"attention_mask": ids(0, *[1] * 7)}, ValueError, r"mask has shape \(1, 8\) .*: give one mask value"),
        ({"inputs_embeds": torch.zeros(1, 4, 64), "input_ids": None}, ValueError, "give input_ids instead"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, ValueError, "prompt is empty: give at least one token"),
        ({"synced_gpus": True}, ValueError, "which draftree does not drive"),
    ],
)
def test_through_hugging_faces_door(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    drafter = Lookahead()
    arguments = {"input_ids": IDS, "max_new_tokens": 4} | options
    with pytest.raises(kind, match=words):
        build("llama").generate(**arguments, custom_generate=custom_generate(drafter))
    assert drafter._trie is None
