"""Losslessness of encoder-decoders: trees grow in the decoder, ids are Hugging Face's."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from drafters_for_tests import RandomTree
from few import few, shared
from generate_driver import NEW, SHAPES, drafters, hf, left_pad, noisy, prompts, same
from torch import Tensor
from zoo import ENCODER_DECODER, MEMBERS, build

from draftree.drafting import BiLD, Drafter, DraftModel, Lookahead
from draftree.engine import generate
from draftree.integrations import custom_generate
from draftree.shaping import Fixed

NAMES = [m.id for m in ENCODER_DECODER]
ODD, EVEN = shared(NAMES, ("t5", "bart"))
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 30, "repetition_penalty": 1.1}
VARIED = {"no_repeat_ngram_size": 3}  # greedy answers of these tiny models are one token over and over
GREEDY = VARIED | {"do_sample": False, "max_new_tokens": NEW}
SEED = 4


def makers(name: str, expected: Tensor) -> dict[str, Drafter]:
    """Random trees know row 0's answer; all requests share the decoder's start, so for others it is mostly wrong."""
    start = int(expected[0, 0])
    answer = expected[0, 1:].tolist()
    trie = Lookahead(decoding_length=24, branch_length=6)
    for row in expected:
        trie.warm([row[2:14].tolist()])
    return {
        "random": RandomTree({(start,): answer}, seed=3),
        "lookahead": trie,
        "prompt-lookup": drafters({}, in_model=False)["prompt-lookup"](),
    }


def check(
    name: str, ids: Tensor, mask: Tensor | None, expected: Tensor, *, brief: bool = False, **options: object
) -> None:
    """Check every drafter in every shape against `expected`; with `brief`, tries in one shape."""
    accepted = 0
    for shape in SHAPES:
        for kind, drafter in makers(name, expected).items():
            if brief and kind == "lookahead" and shape != "fixed-16":
                continue
            out = generate(
                build(name), ids, mask, drafter=drafter, shape=SHAPES[shape](), max_new_tokens=NEW, **options
            )
            same(out.sequences, expected, f"{name} with {kind}, {shape}")
            accepted += out.stats.total.accepted
    assert accepted > NEW


@pytest.mark.parametrize("name", ODD)
def test_greedy(name: str) -> None:
    ids = torch.tensor(prompts((13,)))
    for options in ({}, VARIED):
        expected = hf(build(name), ids, **options)
        same(generate(build(name), ids, max_new_tokens=NEW, **options).sequences, expected, "plain")
        check(name, ids, None, expected, brief=not options, **options)


@pytest.mark.parametrize("name", EVEN)
def test_sampled(name: str) -> None:
    ids = torch.tensor(prompts((13,)))
    expected = hf(build(name), ids, seed=SEED, **SAMPLED)
    same(generate(build(name), ids, max_new_tokens=NEW, seed=SEED, **SAMPLED).sequences, expected, "plain")
    check(name, ids, None, expected, seed=SEED, **SAMPLED)


@pytest.mark.parametrize("name", EVEN)
def test_greedy_with_ragged_encoders(name: str) -> None:
    ids, mask = left_pad(prompts())
    ids, mask = ids.flip(1), mask.flip(1)  # encoders are padded on the right
    expected = hf(build(name), ids, mask, **VARIED)
    same(generate(build(name), ids, mask, max_new_tokens=NEW, **VARIED).sequences, expected, "plain")
    check(name, ids, mask, expected, **VARIED)


@pytest.mark.parametrize(
    "name", few(["t5", "umt5", "m2m_100", "bart", "mbart", "marian", "pegasus"], ["t5", "bart", "marian"])
)
def test_sources_padded_on_the_left(name: str) -> None:
    """Each row is answered as alone; Hugging Face's encoders of four families read padding on the left as places."""
    rows = prompts()
    ids, mask = left_pad(rows)
    theirs = hf(build(name), ids, mask, **VARIED)
    ours = generate(build(name), ids, mask, max_new_tokens=NEW, **VARIED).sequences
    for b, row in enumerate(rows):
        alone = hf(build(name), torch.tensor([row]), **VARIED)
        same(ours[b : b + 1, : alone.shape[1]], alone, f"row {b}")
    assert torch.equal(ours, theirs) == ("a left-padded source as alone" not in MEMBERS[name].note)
    # There, Hugging Face has run the encoder.
    same(build(name).generate(ids, attention_mask=mask, custom_generate=custom_generate(), **GREEDY), theirs)
    if name == "bart":
        check(name, ids, mask, ours, brief=True, **VARIED)


