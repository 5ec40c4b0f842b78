"""A case of the campaign: drawn at random from its seed and number, with everything it needs."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from drafters_for_tests import RandomTree, References
from generate_driver import CHEAP_ROWS, drafters
from in_model_driver import MAKERS, make
from pruning_driver import randomised_head
from torch import Tensor
from zoo import CAUSAL, ENCODER_DECODER, MEMBERS, VOCABULARY, build

from draftree.drafting import Drafter, Lookahead, Merge
from draftree.pruning import EarlyHead, EarlyPruning
from draftree.runner import choose, inspect_model
from draftree.shaping import DynamicTree, Fixed, Shape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RUNNERS = ("hooked", "eager", "cpu", "cuda_graphs")
EOS = 2

SHAPES: dict[str, Callable[[], Shape | None]] = {
    "default": lambda: None,
    "fixed-1": lambda: Fixed(1),
    "fixed-4": lambda: Fixed(4),
    "fixed-16": lambda: Fixed(16),
    "fixed-40": lambda: Fixed(40),
    "dynamic": lambda: DynamicTree(cost=CHEAP_ROWS),
}
PRUNERS: dict[str, dict[str, Any]] = {
    "early": {"layer": 1, "top_k": 30},
    "middle": {"layer": 2, "top_k": 40},
    "late": {"layer": 3, "rank": 8, "top_k": 70},
}
# Hugging Face's options that change scores, each with how to draw its value.
PROCESSORS: dict[str, Callable[[random.Random], Any]] = {
    "repetition_penalty": lambda rng: rng.choice([0.8, 1.1, 1.3]),
    "no_repeat_ngram_size": lambda rng: rng.choice([2, 3]),
    "min_new_tokens": lambda rng: rng.choice([1, 5]),
    "suppress_tokens": lambda rng: rng.sample(range(3, VOCABULARY), 3),
    "begin_suppress_tokens": lambda rng: rng.sample(range(3, VOCABULARY), 3),
    "bad_words_ids": lambda rng: [[rng.randrange(3, VOCABULARY)], rng.sample(range(3, VOCABULARY), 2)],
    "sequence_bias": lambda rng: [[[rng.randrange(3, VOCABULARY)], 2.0], [rng.sample(range(3, VOCABULARY), 2), -3.0]],
    "renormalize_logits": lambda rng: True,
}
WARPERS: dict[str, Callable[[random.Random], Any]] = {
    "temperature": lambda rng: rng.choice([0.5, 0.8, 1.4]),
    "top_k": lambda rng: rng.choice([0, 5, 40]),
    "top_p": lambda rng: rng.choice([0.6, 0.9]),
    "min_p": lambda rng: rng.choice([0.02, 0.1]),
    "typical_p": lambda rng: 0.9,
}
MERGES: dict[str, tuple[str, ...]] = {
    "trie+transfer": ("lookahead", "hidden-transfer"),
    "trie+medusa": ("lookahead", "medusa"),
    "trie+lookup": ("lookahead", "prompt-lookup"),
    "model+bita": ("draft-model", "bita"),
    "trie+lookup+bita": ("lookahead", "prompt-lookup", "bita"),
    "random+transfer": ("random", "hidden-transfer"),
}
OF_DECODERS = ("random", "lookahead", "lookahead-prompt", "prompt-lookup")  # with an encoder


@dataclass(frozen=True)
class Case:
    """One comparison; all of it follows from (seed, number).

    Attributes:
        number: of the case.
        family: of the zoo.
        dtype: of the weights.
        runner: the name of one that drives this family in this dtype.
        drafter: of those in `drafter_of`.
        shape: of `SHAPES`; for some drafters the shape is their own, and this one is not used.
        pruner: of `PRUNERS`, or None.
        through: "generate", "custom_generate", or "engine", where requests wait, join and leave.
        prompts: token ids, ragged.
        options: Hugging Face's.
        strict: as in `generate`.
        seed: of the noise.
        slots: of the engine.
        again: whether the drafter is used a second time, with all that it knows by then.
    """

    number: int
    family: str
    dtype: str
    runner: str
    drafter: str
    shape: str
    pruner: str | None
    through: str
    prompts: list[list[int]]
    options: dict[str, Any]
    strict: bool
    seed: int
    slots: int
    again: bool

    @property
    def encoder_decoder(self) -> bool:
        """Return whether an encoder reads the prompts."""
        return MEMBERS[self.family].encoder_decoder

    @property
    def row(self) -> tuple[str, str, str]:
        """Return the case's line in the report's table."""
        return self.dtype, self.runner, "strict" if self.strict else ""


def draw(seed: int, number: int) -> Case:
    """Draw case `number` of the campaign with this seed."""
    rng = random.Random(f"{seed} {number}")
    family = rng.choice(CAUSAL + ENCODER_DECODER).id
    encoder_decoder = MEMBERS[family].encoder_decoder
    # Near-ties of 16-bit encoder-decoders cannot be told from errors: nothing measures how far their scores move.
    # Those of longrope neither, as the stock model reads a long text anew with other frequencies, nor those of experts,
    # among which near-ties choose as well.
    told = not encoder_decoder and "longrope" not in family and "experts" not in MEMBERS[family].note
    dtype = rng.choices(list(DTYPES), [6, 3, 1])[0] if told else "float32"
    if encoder_decoder:
        drafter = rng.choice([*OF_DECODERS, *MAKERS])
    else:
        drafter = rng.choice([rng.choice(list(drafters({}))), rng.choice(list(MAKERS)), rng.choice(list(MERGES))])
        if drafter == "in-model" and dtype != "float32":  # its rows are float32's alone
            drafter = "random"
    batch = rng.choice([1, 1, 1, 2, 3, 3, 5, 9])
    options = {name: drawn(rng) for name, drawn in PROCESSORS.items() if rng.random() < 0.1}
    if rng.random() < 0.5:
        options |= {"do_sample": True} | {name: drawn(rng) for name, drawn in WARPERS.items() if rng.random() < 0.4}
    if rng.random() < 0.2:
        options["eos_token_id"] = rng.choice([[], [EOS, 0], rng.sample(range(VOCABULARY), 12)])
    options |= {"max_new_tokens": rng.choice([1, 7, 16, 24]), "pad_token_id": 0}
    return Case(
        number=number,
        family=family,
        dtype=dtype,
        runner=rng.choice(runners(family, dtype)),
        drafter=drafter,
        shape=rng.choice(list(SHAPES)),
        pruner=rng.choice(list(PRUNERS)) if rng.random() < 0.2 and drafter != "in-model" else None,  # which drops rows
        through=rng.choice(["generate", "generate", "custom_generate", *["engine"] * (not encoder_decoder)]),
        prompts=[_prompt(rng) for _ in range(batch)],
        options=options,
        strict=not encoder_decoder and rng.random() < (0.1 if dtype == "float32" else 0.5),
        seed=rng.randrange(2**31),
        slots=rng.randint(1, batch),
        again=rng.random() < 0.25,
    )


def _prompt(rng: random.Random) -> list[int]:
    """Return token ids with repetitions, 0 among them."""
    ids = [rng.randrange(3, VOCABULARY) for _ in range(rng.choice([1, 2, 6, 13, 30]))]
    for _ in range(rng.randrange(4)):
        start = rng.randrange(len(ids))
        ids += ids[start : start + rng.randint(1, 6)]
    return [0 if rng.random() < 0.05 else token for token in ids]


@functools.cache
def model_of(family: str, dtype: str) -> Any:
    """Return the zoo's model in this type."""
    if dtype == "float32":
        return build(family)
    return copy.deepcopy(build(family)).to(DTYPES[dtype])


