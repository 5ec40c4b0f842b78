"""EOS, stop strings, lengths, criteria and time cut inside accepted runs exactly where Hugging Face stops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafters_for_tests import RandomTree, References
from generate_driver import LENGTHS, NEW, hf, left_pad, prompts, references_of, same
from torch import Tensor
from transformers import MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList
from zoo import build

from draftree.drafting import PromptLookup
from draftree.engine import Engine, SamplingParams, generate
from draftree.shaping import Fixed

MODEL = "llama"


def ours(ids: Tensor, mask: Tensor | None, references: References, trees: int = 0, **options: Any) -> Any:
    """With trees that know the text far beyond its end."""
    options = {"max_new_tokens": NEW} | options
    return generate(build(MODEL), ids, mask, drafter=RandomTree(references, trees), shape=Fixed(20), **options)


def alone() -> tuple[Tensor, list[int], References]:
    rows = prompts(LENGTHS[:1])
    ids = torch.tensor(rows)
    expected = hf(build(MODEL), ids, max_new_tokens=2 * NEW)
    return ids, expected[0, ids.shape[1] :].tolist(), references_of(rows, expected)


@pytest.mark.parametrize("at", [0, 1, 2, 5, 9, 16])
@pytest.mark.parametrize("sample", [False, True])
def test_eos_inside_an_accepted_run(at: int, sample: bool) -> None:
    rows = prompts(LENGTHS[:1])
    ids = torch.tensor(rows)
    options: dict[str, Any] = {"do_sample": sample}
    seed = {"seed": 9} if sample else {}
    free = hf(build(MODEL), ids, **seed, **options)
    eos = [int(free[0, ids.shape[1] + at]), 96]
    expected = hf(build(MODEL), ids, eos_token_id=eos, **seed, **options)
    assert expected.shape[1] <= ids.shape[1] + at + 1
    for tree_seed in range(2):
        out = ours(ids, None, references_of(rows, free), tree_seed, eos_token_id=eos, **seed, **options)
        same(out.sequences, expected, f"trees {tree_seed}")
        total = out.stats.total
        assert total.emitted == expected.shape[1] - ids.shape[1]
        assert total.emitted <= total.steps + total.accepted


@pytest.mark.parametrize("pad", [None, 7])
def test_rows_of_a_batch_end_at_their_own_eos(pad: int | None) -> None:
    rows = prompts()
    ids, mask = left_pad(rows)
    free = hf(build(MODEL), ids, mask)
    eos = [int(free[0, ids.shape[1] + 9]), int(free[1, ids.shape[1] + 3])]
    expected = hf(build(MODEL), ids, mask, eos_token_id=eos, pad_token_id=pad)
    ends = {int(torch.isin(row, torch.tensor(eos)).float().argmax()) for row in expected[:, ids.shape[1] :]}
    assert len(ends) > 1
    for seed in range(2):
        out = ours(ids, mask, references_of(rows, free), seed, eos_token_id=eos, pad_token_id=pad)
        same(out.sequences, expected, f"trees {seed}")


@pytest.mark.parametrize("new", [1, 2, 3, 7])
def test_the_length_cuts_an_accepted_run(new: int) -> None:
    ids, answer, references = alone()
    for seed in range(2):
        out = ours(ids, None, references, seed, max_new_tokens=new)
        assert out.sequences[0, ids.shape[1] :].tolist() == answer[:new]
        length = ids.shape[1] + new
        out = ours(ids, None, references, seed, max_new_tokens=None, max_length=length)
        assert out.sequences[0, ids.shape[1] :].tolist() == answer[:new]


def test_a_padded_batch_counts_padding_into_max_length() -> None:
    rows = prompts()
    ids, mask = left_pad(rows)
    expected = hf(build(MODEL), ids, mask, max_new_tokens=None, max_length=25)
    out = ours(ids, mask, references_of(rows, expected), max_new_tokens=None, max_length=25)
    same(out.sequences, expected)


@pytest.mark.parametrize("longer", [{}, {"max_length": 40}], ids=str)
def test_a_length_among_the_criteria_wins(longer: dict[str, Any]) -> None:
    ids, mask = left_pad(prompts())
    criteria = StoppingCriteriaList([MaxLengthCriteria(ids.shape[1] + 5)])
    options: dict[str, Any] = {"max_new_tokens": NEW} | longer
    if "max_length" in longer:
        del options["max_new_tokens"]
    options |= {"do_sample": False, "stopping_criteria": criteria}
    expected = build(MODEL).generate(ids, attention_mask=mask, **options)
    assert expected.shape[1] == ids.shape[1] + 5
    same(generate(build(MODEL), ids, mask, drafter=PromptLookup(), **options).sequences, expected)
    with Engine(build(MODEL)) as engine:
        request = engine.add(prompts()[0], **options)
        engine.run()
    assert (len(request.tokens), request.finish_reason) == (5, "length")


class Noted(StoppingCriteria):
    """Stops each row whose last two ids add up to a multiple of `n`; notes every prefix it is shown."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen += input_ids.tolist()
        return input_ids[:, -2:].sum(1) % self.n == 0


@pytest.mark.parametrize("n", [5, 9, 1000])
def test_criteria_are_asked_once_a_token_with_the_true_prefix(n: int) -> None:
    rows = prompts(LENGTHS[:1])
    ids = torch.tensor(rows)
    free = hf(build(MODEL), ids)
    theirs = Noted(n)
    expected = hf(build(MODEL), ids, stopping_criteria=StoppingCriteriaList([theirs]))
    for seed in range(2):
        mine = Noted(n)
        out = ours(ids, None, references_of(rows, free), seed, stopping_criteria=[mine])
        same(out.sequences, expected, f"trees {seed}")
        assert mine.seen == theirs.seen


class Calls(StoppingCriteria):
    """Keeps a state: ends a text at its sixth token, by counting calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return torch.full((len(input_ids),), self.calls >= 6)


@pytest.mark.parametrize("make", [lambda: Noted(6), Calls], ids=["by tokens", "by calls"])
def test_criteria_in_a_batch(make: Any) -> None:
    """Each row has its own copy of their state."""
    rows = prompts()
    ids, mask = left_pad(rows)
    free = hf(build(MODEL), ids, mask)
    expected = hf(build(MODEL), ids, mask, stopping_criteria=StoppingCriteriaList([make()]))
    assert not torch.equal(free, expected)
    for seed in range(2):
        same(ours(ids, mask, references_of(rows, free), seed, stopping_criteria=[make()]).sequences, expected)


def test_max_time_ends_after_the_first_token() -> None:
    ids, answer, references = alone()
    out = ours(ids, None, references, max_time=1e-9)
    assert out.sequences[0, ids.shape[1] :].tolist() == answer[:1]


def test_finish_reasons() -> None:
    ids, answer, references = alone()
    engine = Engine(build(MODEL), drafter=RandomTree(references), shape=Fixed(8))
    prompt = ids[0].tolist()
    reasons = []
    for params in (
        SamplingParams(max_new_tokens=8),
        SamplingParams(max_new_tokens=30, eos_token_ids=(answer[3],)),
        SamplingParams(max_new_tokens=30, criteria=StoppingCriteriaList([Noted(1)])),
        SamplingParams(max_new_tokens=1, eos_token_ids=(answer[0],)),
    ):
        request = engine.add(prompt, params)
        engine.run()
        reasons.append(request.finish_reason)
    assert reasons == ["length", "eos", "stop", "eos"]
