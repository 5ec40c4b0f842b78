"""RoPE whose frequencies depend on the length: every row gets the angles of token-by-token decoding.

The stock reference decodes with a cache, one token at a time behind a whole prompt, because keys written below the
switching length keep their angles when the text grows past it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import zoo
from few import crossed, few
from runner_driver import Run, Tree, difference, one_thread, runners_for  # noqa: F401
from torch import Tensor
from transformers import AutoConfig, DynamicCache

from draftree.runner.target import inspect_model

PARENTS = (-1, 0, 0, 1, 3, 4, 4, 5)  # five deep
SWITCH = {"llama-dynamic": 64, "phi3-longrope": 128}  # length at which the frequencies change
STRETCHED: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope": {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64},
}
# One of every family with rotary modules that take such parameters.
ROTARY = [
    f"{member.id}+{kind}"
    for member in {member.model_type: member for member in reversed(zoo.CAUSAL)}.values()
    if hasattr(AutoConfig.for_model(member.model_type), "rope_parameters")
    for kind in STRETCHED
    if (member.model_type, kind) != ("phi3", "dynamic")  # Hugging Face refuses it
]
# Angles by kind of layer, turned neighbours, half of a table, complex numbers.
SPECIAL = ("gemma3+dynamic", "olmo3+longrope", "cohere+dynamic", "gpt_oss+longrope", "llama4+dynamic")


@functools.cache
def _pristine(name: str) -> Any:
    family, _, kind = name.partition("+")
    member = zoo.MEMBERS[family]
    if not kind:
        return zoo.construct(member)
    rope, settings = dict(STRETCHED[kind]), {"max_position_embeddings": 64 if kind == "dynamic" else 256}
    if family == "mixtral":
        settings["head_dim"] = 16  # None otherwise, which Hugging Face does not stretch
    rotary = next(m for m in zoo.construct(member).modules() if hasattr(m, "rope_type"))
    by_layer = isinstance(rotary.rope_type, dict)
    usual = rotary.config.rope_parameters
    if not by_layer and "partial_rotary_factor" in usual:
        rope["partial_rotary_factor"] = usual["partial_rotary_factor"]
    if kind == "longrope":
        pairs = next(buffer for name, buffer in rotary.named_buffers() if name.endswith("inv_freq")).numel()
        rope |= {"short_factor": [1.0] * pairs, "long_factor": [3.0] * pairs}
    parameters = usual | {"full_attention": rope} if by_layer else rope
    return zoo.construct(member, rope_parameters=parameters, **settings)


@functools.cache
@torch.no_grad()
def _decoded(name: str, prompt: tuple[int, ...], text: tuple[int, ...], tokens: tuple[int, ...]) -> list[Tensor]:
    """Return logits [V] of every node of a tree, after `prompt` at once and then `text` and the branch by token.

    Each node has a fresh copy of the model, as these rotary modules remember the longest call.
    """

    def read(model: Any, cache: DynamicCache, ids: Sequence[int]) -> Tensor:
        logits: Tensor = model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits
        return logits[0, -1]

    begun = copy.deepcopy(_pristine(name)), DynamicCache()
    for ids in (prompt, *([token] for token in text)):
        read(*begun, ids)
    behind, logits = [begun], []  # behind the text, then behind each node
    for parent, token in zip(PARENTS, tokens, strict=True):
        behind.append(copy.deepcopy(behind[parent + 1]))
        logits.append(read(*behind[-1], [token]))
    return logits


def _worst(name: str, run: Run, trees: list[Tree], logits: Tensor) -> float:
    worst = 0.0
    for b, tree in enumerate(trees):
        assert tuple(tree.parents) == PARENTS
        prompt, text = run.prompts[b].tolist(), run.texts[b].tolist()
        expected = _decoded(name, tuple(prompt), tuple(text[len(prompt) :]), tuple(tree.tokens.tolist()))
        worst = max(worst, difference(logits[b, : tree.size], torch.stack(expected)))
    return worst


@pytest.mark.parametrize(("before", "name"), crossed([3, 1, 0, -5], SWITCH))
def test_trees_across_the_switch(name: str, before: int) -> None:
    for runner in runners_for(zoo.build(name)):
        run = Run(runner, [SWITCH[name] - before])
        trees = [Tree(PARENTS, 2)]
        result = run.prefill().step(trees)
        assert _worst(name, run, trees, result.logits) < 1e-4
        run.commit(trees, [trees[0].branches[5]], result)
        trees = [Tree(PARENTS, 3)]
        assert _worst(name, run, trees, run.step(trees).logits) < 1e-4


@pytest.mark.parametrize("name", SWITCH)
def test_requests_on_both_sides_share_a_pass(name: str) -> None:
    for runner in runners_for(zoo.build(name)):
        run = Run(runner, [SWITCH[name] + n for n in (-30, -2, 9)])
        trees = [Tree(PARENTS, 2), Tree(PARENTS, 3), Tree(PARENTS, 4)]
        result = run.prefill(chunks=[20, 1000]).step(trees)
        assert _worst(name, run, trees, result.logits) < 1e-4


@pytest.mark.parametrize("name", few(ROTARY, SPECIAL))
def test_any_family_on_both_sides_of_the_switch(name: str) -> None:
    for runner in runners_for(_pristine(name)):
        run = Run(runner, [63, 20])
        trees = [Tree(PARENTS, 2), Tree(PARENTS, 3)]
        assert _worst(name, run, trees, run.prefill().step(trees).logits) < 1e-4


def test_prompt_lengths_matter() -> None:
    """Without the prompt's length, a long prompt's first rows would get the short frequencies."""
    for runner in runners_for(zoo.build("llama-dynamic")):
        run, tree = Run(runner, [80], prompt_lengths=False), Tree(PARENTS, 2)
        assert _worst("llama-dynamic", run, [tree], run.prefill().step([tree]).logits) > 1e-2


def test_dynamic_models_may_grow_to_their_stretched_length() -> None:
    assert inspect_model(zoo.build("llama-dynamic")).max_positions == 128  # 64 in the config, factor 2
    assert inspect_model(_pristine("gemma3+dynamic")).max_positions == 256  # 64 and 4, in some layers
    assert inspect_model(zoo.build("llama")).max_positions == 256
    assert inspect_model(zoo.build("bloom")).max_positions is None
