"""Processors, criteria, streamers and callbacks run as Hugging Face runs them: no gradients, usual tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafters_for_tests import RandomTree
from generate_driver import LENGTHS, NEW, hf, prompts, references_of, same
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList
from zoo import build

from draftree import Engine, custom_generate, generate
from draftree.shaping import Fixed

IDS = torch.tensor(prompts(LENGTHS[:1]))
RUNNERS = pytest.mark.parametrize("runner", ["auto", "hooked"])


class Steered(LogitsProcessor):
    """Follows a gradient, and counts tokens in a tensor of its own."""

    def __init__(self) -> None:
        self.counts = torch.zeros(97)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        assert not input_ids.is_inference()
        assert not scores.is_inference()
        self.counts[input_ids[0, -1]] += 1
        with torch.enable_grad():
            free = scores.clone().requires_grad_()
            (slope,) = torch.autograd.grad(free.softmax(-1)[:, :10].sum(), free)
        return scores + 50 * slope - self.counts


@RUNNERS
@pytest.mark.parametrize("sample", [False, True])
def test_processors(runner: str, sample: bool) -> None:
    expected = hf(build("llama"), IDS, logits_processor=[Steered()], do_sample=sample, seed=4)
    loop = custom_generate(RandomTree(references_of(IDS.tolist(), expected), 1), shape=Fixed(16), runner=runner, seed=4)
    options = {"max_new_tokens": NEW, "do_sample": sample}
    same(build("llama").generate(IDS, custom_generate=loop, logits_processor=[Steered()], **options), expected)


class Reading(StoppingCriteria):
    def __init__(self) -> None:
        self.read: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        assert not torch.is_grad_enabled()
        self.read.append(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Keeping:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        self.kept.append(value)

    def end(self) -> None:
        pass


@RUNNERS
def test_criteria_streamers_and_callbacks(runner: str) -> None:
    """Tensors that they keep can be trained on."""
    criterion, streamer, table = Reading(), Keeping(), torch.nn.Embedding(97, 4)
    criteria = StoppingCriteriaList([criterion])
    generate(build("llama"), IDS, runner=runner, max_new_tokens=6, stopping_criteria=criteria, streamer=streamer)
    heard: list[Tensor] = []
    with Engine(build("llama"), runner=runner) as engine:
        engine.add(IDS[0], max_new_tokens=6, on_token=lambda emitted: heard.append(torch.tensor(emitted.token)))
        engine.run()
    for tensor in (*criterion.read, *streamer.kept, torch.stack(heard)):
        table(tensor).sum().backward()