@pytest.mark.parametrize("name", ODD)
def test_sampled_with_ragged_encoders(name: str) -> None:
    rows = prompts()
    ids, mask = left_pad(rows)
    ids, mask = ids.flip(1), mask.flip(1)
    expected = generate(build(name), ids, mask, max_new_tokens=NEW, seed=SEED, **SAMPLED).sequences
    for b, row in enumerate(rows):
        alone = hf(build(name), torch.tensor([row]).flip(1), seed=SEED + b, **SAMPLED)[0]
        same(expected[b : b + 1, : len(alone)], alone[None], f"{name}, row {b}")
    check(name, ids, mask, expected, seed=SEED, **SAMPLED)


@pytest.mark.filterwarnings("ignore:The small model is no smaller")
@pytest.mark.parametrize(("name", "sampled"), few(product(NAMES, [False, True]), [("t5", False), ("bart", True)]))
def test_small_encoder_decoders_and_single_branches(name: str, sampled: bool) -> None:
    """In a ragged batch whose requests end one by one, each small model with an encoder of its own."""
    ids, mask = left_pad(prompts((19, 7, 12, 5)))
    ids, mask = ids.flip(1), mask.flip(1)
    options: dict[str, object] = SAMPLED | {"seed": SEED} if sampled else VARIED
    params = options | {"eos_token_id": list(range(3, 12)), "max_new_tokens": NEW}
    expected = generate(build(name), ids, mask, **params).sequences
    single = Lookahead(decoding_length=8, branch_length=6, mode="single")
    for row in expected:
        single.warm([row[2:14].tolist()])
    small, drafting = noisy(name), 0
    for kind, drafter, shape in (
        ("single branch", single, Fixed(6)),
        ("tree", DraftModel(small, depth=4, branching=3, confidence=0), Fixed(10)),
        ("chain", DraftModel(small, depth=4, branching=1, confidence=0), SHAPES["dynamic"]()),
        ("bild", BiLD(small, 0.1, lossless=True), None),
    ):
        out = generate(build(name), ids, mask, drafter=drafter, shape=shape, **params)
        same(out.sequences, expected, f"{name} with {kind}")
        drafting += out.stats.total.accepted > 0
    assert drafting > 1


def test_the_shape_of_every_day_measures_the_decoder() -> None:
    """No shape given: the cost of a step is measured with an encoder's output in place."""
    ids = torch.tensor(prompts((13,)))
    expected = hf(build("t5"), ids)
    out = generate(build("t5"), ids, drafter=makers("t5", expected)["random"], max_new_tokens=NEW)
    same(out.sequences, expected)


@pytest.mark.parametrize(
    ("option", "value"),
    few(
        [("encoder_repetition_penalty", 1.5), ("encoder_no_repeat_ngram_size", 1), ("forced_bos_token_id", 9)],
        [("encoder_no_repeat_ngram_size", 1)],
    ),
)
def test_processors_of_the_encoder(option: str, value: float) -> None:
    options = {option: value}
    ids, mask = left_pad(prompts())
    ids, mask = ids.flip(1), mask.flip(1)
    options |= VARIED
    expected = hf(build("bart"), ids, mask, **options)
    assert not torch.equal(expected, hf(build("bart"), ids, mask, **VARIED))
    check("bart", ids, mask, expected, brief=True, **options)
