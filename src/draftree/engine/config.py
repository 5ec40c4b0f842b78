"""The options of an engine as one checked value."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from draftree.acceptance import LossyRule
from draftree.drafting.base import Drafter
from draftree.engine.recorder import Recorder
from draftree.errors import check_kind, check_least, did_you_mean, whole
from draftree.pruning import EarlyPruning
from draftree.runner import Runner
from draftree.shaping import Shape

# Options that are objects: class, and advice for other values.
KINDS: tuple[tuple[str, type, str], ...] = (
    ("recorder", Recorder, "draftree.Recorder(), or None for no record"),
    ("drafter", Drafter, "a drafter object such as draftree.Lookahead(), or the name of one"),
    ("shape", Shape, "a shape object such as draftree.DynamicTree()"),
    ("acceptance", LossyRule, "None (lossless) or draftree.LossyTypical()"),
    ("pruner", EarlyPruning, "a pruner object such as draftree.EarlyPruning(head)"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine.

    Attributes:
        slots: requests decoded together; others wait.
        shape: sizes the trees; by default `DynamicTree`.
        pruner: drops improbable draft tokens inside the pass (`EarlyPruning`); None for none.
        runner: "auto" (the fastest for the model), "hooked", "eager", "cpu", "cuda_graphs", "in_place" (the fastest
            without a copy of the weights), or a runner opened for the model.
        strict: answers of 16-bit models are bit for bit those of plain decoding; see `check_strict`.
        capacity: KV positions of each slot to allocate at first; the cache grows on demand.
        reject_drafts: verify draft tokens but accept none (the worst case, for measurements).
        acceptance: None is lossless; `LossyTypical` accepts plausible draft tokens and CHANGES the text.
        recorder: records each step for `write_trace`; None for no record.
        keep_prefixes: whether a free slot keeps its keys and values for prompts with the same beginning; see
            `Scheduler`. Not with `strict`.

    Raises:
        TypeError, ValueError: a wrong option, or two that exclude each other.
    """

    drafter: Drafter | None = None
    slots: int = 8
    shape: Shape | None = None
    pruner: EarlyPruning | None = None
    runner: str | Runner = "auto"
    strict: bool = False
    capacity: int = 256
    reject_drafts: bool = False
    acceptance: LossyRule | None = None
    recorder: Recorder | None = None
    keep_prefixes: bool = False
    clock: Callable[[], float] = time.perf_counter

    @classmethod
    def of(cls, **options: Any) -> EngineConfig:
        """Return a config of these options; a TypeError for an unknown one names the nearest."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                hint = did_you_mean(name, known) or f" There are {', '.join(known)}."
                raise TypeError(f"An engine has no option {name!r}.{hint}")
        return cls(**options)

    def __post_init__(self) -> None:
        for option in ("slots", "capacity"):
            object.__setattr__(self, option, whole(option, getattr(self, option)))
        check_least(1, math.inf, slots=self.slots, capacity=self.capacity)
        for option, kind, advice in KINDS:
            check_kind(kind, advice, **{option: getattr(self, option)})
        if self.drafter is not None and self.drafter.acceptance is not None:
            self._check_lossy_drafter(self.drafter)
        rule = self.rule
        if rule is not None and self.strict:
            changes = self.drafter if self.drafter is not None and self.drafter.acceptance is not None else rule
            raise ValueError(
                f"strict=True asks for the plain engine's text, which {type(changes).__name__} changes: choose one."
            )
        if self.pruner is not None and self.drafter is None:
            raise ValueError(
                "pruner prunes a drafter's draft tokens, and drafter is None: pass a drafter, or no pruner."
            )

    @property
    def rule(self) -> LossyRule | None:
        """Return the lossy rule, the user's or the drafter's own; None for the lossless one."""
        return self.acceptance if self.drafter is None else self.drafter.acceptance or self.acceptance

    def _check_lossy_drafter(self, drafter: Drafter) -> None:
        name = type(drafter).__name__
        for option, given in (("acceptance", self.acceptance), ("shape", self.shape), ("pruner", self.pruner)):
            if given is not None:
                raise ValueError(
                    f"{name} drafts and accepts by its own thresholds, which {option} would "
                    f"change: leave {option} out, or use {name}(lossless=True)."
                )


def check_strict(runner: Runner) -> bool:
    """Return whether a model needs strict mode, which gives 16-bit answers the exact bits of plain decoding.

    In 16 bits the last bits of a row's logits can depend on the other rows of a pass. The runners `cpu` and
    `cuda_graphs` compute each row independently, and in strict mode a prompt passes alone, in chunks of one size. In
    float32 no mode is needed.
    """
    target = runner.target
    if target.encoder_decoder:
        raise ValueError("strict=True is for decoder-only models: use fp32 weights with this encoder-decoder.")
    if target.dtype == torch.float32:
        return False
    if not runner.independent_rows:
        name = str(target.dtype).removeprefix("torch.")
        raise ValueError(
            f"strict=True cannot be kept for this '{target.model_type}' model in {name} on the runner "
            f"{runner.name!r}, where scores depend on the other rows of a pass: use float32, or leave strict out and "
            "accept that tokens that are nearly tied may change places."
        )
    return True
