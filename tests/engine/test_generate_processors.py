"""Processors and warpers see each draft token's true prefix: ids are Hugging Face's, greedy and sampled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafters_for_tests import RandomTree
from generate_driver import LENGTHS, NEW, hf, left_pad, prompts, references_of, same
from transformers import WatermarkingConfig
from zoo import build

from draftree.engine import generate
from draftree.shaping import Fixed

SEED = 21
GREEDY: dict[str, dict[str, Any]] = {
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "negative repetition_penalty": {"repetition_penalty": 0.7},
    "bad_words_ids": {"bad_words_ids": "some"},
    "suppress_tokens": {"suppress_tokens": "some"},
    "begin_suppress_tokens": {"begin_suppress_tokens": "first"},
    "forced_eos_token_id": {"forced_eos_token_id": 9, "max_new_tokens": 12},
    "min_new_tokens": {"min_new_tokens": 15, "eos_token_id": "early"},
    "min_length": {"min_length": 30, "eos_token_id": "early"},
    "sequence_bias": {"sequence_bias": [[[7], 4.0], [[8, 9], 3.0]]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.6)},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.8},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "guidance_scale": {"guidance_scale": 1.7},
    "several": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.1, "suppress_tokens": [7], "forced_eos_token_id": 9},
}
SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.4, "top_k": 0},
    "min_p": {"min_p": 0.3},
    "top_h": {"top_h": 0.3},
    "typical_p": {"typical_p": 0.4},
    "eta_cutoff": {"eta_cutoff": 0.1},
    "epsilon_cutoff": {"epsilon_cutoff": 0.1},
    "renormalize_logits": {"renormalize_logits": True, "typical_p": 0.4},
    "watermarking": {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash")},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2, "temperature": 0.5},
    "several": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
}


def filled(options: dict[str, Any], spoken: list[int]) -> dict[str, Any]:
    """Replace the words by ids that the model says without the option."""
    words = {
        "some": [[t] for t in spoken[2:6]] if "bad_words_ids" in options else spoken[2:6],
        "first": spoken[:1],
        "early": [spoken[4]],
    }
    return {name: words[v] if isinstance(v, str) else v for name, v in options.items()}


@pytest.mark.parametrize("options", GREEDY.values(), ids=GREEDY.keys())
def test_greedy(options: dict[str, Any]) -> None:
    model = build("llama")
    rows = prompts(LENGTHS[:1])
    ids = torch.tensor(rows)
    bare = hf(model, ids)
    options = filled(options, bare[0, ids.shape[1] :].tolist())
    expected = hf(model, ids, **options)
    frame = ("eos_token_id", "max_new_tokens")
    baseline = hf(model, ids, **{k: v for k, v in options.items() if k in frame})
    assert not torch.equal(expected, baseline)  # the option matters here
    for seed in range(2):
        drafter = RandomTree(references_of(rows, expected), seed)
        out = generate(model, ids, drafter=drafter, shape=Fixed(16), **{"max_new_tokens": NEW} | options)
        same(out.sequences, expected, f"seed {seed}")
        assert out.stats.total.accepted > 2


@pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED.keys())
def test_sampled(options: dict[str, Any]) -> None:
    model = build("llama")
    rows = prompts(LENGTHS[:1])
    ids = torch.tensor(rows)
    options = {"do_sample": True} | options
    expected = hf(model, ids, seed=SEED, **options)
    assert not torch.equal(expected, hf(model, ids, seed=SEED, do_sample=True))
    for seed in range(2):
        drafter = RandomTree(references_of(rows, expected), seed)
        out = generate(model, ids, drafter=drafter, shape=Fixed(16), max_new_tokens=NEW, seed=SEED, **options)
        same(out.sequences, expected, f"seed {seed}")
        assert out.stats.total.accepted > 2


@pytest.mark.parametrize(
    "name",
    [
        "no_repeat_ngram_size",
        "repetition_penalty",
        "encoder_repetition_penalty",
        "min_new_tokens",
        "forced_eos_token_id",
        "several",
    ],
)
def test_greedy_in_a_left_padded_batch(name: str) -> None:
    """Processors of a short row see its padding, or are told to look away, exactly as Hugging Face does it."""
    model = build("llama")
    rows = prompts()
    ids, mask = left_pad(rows)
    bare = hf(model, ids, mask)
    options = filled(GREEDY[name], bare[0, ids.shape[1] :].tolist())
    expected = hf(model, ids, mask, **options)
    assert not torch.equal(expected, bare)
    drafter = RandomTree(references_of(rows, expected), 5)
    out = generate(model, ids, mask, drafter=drafter, shape=Fixed(16), **{"max_new_tokens": NEW} | options)
    same(out.sequences, expected, name)
    assert out.stats.total.accepted > 2


def test_a_processor_with_a_state_belongs_to_one_request() -> None:
    """Each request of a sampled, watermarked batch equals itself alone."""
    model = build("llama")
    rows = prompts()
    ids, mask = left_pad(rows)
    options = {"do_sample": True, "seed": SEED, "max_new_tokens": NEW} | SAMPLED["watermarking"]
    drafter = RandomTree({}, 5)
    together = generate(model, ids, mask, drafter=drafter, shape=Fixed(8), **options).sequences[:, ids.shape[1] :]
    for b, row in enumerate(rows):
        alone = generate(model, torch.tensor([row]), **options | {"seed": SEED + b}).sequences[0, len(row) :]
        same(together[b : b + 1, : len(alone)], alone[None], f"row {b}")
