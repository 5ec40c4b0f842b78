"""The one law for merged drafters: families, batches, runners, greedy and sampled; an EOS inside merged drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafters_for_tests import References
from few import few
from generate_driver import LENGTHS, NEW, SAMPLED, SHAPES, drafters, hf, left_pad, prompts, references_of, same
from in_model_driver import make
from torch import Tensor
from zoo import CAUSAL, build

from draftree.drafting import Merge
from draftree.engine import generate
from draftree.runner import EagerRunner, inspect_model

DEFAULT = ("llama", "gpt2", "gemma3")
FAMILIES = few([m.id for m in CAUSAL], DEFAULT)
SEED = 11


def merges(model: Any, references: References) -> dict[str, Callable[[], Merge]]:
    """Return a merge of every kind: outside drafters, and one with rows inside the model; EOS and 0 in drafts."""
    alone = drafters(references)
    trie = alone["lookahead"]
    return {
        "trie+transfer": lambda: Merge([trie(), make("hidden-transfer", model)]),
        "trie+medusa": lambda: Merge([trie(), make("medusa", model)]),
        "trie+lookup": lambda: Merge([trie(), alone["prompt-lookup"]()]),
        "trie+bita": lambda: Merge([trie(), make("bita", model)]),
        "model+transfer": lambda: Merge([alone["draft-model"](), make("hidden-transfer", model)]),
    }


def check(name: str, ids: Tensor, mask: Tensor | None, expected: Tensor, turn: int, **options: Any) -> None:
    """Every merge against `expected`, shapes and runners in turn; in the next turn each on the other runner."""
    model = build(name)
    references = references_of(prompts(LENGTHS if len(ids) > 1 else LENGTHS[:1]), expected)
    runners = ["cpu", "hooked"] if EagerRunner.qualifies(inspect_model(model)) else ["hooked"]
    accepted = 0
    for number, (kind, merged) in enumerate(merges(model, references).items()):
        runner, shape = runners[(number + turn) % len(runners)], list(SHAPES)[number % 2]
        out = generate(
            model,
            ids,
            mask,
            drafter=merged(),
            shape=SHAPES[shape](),
            runner=runner,
            max_new_tokens=NEW,
            **options,
        )
        same(out.sequences, expected, f"{name} on {runner} with {kind}, {shape}")
        accepted += out.stats.total.accepted
    assert accepted > expected.shape[1] - ids.shape[1]  # or nothing was shown


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_in_a_ragged_batch(name: str) -> None:
    ids, mask = left_pad(prompts())
    check(name, ids, mask, hf(build(name), ids, mask), 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_sampled_in_a_ragged_batch(name: str) -> None:
    ids, mask = left_pad(prompts())
    expected = generate(build(name), ids, mask, max_new_tokens=NEW, seed=SEED, **SAMPLED).sequences
    check(name, ids, mask, expected, 1, seed=SEED, **SAMPLED)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_alone(name: str) -> None:
    ids = torch.tensor(prompts(LENGTHS[:1]))
    check(name, ids, None, hf(build(name), ids), 0)
    check(name, ids, None, hf(build(name), ids, seed=SEED, **SAMPLED), 1, seed=SEED, **SAMPLED)


def test_an_eos_inside_merged_drafts() -> None:
    """The answer ends at a token that drafts hold in their midst; 0 may be that token."""
    ids, mask = left_pad(prompts())
    answer = hf(build("llama"), ids, mask)[0, ids.shape[1] :].tolist()
    for turn, eos in enumerate((answer[9], 0)):
        check("llama", ids, mask, hf(build("llama"), ids, mask, eos_token_id=eos), turn, eos_token_id=eos)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_decoders(name: str) -> None:
    ids, mask = left_pad(prompts())
    ids, mask = ids.flip(1), mask.flip(1)
    expected = hf(build(name), ids, mask, no_repeat_ngram_size=3)
    for kind in ("hidden-transfer", "bita"):
        trie = drafters({})["lookahead"]()
        trie.warm([row.tolist() for row in expected])
        out = generate(
            build(name),
            ids,
            mask,
            drafter=Merge([trie, make(kind, build(name))]),
            shape=SHAPES["fixed-16"](),
            max_new_tokens=NEW,
            no_repeat_ngram_size=3,
        )
        same(out.sequences, expected, f"{name} with {kind}")
        assert out.stats.total.accepted > 0
