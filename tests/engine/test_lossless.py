"""Losslessness: with any drafter, shape, runner and batch, ids equal plain decoding's and Hugging Face's.

Models are tiny and random; trees are partly true and partly wrong, so nodes of every depth are accepted and rejected.
"""

from __future__ import annotations

import pytest
import torch
from drafters_for_tests import RandomTree
from few import few, shared
from generate_driver import (
    LENGTHS,
    NEW,
    ON_EVERY_RUNNER,
    SAMPLED,
    SHAPES,
    drafters,
    hf,
    left_pad,
    prompts,
    references_of,
    same,
    tries_in_turn,
)
from torch import Tensor
from zoo import CAUSAL, RECURRENT, build

from draftree.drafting import Lookahead
from draftree.engine import Engine, SamplingParams, generate
from draftree.integrations import custom_generate
from draftree.runner import CpuRunner, inspect_model
from draftree.shaping import Fixed

DEFAULT = ("llama", "qwen3", "gpt2", "gemma3", "bloom", "opt", "deepseek_v3", "qwen3_5", "lfm2", "nemotron_h")
NAMES = [m.id for m in CAUSAL + RECURRENT]
FAMILIES = few(NAMES, DEFAULT)
ALONE, SAMPLED_ALONE, BATCH, SAMPLED_BATCH = shared(NAMES, DEFAULT, 4)
TURNS = [*DEFAULT, *(name for name in NAMES if name not in DEFAULT)]
SEED = 11
# Models without keys and values, or whose layers also read the embeddings of the rows that entered.
ROWS_STAY = ("mamba", "mamba2", "falcon_mamba", "zamba2")


def runners(name: str) -> list[str]:
    return ["cpu", "hooked"] if CpuRunner.qualifies(inspect_model(build(name))) else ["hooked"]


def check_all(name: str, ids: Tensor, mask: Tensor | None, expected: Tensor, every: bool, **options: object) -> None:
    """Check every drafter on every runner in every shape against `expected`.

    Without `every`: each drafter in one shape, on one runner if it never sees the runner, and one trie in turn. The
    families of `DEFAULT` cover all tries together.
    """
    rows = prompts(LENGTHS if len(ids) > 1 else LENGTHS[:1])
    made = drafters(references_of(rows, expected), in_model=name not in ROWS_STAY)
    kinds = [*made] if every else tries_in_turn(made, TURNS.index(name) + (len(ids) > 1), 5)
    accepted = 0
    for runner in runners(name):
        for number, (kind, make) in enumerate(made.items()):
            if kind not in kinds or not (every or runner == runners(name)[0] or kind in ON_EVERY_RUNNER):
                continue
            shapes = list(SHAPES) if every or kind == "random" else [list(SHAPES)[number % len(SHAPES)]]
            for shape in shapes:
                out = generate(
                    build(name),
                    ids,
                    mask,
                    drafter=make(),
                    shape=SHAPES[shape](),
                    runner=runner,
                    max_new_tokens=NEW,
                    **options,
                )
                same(out.sequences, expected, f"{name} on {runner} with {kind}, {shape}")
                total = out.stats.total
                assert total.emitted <= total.steps + total.accepted
                accepted += total.accepted
    assert accepted > expected.shape[1] - ids.shape[1]  # Otherwise the test shows nothing.


def greedy_batch(name: str, every: bool) -> None:
    ids, mask = left_pad(prompts())
    expected = hf(build(name), ids, mask)
    plain = generate(build(name), ids, mask, max_new_tokens=NEW)
    same(plain.sequences, expected, f"{name} without a drafter")
    check_all(name, ids, mask, expected, every)


def sampled_batch(name: str, every: bool) -> None:
    rows = prompts()
    ids, mask = left_pad(rows)
    expected = generate(build(name), ids, mask, max_new_tokens=NEW, seed=SEED, **SAMPLED).sequences
    for b, row in enumerate(rows):  # Request b draws from seed + b, as Hugging Face does for it alone.
        alone = hf(build(name), torch.tensor([row]), seed=SEED + b, **SAMPLED)[0, len(row) :]
        ours = expected[b, ids.shape[1] :]
        same(ours[None, : len(alone)], alone[None], f"{name}, row {b} without a drafter")
        assert (ours[len(alone) :] == 0).all()
    check_all(name, ids, mask, expected, every, seed=SEED, **SAMPLED)


@pytest.mark.parametrize("name", ALONE)
def test_greedy_alone(name: str) -> None:
    ids = torch.tensor(prompts(LENGTHS[:1]))
    check_all(name, ids, None, hf(build(name), ids), every=False)