@functools.cache
def runners(family: str, dtype: str) -> tuple[str, ...]:
    """Return the runners that drive a family in a type."""
    target = inspect_model(model_of(family, dtype))
    return tuple(name for name in RUNNERS if choose(target, name).qualifies(target))


def drafter_of(case: Case, references: References) -> Drafter:
    """Return a fresh drafter; tries and random trees know parts of the answers."""
    if case.drafter in MERGES:
        return Merge([_one(case, name, references) for name in MERGES[case.drafter]])
    return _one(case, case.drafter, references)


def _one(case: Case, name: str, references: References) -> Drafter:
    if name in MAKERS:
        return make(name, model_of(case.family, case.dtype))
    if case.encoder_decoder and name == "random":  # all answers begin alike: the first one is known
        return RandomTree(dict(list(references.items())[:1]), seed=case.number)
    if case.encoder_decoder and name == "lookahead":
        trie = Lookahead(decoding_length=24, branch_length=6)
        trie.warm([answer[1:12] for answer in references.values() if len(answer) > 2])
        return trie
    if name == "random":
        return RandomTree(references, seed=case.number)
    return drafters(references)[name]()


@functools.cache
def _head(family: str, dtype: str, layer: int, rank: int) -> EarlyHead:
    return randomised_head(EarlyHead.fresh(model_of(family, dtype), layer=layer, rank=rank))


def pruner_of(case: Case) -> EarlyPruning | None:
    """Return the case's pruner, which drops much: early states of tiny models say little."""
    if case.pruner is None:
        return None
    options = dict(PRUNERS[case.pruner])
    head = _head(case.family, case.dtype, options.pop("layer"), options.pop("rank", 0))
    return EarlyPruning(head, always=True, **options)


def padded(case: Case) -> tuple[Tensor, Tensor]:
    """Return (ids, mask) of the prompts, padded on the left; for encoders on the right."""
    width = max(map(len, case.prompts))
    ids, mask = torch.zeros(2, len(case.prompts), width, dtype=torch.long)
    for b, row in enumerate(case.prompts):
        where = slice(0, len(row)) if case.encoder_decoder else slice(width - len(row), width)
        ids[b, where], mask[b, where] = torch.tensor(row), 1
    return ids, mask
