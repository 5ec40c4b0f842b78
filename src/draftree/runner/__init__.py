"""Choose and open runners, which pass rows of tokens through a stock model.

There is one class for each way of running a pass; `base` holds their common interface.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

from torch import nn

from draftree.errors import check_runner
from draftree.runner.base import Runner, lock_of
from draftree.runner.cpu.runner import CpuRunner, pack_own, pack_weights, unpack_weights
from draftree.runner.cpu.t5 import FAMILIES as T5_FAMILIES
from draftree.runner.cpu.t5 import T5Runner
from draftree.runner.cuda_graphs.runner import CudaGraphRunner
from draftree.runner.eager.runner import EagerRunner, InPlaceRunner
from draftree.runner.hooked.families import TESTED_FAMILIES
from draftree.runner.hooked.runner import HookedRunner, ModelLayout, check_trees
from draftree.runner.target import Target, inspect_model, offloaded, unwrapped
from draftree.runner.weights.packed import is_packed

WORTH_A_WORD = 1_000_000_000  # Bytes of copied weights from which on a warning is logged.
log = logging.getLogger("draftree.runner")

# Building a runner inspects and may copy weights, so one serves all engines on a model for as long as the model stays
# as it is; it holds no request's state, and the model only weakly, so an entry goes with its model. Runners are kept by
# choice and by name.
_runners: weakref.WeakKeyDictionary[Any, dict[str, Runner]] = weakref.WeakKeyDictionary()
_opening = threading.RLock()


def open_runner(model: Any, choice: str | Runner = "auto") -> Runner:
    """Return the runner for `model`: one of `errors.RUNNERS`, or one that is open already.

    A model of an untested family, or one altered by its user, is tried once: its tree logits must equal those of its
    branches.

    Args:
        model: a Hugging Face model.
        choice: "hooked" (any model, through its own `forward`); for llama-shaped models "eager" (tensor operations),
            "cpu" (float32 and bfloat16 on a CPU, in C; also T5 in float32) or "cuda_graphs" (fixed shapes, recorded and
            replayed; CUDA graphs where the device has them); "auto" for the fastest that drives this model here,
            "in_place" for the fastest that reads its weights as they lie, so that there is no second copy of them.

    Raises:
        TypeError, ValueError: a model that cannot be driven, or a choice that does not exist or fit.
    """
    if not isinstance(model, nn.Module):
        inspect_model(model)  # raises the error for it
    if isinstance(choice, Runner):
        if choice.target.model is not unwrapped(model):
            raise ValueError("This runner was opened for another model: open one for this model, or give its name.")
        if choice.outdated:
            raise ValueError(
                "The model has changed since this runner was opened, which would answer as it was: open it again, or "
                "give its name."
            )
        return choice
    check_runner(choice)
    with _opening:
        held = _runners.setdefault(model, {})
        known = held.get(choice)
        if known is None or known.outdated:
            known = None
            if any(runner.outdated for runner in held.values()):
                held.clear()  # their copies of the weights take memory that new ones need
            with lock_of(unwrapped(model)):  # no pass of another thread may have its hooks there while it is looked at
                target = inspect_model(model)
            way = choose(target, choice)
            if way.name not in held:
                held[way.name] = _open(target, way)
            held[choice] = held[way.name]
        return held[choice]


def layout_of(model: Any) -> ModelLayout:
    """Return the facts of a model that one pass through its own `forward` shows."""
    runner = open_runner(model, "hooked")
    assert isinstance(runner, HookedRunner)
    return runner.layout


def choose(target: Target, choice: str = "auto") -> type[Runner]:
    """Return the class that runs a model.

    "auto" takes the fastest that drives the model on its device: compiled layers on a CPU in float32 and
    bfloat16, fixed shapes on a GPU, else tensor operations. Other models run through their own `forward`.
    """
    if choice == "auto":
        if T5Runner.qualifies(target):
            return T5Runner
        if CpuRunner.qualifies(target):
            return CpuRunner
        if target.device.type == "cuda" and CudaGraphRunner.qualifies(target):
            return CudaGraphRunner
        return EagerRunner if EagerRunner.qualifies(target) else HookedRunner
    if choice == "in_place":
        return InPlaceRunner if InPlaceRunner.qualifies(target) else HookedRunner
    if choice == "cpu":
        return T5Runner if target.model_type in T5_FAMILIES else CpuRunner
    return {"hooked": HookedRunner, "eager": EagerRunner, "cuda_graphs": CudaGraphRunner}[choice]


def _open(target: Target, way: type[Runner]) -> Runner:
    runner = way(target)
    if runner.copied_bytes >= WORTH_A_WORD:
        log.warning(_of_copies(runner))
    altered = target.alteration is not None and not offloaded(target.model)
    inside = not target.encoder_decoder and target.config is not target.model.config  # of a model for images, say
    if target.model_type not in TESTED_FAMILIES or altered or (inside and not target.both_ways):
        check_trees(runner)
    return runner


def _of_copies(runner: Runner) -> str:
    """Return a warning of the memory that the runner's copies take, and how to avoid them."""
    ways = 'runner="in_place" (--no-pack) does without, and is slower'
    if isinstance(runner, CpuRunner) and not is_packed(runner.target.model):
        ways = f"draftree.pack_weights(model) makes it the only one, {ways}"
    return f"The {runner.name} runner keeps a copy of {runner.copied_bytes / 1e9:.1f} GB of weights: {ways}."
