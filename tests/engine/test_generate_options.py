"""Combined options of arguments and configs give Hugging Face's ids by both doors, greedy and sampled."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafters_for_tests import RandomTree
from few import crossed
from generate_driver import LENGTHS, NEW, hf, left_pad, prompts, references_of, same
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation import EosTokenCriteria
from zoo import MEMBERS, build, construct

from draftree.drafting import Lookahead
from draftree.engine import generate
from draftree.integrations import custom_generate
from draftree.shaping import Fixed

SEED = 21
SPOKEN = [61, 32, 45, 34]  # The model's first tokens after the prompt of these tests.
COMBINED: dict[str, dict[str, Any]] = {
    "min_new_tokens over min_length": {"min_length": 40, "min_new_tokens": 3, "eos_token_id": [32]},
    "warpers": {"temperature": 1.4, "min_p": 0.05, "typical_p": 0.9, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01},
    "bad words": {"bad_words_ids": [[61], [32, 45]], "no_repeat_ngram_size": 3, "eos_token_id": 34},
    "suppressed": {"suppress_tokens": SPOKEN[1:3], "begin_suppress_tokens": SPOKEN[:1], "remove_invalid_values": True},
    "forced ends": {"forced_eos_token_id": [9, 10], "max_new_tokens": 11, "min_new_tokens": 2},
    "ends and padding": {"eos_token_id": [32, 34], "pad_token_id": 33},
    "an end that is none": {"eos_token_id": -1},
    "decay": {"exponential_decay_length_penalty": (2, 1.7), "eos_token_id": [2, 61], "temperature": 1.3},
    "config": {"config": {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.2}},
    "config and arguments": {"config": {"max_new_tokens": 9, "top_k": 5}, "max_new_tokens": 15, "top_k": 12},
    "None over a config": {"config": {"no_repeat_ngram_size": 2}, "no_repeat_ngram_size": None},
    "lengths of both kinds": {"max_length": 37, "max_new_tokens": 7},
    "the model's ends": {"model": {"eos_token_id": [34]}},
    "the model's draw": {"model": {"temperature": 0.6, "top_k": 7, "repetition_penalty": 1.4}},
    "the model's minimum and an argument": {"model": {"min_length": 40, "eos_token_id": 32}, "min_new_tokens": 2},
}


def own(model: Any, ids: Tensor, mask: Tensor, drafter: RandomTree, seed: int, options: dict[str, Any]) -> Tensor:
    return generate(model, ids, mask, drafter=drafter, shape=Fixed(16), seed=seed, **options).sequences


def theirs(model: Any, ids: Tensor, mask: Tensor, drafter: RandomTree, seed: int, options: dict[str, Any]) -> Tensor:
    torch.manual_seed(seed)
    loop = custom_generate(drafter, shape=Fixed(16))
    text: Tensor = model.generate(ids, attention_mask=mask, custom_generate=loop, **options)
    return text


@pytest.mark.parametrize(("door", "how", "name"), crossed([own, theirs], ["greedy", "batch", "sampled"], COMBINED))
def test_combined(name: str, how: str, door: Callable[..., Tensor]) -> None:
    options = dict(COMBINED[name])
    model = build("llama")
    if "model" in options:
        model = copy.deepcopy(model)
        model.generation_config.update(**options.pop("model"))
    options = {"do_sample": how == "sampled"} | options
    if "config" in options:
        usual = {} if "max_length" in options["config"] else {"max_new_tokens": NEW}
        options["generation_config"] = GenerationConfig(**usual | options.pop("config"))
    else:
        options = {"max_new_tokens": NEW} | options
    rows = prompts(LENGTHS if how == "batch" else LENGTHS[:1])
    ids, mask = left_pad(rows)
    torch.manual_seed(SEED)
    expected = model.generate(ids, attention_mask=mask, **options)
    for trees in range(2):
        drafter = RandomTree(references_of(rows, expected), trees)
        same(door(model, ids, mask, drafter, SEED, options), expected, f"trees {trees}")


@pytest.mark.parametrize("door", [own, theirs])
@pytest.mark.parametrize("pad", [None, 7, torch.tensor([7])], ids=["first end", "pad", "pad in a tensor"])
def test_criteria_end_texts_and_the_config_fills_them(pad: Any, door: Callable[..., Tensor]) -> None:
    model = copy.deepcopy(build("llama"))
    model.generation_config.pad_token_id = None
    rows = prompts()
    ids, mask = left_pad(rows)
    criteria = StoppingCriteriaList([EosTokenCriteria(SPOKEN[:1])])
    options = {"max_new_tokens": 10, "do_sample": False, "stopping_criteria": criteria, "pad_token_id": pad}
    expected = model.generate(ids, attention_mask=mask, **options)
    filled = 2 if pad is None else 7
    assert expected[0, ids.shape[1] :].tolist() == [SPOKEN[0], *[filled] * 9]
    same(door(model, ids, mask, RandomTree(references_of(rows, expected), 1), SEED, options), expected)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("stops", [["the"], [" of", "."], "e", ["zzzz"]])
def test_stop_strings(demo: Any, stops: Any, sample: bool) -> None:
    """By both doors; `custom_generate` takes the tokenizer, which Hugging Face drops."""
    model, tokenizer = demo
    ids = tokenizer("The restaurant serves", return_tensors="pt").input_ids
    options = {"max_new_tokens": 40, "do_sample": sample, "stop_strings": stops}
    free = hf(model, ids, seed=SEED, max_new_tokens=40, do_sample=sample)
    expected = hf(model, ids, seed=SEED, tokenizer=tokenizer, **options)
    references = {tuple(ids[0].tolist()): free[0, ids.shape[1] :].tolist()}
    for trees in range(2):
        given = options | {"tokenizer": tokenizer, "seed": SEED, "shape": Fixed(16)}
        same(generate(model, ids, drafter=RandomTree(references, trees), **given).sequences, expected, f"trees {trees}")
    for passed in ({}, {"tokenizer": tokenizer}):
        torch.manual_seed(SEED)
        loop = custom_generate(RandomTree(references, 1), shape=Fixed(16), tokenizer=tokenizer)
        same(model.generate(ids, custom_generate=loop, **options, **passed), expected)
    with pytest.raises(ValueError, match=r"give it to draftree.custom_generate\(tokenizer=...\)") as raised:
        model.generate(ids, custom_generate=custom_generate(), tokenizer=tokenizer, **options)
    assert "\n" not in str(raised.value)


def test_sampling_defaults_to_the_models_config() -> None:
    """The model's config decides between greedy and sampled; a warning says that draftree samples."""
    model = construct(MEMBERS["llama"])
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.7
    ids = torch.tensor(prompts()[:1])
    torch.manual_seed(5)
    expected = model.generate(ids, max_new_tokens=NEW)
    with pytest.warns(UserWarning, match="samples .do_sample=True., so draftree samples"):
        drawn = generate(model, ids, drafter=Lookahead(), max_new_tokens=NEW, seed=5).sequences
    same(drawn, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        likeliest = generate(model, ids, max_new_tokens=NEW, do_sample=False).sequences
    same(likeliest, hf(model, ids))
