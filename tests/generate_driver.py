"""Helpers for tests of generation: ragged prompts, Hugging Face's answers, and a comparison with a clear message."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from drafters_for_tests import InModel, RandomTree, References
from torch import Tensor
from zoo import BUILT, build

import draftree
from draftree.drafting import BiLD, Drafter, DraftModel, Lookahead, PromptLookup
from draftree.runner.step_cost import StepCost
from draftree.shaping import DynamicTree, Fixed, Shape

NEW = 24
LENGTHS = (19, 7, 12)  # Of prompts in a batch.
FIVE = (*LENGTHS, 15, 9)  # Of a batch that recorded passes pad.
GAP = 1e-4  # Two best scores closer than this may change places by rounding; such a test proves nothing.
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}
CHEAP_ROWS = StepCost((1, 16, 64), (1.0, 1.02, 1.3))


def prompts(lengths: Sequence[int] = LENGTHS, seed: int = 3) -> list[list[int]]:
    """Return random prompts for tiny models, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]


def left_pad(rows: Sequence[Sequence[int]], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Return (ids, mask) as a tokenizer with padding_side='left' makes them."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def hf(model: Any, ids: Tensor, mask: Tensor | None = None, *, seed: int | None = None, **options: Any) -> Tensor:
    """Return Hugging Face's answer; fail if a greedy choice was a near-tie.

    Answers of the zoo's models to plain options, greedy or with a seed, are cached.
    """
    if seed is not None:
        torch.manual_seed(seed)
    asked, state = (ids.tolist(), None if mask is None else mask.tolist(), seed, options), state_of(model)
    if state is None or (options.get("do_sample") and seed is None) or not _plain(asked):
        return _answer(model, ids, mask, options)
    key = state, repr(asked)
    if key not in _ANSWERS:
        _ANSWERS[key] = _answer(model, ids, mask, options)
    return _ANSWERS[key].clone()


_ANSWERS: dict[Any, Tensor] = {}


def state_of(model: Any) -> Any:
    """Return the state of a model of `zoo.build` that its answers depend on; None for any other model."""
    name = next((name for name, built in BUILT.items() if built is model), None)
    hooked = any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())
    if name is None or model.training or hooked:
        return None
    weights = tuple((p.data_ptr(), p._version) for p in model.parameters())
    return name, model.config.to_json_string(), model.generation_config.to_json_string(), weights


def _plain(value: Any) -> bool:
    """Return whether the value's `repr` holds all of it."""
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return _plain([*value.items()])
    return value is None or type(value) in (bool, int, float, str)


def _answer(model: Any, ids: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"do_sample": False, "max_new_tokens": NEW} | options
    out = model.generate(ids, attention_mask=mask, output_scores=True, return_dict_in_generate=True, **options)
    if not options["do_sample"]:
        best = torch.stack(out.scores, 1).float().topk(2, -1).values
        eos = (
            torch.tensor(options.get("eos_token_id", model.generation_config.eos_token_id) or -1)
            .flatten()
            .to(out.sequences.device)
        )
        ends = torch.isin(out.sequences[:, -best.shape[1] :], eos).int()
        alive = ends.cumsum(1) - ends == 0  # behind a row's end nothing is chosen
        gap = (best[..., 0] - best[..., 1])[alive].min()
        if not gap > GAP:
            pytest.fail(f"{type(model).__name__} is too flat for this test: its two best scores are {gap:.1e} apart.")
    return out.sequences


def same(ours: Tensor, theirs: Tensor, what: str = "") -> None:
    """Fail with the first difference."""
    assert ours.shape == theirs.shape, f"{what}: shapes {tuple(ours.shape)} and {tuple(theirs.shape)}"
    if not torch.equal(ours, theirs):
        row, column = (ours != theirs).nonzero()[0].tolist()
        pytest.fail(f"{what}: row {row} differs at {column}: {ours[row].tolist()} and {theirs[row].tolist()}")


def references_of(rows: Sequence[Sequence[int]], sequences: Tensor) -> References:
    """Return continuations by prompt, from generated sequences of left-padded prompts."""
    width = max(len(row) for row in rows)
    return {tuple(row): sequences[b, width:].tolist() for b, row in enumerate(rows)}


@functools.cache
@torch.inference_mode(False)  # The first caller may be in inference mode; all others get copies.
def _demo() -> Any:
    return draftree.demo_model()[0]


def copy_of(name: str) -> Any:
    """Return a copy of the zoo's model of that name, or of the embedded one ("demo")."""
    return copy.deepcopy(_demo() if name == "demo" else build(name))


@functools.cache
def noisy(name: str, noise: float = 0.1) -> Any:
    """Return a noisy copy of a model of the zoo, which often but not always agrees with it."""
    model = copy.deepcopy(build(name))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
    return model


def drafters(references: References, *, in_model: bool = True) -> dict[str, Callable[[], Drafter]]:
    """Return every kind of drafter; tries know parts of the answers, so some of their draft tokens are accepted."""

    def trie(**options: Any) -> Callable[[], Drafter]:
        def make() -> Lookahead:
            drafter = Lookahead(decoding_length=24, branch_length=6, **options)
            for prompt, answer in references.items():
                drafter.warm([[*prompt[-2:], *answer[: NEW // 2]], answer[::2]])
            return drafter

        return make

    made: dict[str, Callable[[], Drafter]] = {
        "random": lambda: RandomTree(references, seed=1),
        "lookahead": trie(),
        "lookahead-parallel": trie(mode="parallel"),
        "lookahead-single": trie(mode="single"),
        "lookahead-prompt": trie(sources="prompt"),
        "lookahead-output": trie(sources="output"),
        "prompt-lookup": lambda: PromptLookup(6),
        "draft-model": lambda: DraftModel(noisy("llama"), depth=4, branching=3, beam=3, confidence=0),
        "bild-lossless": lambda: BiLD(noisy("llama"), 0.1, lossless=True, num_draft_tokens=6),
        "draft-model-ahead": lambda: DraftModel(noisy("llama"), depth=4, branching=2, beam=1, confidence=0),
    }
    if in_model:
        made["in-model"] = lambda: InModel(references, seed=2)
    return made


TRIES = ("lookahead", "lookahead-parallel", "lookahead-single", "lookahead-prompt", "lookahead-output")
# Of `drafters`, those that read or enter a runner's passes, and one whose trees are of every kind. The others hand
# over a tree and never see what runs it: where a model has two runners, one of them is enough.
ON_EVERY_RUNNER = ("random", "in-model")


def tries_in_turn(kinds: Iterable[str], turn: int, turns: int) -> list[str]:
    """Return `kinds` with every `turns`-th trie only; the others get another turn."""
    kept = TRIES[turn % turns :: turns]
    return [kind for kind in kinds if kind in kept or kind not in TRIES]


OF_DEMO: dict[str, Callable[[Any], Any]] = {  # drafters for the embedded model
    "lookahead": lambda model: draftree.Lookahead(),
    "prompt-lookup": lambda model: draftree.PromptLookup(),
    "medusa": lambda model: draftree.demo_drafter("medusa", model),
    "bita": lambda model: draftree.demo_drafter("bita", model),
    "hidden-transfer": lambda model: draftree.demo_drafter("hidden-transfer", model),
}
SHAPES: dict[str, Callable[[], Shape]] = {
    "fixed-16": lambda: Fixed(16),
    "dynamic": lambda: DynamicTree(cost=CHEAP_ROWS),
    "fixed-1": lambda: Fixed(1),
}
