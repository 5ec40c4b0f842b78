"""Runs of models whose scores are close together, for tests of strict mode."""

from __future__ import annotations

import functools
from typing import Any

import torch
from generate_driver import prompts
from transformers import LogitsProcessorList, TemperatureLogitsWarper
from zoo import MEMBERS, construct

from draftree.engine import Engine, Request, SamplingParams
from draftree.runner import Runner
from draftree.shaping import Fixed

NEW = 24
PROMPTS = prompts((12, 12, 5, 12, 30, 12), seed=0)


@functools.cache
def flat(name: str) -> Any:
    """Return a tiny bfloat16 model whose scores are so close that last bits decide."""
    model = construct(MEMBERS[name])
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.05)
    return model.to(torch.bfloat16)


def params_of(b: int, sample: bool) -> SamplingParams:
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.05)] if sample else [])
    return SamplingParams(max_new_tokens=NEW, sample=sample, seed=b if sample else None, processors=processors)


def run(
    model: Any, runner: str | Runner, *, sample: bool = False, slots: int = 1, size: int = 12, **options: Any
) -> tuple[list[Request], Engine]:
    engine = Engine(model, slots=slots, shape=Fixed(size), runner=runner, **options)
    made = [engine.add(prompt, params_of(b, sample)) for b, prompt in enumerate(PROMPTS)]
    engine.run()
    assert all(r.error is None for r in made)
    return made, engine
