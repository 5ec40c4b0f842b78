"""Tiny random models of every family draftree is tested on: four layers, vocabulary 97, no network.

Weights are drawn again after construction, wide enough that logits are far from flat: a model whose logits
hardly move would pass any comparison. `build` keeps one model a name for the whole test run; tests must leave
it as it is.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from zoo_members import (
    CAUSAL,
    ENCODER_DECODER,
    MORE_TOKENS,
    RECURRENT,
    REFUSED,
    Member,
)
from zoo_members import GPT_LIKE as GPT_LIKE
from zoo_members import LLAMA_LIKE as LLAMA_LIKE
from zoo_members import VOCABULARY as VOCABULARY

MEMBERS: dict[str, Member] = {m.id: m for m in CAUSAL + ENCODER_DECODER + MORE_TOKENS + RECURRENT + REFUSED}
BUILT: dict[str, Any] = {}  # what `build` holds
# Cheap families that between them use every code path; the checks of the default test run.
CORE = (
    "llama",
    "llama-dynamic",
    "mistral-window",
    "qwen3",
    "gemma3",
    "gpt2",
    "falcon-alibi",
    "mpt",
    "gpt_neo",
    "t5",
    "bart",
)


@functools.cache
def build(name: str) -> Any:
    """The zoo's model of that id: fp32, eval mode, same weights in every run."""
    return BUILT.setdefault(name, construct(MEMBERS[name]))


def construct(member: Member, **overrides: Any) -> Any:
    """A fresh model of `member`, with `overrides` of its settings."""
    config = AutoConfig.for_model(member.model_type, **member.settings | overrides)
    auto = AutoModelForSeq2SeqLM if member.encoder_decoder else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation=member.attention, dtype=torch.float32).eval()
    draw_weights(model)
    return model


@torch.no_grad()
def draw_weights(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    head = model.get_output_embeddings()
    # A tied table is also the head: at scale 1 rows would merely predict themselves (T5 scales its tied head down).
    small = head is not None and id(head.weight) in tables and model.config.model_type not in ("t5", "umt5")
    for name, weight in model.named_parameters():
        if weight.dim() >= 2 and not name.endswith("A_log"):
            scale = 1.0 if id(weight) in tables and not small else 1.4 / math.sqrt(weight.shape[-1])
            if name.endswith("Attention.q.weight"):  # T5 does not scale its scores: keep them from saturating
                scale /= 4
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
        elif name.endswith("A_log"):  # A slow decay, so that the state matters.
            weight.copy_(torch.rand(weight.shape, generator=generator) * 2 - 3)
        elif "bias" in name or "sink" in name:
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)


def families(*, refused: bool = False) -> set[str]:
    """Hugging Face family names in the zoo: those that can hold trees, or the refused ones."""
    return {m.model_type for m in (REFUSED if refused else CAUSAL + ENCODER_DECODER + RECURRENT)}


def table() -> str:
    """The table of families in docs/runners.md, one line for each set of runners; `python tests/zoo.py` prints it."""
    from draftree.runner.cpu.runner import CpuRunner
    from draftree.runner.cpu.t5 import T5Runner
    from draftree.runner.cuda_graphs.runner import CudaGraphRunner
    from draftree.runner.eager.runner import EagerRunner
    from draftree.runner.target import inspect_model

    found: dict[str, list[str]] = {}
    for member in CAUSAL + ENCODER_DECODER + RECURRENT:
        target = inspect_model(build(member.id))
        eager, cpu = EagerRunner.qualifies(target), CpuRunner.qualifies(target) or T5Runner.qualifies(target)
        runners = "hooked" + ", eager" * eager + ", cpu" * cpu
        runners += ", cuda_graphs" * CudaGraphRunner.qualifies(target)
        note = f" ({member.note})" if member.note else ""
        found.setdefault(runners, []).append(f"`{member.model_type}`{note}")
    lines = [f"| {runners} | {', '.join(families)} |" for runners, families in found.items()]
    return "\n".join(["| runners | families |", "|---|---|", *lines])


if __name__ == "__main__":
    print(table())