@pytest.mark.parametrize("name", SAMPLED_ALONE)
def test_sampled_alone(name: str) -> None:
    ids = torch.tensor(prompts(LENGTHS[:1]))
    expected = hf(build(name), ids, seed=SEED, **SAMPLED)
    same(generate(build(name), ids, max_new_tokens=NEW, seed=SEED, **SAMPLED).sequences, expected, "plain")
    check_all(name, ids, None, expected, every=False, seed=SEED, **SAMPLED)


@pytest.mark.parametrize("name", BATCH)
def test_greedy_in_a_ragged_batch(name: str) -> None:
    greedy_batch(name, every=False)


@pytest.mark.parametrize("name", SAMPLED_BATCH)
def test_sampled_in_a_ragged_batch(name: str) -> None:
    sampled_batch(name, every=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFAULT)
def test_every_drafter_in_every_shape(name: str) -> None:
    greedy_batch(name, every=True)
    sampled_batch(name, every=True)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_no_seed_draws_from_torch(name: str) -> None:
    """seed=None takes torch's default generator, as Hugging Face does, drafts or none."""
    ids = torch.tensor(prompts(LENGTHS[:1]))
    expected = hf(build(name), ids, seed=5, **SAMPLED)
    made = drafters(references_of(prompts(LENGTHS[:1]), expected))
    for kind in tries_in_turn(made, name == "gpt2", 2):
        torch.manual_seed(5)
        options = SAMPLED | {"drafter": made[kind](), "shape": SHAPES["fixed-16"]()}
        out = generate(build(name), ids, max_new_tokens=NEW, **options)
        same(out.sequences, expected, f"{name} with {kind}")


def test_right_padding_is_padding_too() -> None:
    rows = prompts()
    ids, mask = left_pad(rows)
    expected = generate(build("llama"), ids, mask, max_new_tokens=NEW).sequences[:, ids.shape[1] :]
    width = ids.shape[1]
    right = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    out = generate(build("llama"), right, mask.flip(1), max_new_tokens=NEW)
    same(out.sequences[:, width:], expected)


@pytest.mark.parametrize("pad", [0, 2], ids=["pad", "pad_that_ends"])
def test_without_a_mask_padding_is_what_hugging_face_takes_for_it(pad: int) -> None:
    model, options = build("llama"), {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": pad}
    ids, _ = left_pad(prompts(), pad)
    expected = model.generate(ids, **options)
    same(generate(model, ids, drafter=Lookahead(), **options).sequences, expected)
    same(model.generate(ids, custom_generate=custom_generate(Lookahead()), **options), expected)


# A learned position past the end cannot be looked up (gpt2); gpt_neo has a mask of its own.
@pytest.mark.parametrize("name", ["gpt2", "gpt_neo"])
@pytest.mark.parametrize("new", [16, 3])
def test_up_to_the_last_position_of_the_context(name: str, new: int) -> None:
    """Draft tokens reach beyond the context's end; what is emitted does not."""
    model = build(name)
    rows = prompts((256 - new,), seed=8)
    ids = torch.tensor(rows)
    expected = hf(model, ids, max_new_tokens=new)
    made = drafters(references_of(rows, expected))
    for kind in tries_in_turn(made, name == "gpt2", 2):
        out = generate(model, ids, drafter=made[kind](), shape=SHAPES["fixed-16"](), max_new_tokens=new)
        same(out.sequences, expected, kind)


@pytest.mark.parametrize("name", ["bart", "marian", "m2m_100"])
def test_a_tree_at_the_last_position_of_a_decoder(name: str) -> None:
    """Their position embeddings count a tree's rows, which can exceed the positions."""
    begun, source = [1, *prompts((239,), seed=8)[0]], torch.tensor([5, 9, 3, 17, 4])
    texts: list[list[int]] = []
    for drafter in (None, RandomTree({}, 1)):
        if drafter is not None:
            drafter.references = {tuple(begun): texts[0]}
        with Engine(build(name), drafter=drafter, shape=drafter and Fixed(16)) as engine:
            request = engine.add(begun, SamplingParams(16), encoder_input=source)
            engine.run()
        texts.append(request.tokens)
    assert len(texts[0]) == 16
    assert texts[1] == texts[0]
    assert request.stats.accepted > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_token_0_is_alive_in_a_prompt(name: str) -> None:
    """The mask alone defines padding, not the pad token."""
    rows = [[0, 0, *prompts((9,))[0], 0, 5, 0], [0, *prompts((4,), seed=7)[0], 0]]
    ids, mask = left_pad(rows)
    expected = hf(build(name), ids, mask, no_repeat_ngram_size=3)
    drafter = drafters(references_of(rows, expected))["random"]()
    out = generate(
        build(name),
        ids,
        mask,
        drafter=drafter,
        shape=SHAPES["fixed-16"](),
        max_new_tokens=NEW,
        no_repeat_ngram_size=3,
    )
    same(out.sequences, expected, name)
    assert out.stats.total.accepted > 0
