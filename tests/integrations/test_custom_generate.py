"""`model.generate` gives the same ids with and without `custom_generate=draftree.custom_generate(...)`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafters_for_tests import RandomTree
from few import crossed
from generate_driver import LENGTHS, NEW, SAMPLED, SHAPES, drafters, hf, left_pad, noisy, prompts, references_of, same
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList
from zoo import build

from draftree.drafting import Lookahead, PromptLookup
from draftree.engine import generate
from draftree.integrations import custom_generate
from draftree.shaping import Fixed

SEED = 13


def through(
    name: str, ids: Tensor, mask: Tensor | None, references: Any, *, seed: int | None = None, **options: Any
) -> Any:
    """Hugging Face's generate with our loop inside; its kwargs as a user passes them."""
    if seed is not None:
        torch.manual_seed(seed)
    loop = custom_generate(RandomTree(references, 1), shape=Fixed(16))
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    return build(name).generate(ids, attention_mask=mask, custom_generate=loop, **options)


ALONE = ["llama", "gpt2", "bloom"]


@pytest.mark.parametrize(("name", "options"), crossed(ALONE, [{}, SAMPLED]))
def test_alone(name: str, options: dict[str, Any]) -> None:
    """A third of the drafters with each family: this door hands them on as they are."""
    rows = prompts(LENGTHS[:1])
    ids = torch.tensor(rows)
    expected = hf(build(name), ids, seed=SEED, **options)
    made = drafters(references_of(rows, expected))
    for kind in [*made][ALONE.index(name) :: len(ALONE)]:
        torch.manual_seed(SEED)
        loop = custom_generate(made[kind](), shape=SHAPES["fixed-16"]())
        out = build(name).generate(ids, custom_generate=loop, **{"max_new_tokens": NEW, "do_sample": False} | options)
        same(out, expected, kind)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3},
        {"encoder_repetition_penalty": 1.5},
        {"encoder_no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 20},
        {"max_new_tokens": None, "max_length": 26},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_left_padded_batch(options: dict[str, Any]) -> None:
    """Also processors that hold one entry a row of the batch."""
    rows = prompts()
    ids, mask = left_pad(rows)
    expected = hf(build("llama"), ids, mask, **options)
    same(through("llama", ids, mask, references_of(rows, expected), **options), expected)


def test_sampled_batch_equals_our_own_generate() -> None:
    rows = prompts()
    ids, mask = left_pad(rows)
    expected = generate(build("llama"), ids, mask, max_new_tokens=NEW, seed=SEED, **SAMPLED).sequences
    loop = custom_generate(RandomTree(references_of(rows, expected)), shape=Fixed(16), seed=SEED)
    out = build("llama").generate(ids, attention_mask=mask, custom_generate=loop, max_new_tokens=NEW, **SAMPLED)
    same(out, expected)


def test_num_return_sequences() -> None:
    rows = prompts(LENGTHS[:1])
    ids = torch.tensor(rows)
    loop = custom_generate(RandomTree({}), shape=Fixed(8), seed=SEED)
    out = build("llama").generate(ids, custom_generate=loop, num_return_sequences=3, max_new_tokens=NEW, do_sample=True)
    own = generate(build("llama"), ids, num_return_sequences=3, max_new_tokens=NEW, do_sample=True, seed=SEED)
    same(out, own.sequences)
    assert len({tuple(row) for row in out.tolist()}) == 3
    first = hf(build("llama"), ids, seed=SEED, do_sample=True)
    same(out[:1, : first.shape[1]], first)


class Everything:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.got: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.got.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_streamer_under_our_name() -> None:
    rows = prompts(LENGTHS[:1])
    ids = torch.tensor(rows)
    theirs, ours, direct = Everything(), Everything(), Everything()
    expected = hf(build("llama"), ids, streamer=theirs)
    references = references_of(rows, expected)
    loop = custom_generate(RandomTree(references), shape=Fixed(16), streamer=ours)
    build("llama").generate(ids, custom_generate=loop, max_new_tokens=NEW, do_sample=False)
    generate(build("llama"), ids, drafter=RandomTree(references), shape=Fixed(16), max_new_tokens=NEW, streamer=direct)
    assert ours.got == direct.got == theirs.got
    assert ours.ended == direct.ended == theirs.ended == 1


def test_streamer_of_generate_itself() -> None:
    """Hugging Face does not pass it on, but its reader must not wait for ever."""
    ids = torch.tensor(prompts(LENGTHS[:1]))
    theirs, ours = Everything(), Everything()
    hf(build("llama"), ids, streamer=theirs)
    options = {"max_new_tokens": NEW, "do_sample": False}
    build("llama").generate(ids, custom_generate=custom_generate(Lookahead()), streamer=ours, **options)
    assert ours.got == theirs.got
    assert ours.ended == 1
    with pytest.raises(ValueError, match="both have a streamer"):
        build("llama").generate(ids, custom_generate=custom_generate(streamer=ours), streamer=ours, **options)


class Failing(PromptLookup):
    """Ends the run with an error after a few steps."""

    left = 4

    def draft(self, requests: Any, budgets: Any) -> Any:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return super().draft(requests, budgets)


@pytest.mark.parametrize(
    ("options", "drafter", "error"), [({"num_beams": 2}, Lookahead, ValueError), ({}, Failing, KeyboardInterrupt)]
)
def test_an_error_ends_the_streamer(options: dict[str, Any], drafter: Any, error: type[BaseException]) -> None:
    """A reader of the streamer in another thread would wait for ever otherwise."""
    model, ids = build("llama"), torch.tensor(prompts(LENGTHS[:1]))
    given = {"max_new_tokens": NEW, "do_sample": False} | options
    inside, direct = Everything(), Everything()
    with pytest.raises(error):
        model.generate(ids, custom_generate=custom_generate(drafter(), shape=Fixed(4)), streamer=inside, **given)
    with pytest.raises(error):
        generate(model, ids, drafter=drafter(), shape=Fixed(4), streamer=direct, **given)
    assert inside.ended == direct.ended == 1


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_decoder(name: str) -> None:
    ids, mask = left_pad(prompts())
    ids, mask = ids.flip(1), mask.flip(1)
    options = {"no_repeat_ngram_size": 3}
    expected = hf(build(name), ids, mask, **options)
    start = int(expected[0, 0])
    same(through(name, ids, mask, {(start,): expected[0, 1:].tolist()}, **options), expected)
    alone = ids[:1]
    sampled = hf(build(name), alone, seed=SEED, do_sample=True)
    same(through(name, alone, None, {(start,): sampled[0, 1:].tolist()}, seed=SEED, do_sample=True), sampled)


class Alternating(LogitsProcessor):
    """Keeps a state: forbids even ids at every second call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 2:
            scores = scores.clone()
            scores[:, ::2] = float("-inf")
        return scores


class AfterFive(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("count", [1, 3])
def test_processors_and_criteria_of_the_user(count: int) -> None:
    rows = prompts(LENGTHS[:count])
    ids, mask = left_pad(rows)
    stop = StoppingCriteriaList([AfterFive(ids.shape[1] + 11)])
    expected = hf(build("llama"), ids, mask, logits_processor=[Alternating()], stopping_criteria=stop)
    references = references_of(rows, hf(build("llama"), ids, mask, logits_processor=[Alternating()]))
    out = through("llama", ids, mask, references, logits_processor=[Alternating()], stopping_criteria=stop)
    same(out, expected)
    assert out.shape[1] == ids.shape[1] + 11


class ByRow(LogitsProcessor):
    """Treats rows by their place: row b says only tokens whose rest by 3 is b."""

    def __init__(self, count: int) -> None:
        self.bias = torch.full((count, 97), float("-inf"))
        for b in range(count):
            self.bias[b, b + 3 :: 3] = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.bias


def test_a_processor_that_depends_on_the_row() -> None:
    rows = prompts()
    ids, mask = left_pad(rows)
    expected = hf(build("llama"), ids, mask, logits_processor=[ByRow(len(rows))])
    references = references_of(rows, expected)
    same(through("llama", ids, mask, references, logits_processor=[ByRow(len(rows))]), expected)


class Locked(Alternating):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_a_processor_that_cannot_be_copied() -> None:
    ids, mask = left_pad(prompts())
    with pytest.raises(ValueError, match="Locked cannot be copied, as each text of a batch needs"):
        through("llama", ids, mask, {}, logits_processor=[Locked()])
    expected = hf(build("llama"), ids[:1], mask[:1], logits_processor=[Alternating()])
    same(through("llama", ids[:1], mask[:1], {}, logits_processor=[Locked()]), expected)


def counting_by_row() -> Callable[[int, Tensor], list[int]]:
    calls: Counter[int] = Counter()

    def allowed(row: int, prefix: Tensor) -> list[int]:
        calls[row] += 1
        return [t for t in range(3, 97) if t % 2 == calls[row] % 2]

    return allowed


def test_a_prefix_function_is_called_once_a_token_with_its_row() -> None:
    """All rows share the function; state that it keeps by row changes with that row's tokens alone."""
    rows = prompts()
    ids, mask = left_pad(rows)
    expected = hf(build("llama"), ids, mask, prefix_allowed_tokens_fn=counting_by_row())
    same(
        through("llama", ids, mask, references_of(rows, expected), prefix_allowed_tokens_fn=counting_by_row()), expected
    )


def test_functions_as_processors_are_shared_by_a_batch() -> None:
    """They may hold a model, which is not copied."""
    rows, model = prompts(), noisy("llama")
    ids, mask = left_pad(rows)

    @torch.no_grad()
    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        assert model is noisy("llama")
        return scores.index_fill(1, torch.tensor([4, 8]), -torch.inf)

    expected = hf(build("llama"), ids, mask, logits_processor=[processor])
    same(through("llama", ids, mask, references_of(rows, expected), logits_processor=[processor]), expected)


def test_guidance_alone_and_refused_in_a_batch() -> None:
    rows = prompts(LENGTHS[:1])
    ids = torch.tensor(rows)
    expected = hf(build("llama"), ids, guidance_scale=1.7)
    same(through("llama", ids, None, references_of(rows, expected), guidance_scale=1.7), expected)
    batch, mask = left_pad(prompts())
    with pytest.raises(ValueError, match="batch of 1"):
        through("llama", batch, mask, {}, guidance_scale=1.7)
