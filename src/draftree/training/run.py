"""Train a drafter: one run from a data set to a drafter folder, the same for every method."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftree.drafting.folder import Trained, base_of, method_class
from draftree.errors import did_you_mean
from draftree.runner.target import inspect_model
from draftree.training.heads import HEADS, HeadObjective
from draftree.training.objectives import METHODS, RANKS, DrafterObjective
from draftree.training.options import TrainOptions
from draftree.training.rows import read_data
from draftree.training.speculators import Speculator
from draftree.training.trainer import Report, Session


def prepare(
    method: str, model: Any, settings: dict[str, Any], training: dict[str, Any]
) -> tuple[Trained | Speculator, DrafterObjective | HeadObjective]:
    """Return an untrained drafter of `method` for `model`, and the objective that will train it.

    Args:
        method: one of `METHODS` or `HEADS`.
        model: the model; it stays on its device.
        settings: settings of the drafter, as its `fresh` takes them.
        training: options of the objective, such as `prefix_dropout`, `on_pseudo` or `decay`.

    Raises:
        ValueError: an unknown method, or a setting out of range for the model.
        TypeError: an unknown setting.
    """
    make: Any
    objective: Any
    make, objective = HEADS[method] if method in HEADS else (method_class(method).fresh, METHODS[method])
    trained = make(model, **settings)
    known = [name for name in inspect.signature(objective.__init__).parameters if name not in ("self", "trained")]
    for name in training:
        if name not in known:
            raise TypeError(f"The {method} objective has no option {name!r}.{did_you_mean(name, known)}")
    return trained, objective(trained, model, **training)


def train(
    method: str,
    model: Any,
    data: Path,
    out: Path,
    *,
    settings: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    options: TrainOptions | None = None,
    splits: int | None = None,
    states: Path | None = None,
    dtype: torch.dtype | None = None,
    report: Report = print,
) -> dict[str, Any]:
    """Train `method` for `model` on the answers in `data`, and save the drafter into `out`; return its recipe.

    `out` gets the drafter, recipe.json (options, data, dev accuracies), the curve and the checkpoints. Under
    `accelerate launch` every process calls this, and the first one writes.

    Args:
        method, settings, training: see `prepare`.
        model: the target, frozen; it is moved to the training device.
        data: a data set of `draftree train data`, made by this model.
        out: folder to write.
        options: options of the run.
        splits: split points of a row and pass; None for the method's own, 0 for all.
        states: folder of recorded hidden states, which other heads of the same data may have left; None for one in
            `out`. Heads of `HEADS` alone have it.
        dtype: dtype of the stored weights; None for float32, and 16 bits for the heads of `HEADS`.
        report: called with lines of progress.

    Raises:
        ValueError, TypeError: see `prepare`, `read_data` and `Session`.
    """
    options, training = options or TrainOptions(), training or {}
    torch.manual_seed(options.seed)
    target = inspect_model(model)
    trained, objective = prepare(method, target.model, settings or {}, training)
    if splits is not None:
        objective.splits = splits or None
    rows = read_data(data, target, options.max_length)
    trained.base = base_of(target.model)
    session = Session(out, rows, options, target.device, objective.learning_rate)
    with _frozen(target.model):
        if target.device != session.args.device:  # A quantised or spread model cannot be moved.
            target.model.to(session.args.device)
        if isinstance(objective, HeadObjective):
            with session.args.main_process_first(desc="recording"):
                objective.begin(rows, states or out / "states", report, bf16=session.args.bf16)
        final = session.fit(objective, report)[-1]

    recipe = {
        "method": method,
        "base_model": asdict(trained.base),
        "settings": trained.settings,
        "training": training,
        "options": {"splits": objective.splits},
        "parameters": sum(p.numel() for p in trained.weights.parameters()),
        "dev_loss": final["eval_loss"],
        "ranks": RANKS,
        "accuracy": {f"depth {d}": shares for d, shares in enumerate(final["eval_accuracy"], 1)},
        "cases": final["eval_cases"],
    }
    return session.finish(recipe, f"{method} for {trained.base.name}", partial(_save, trained, out, dtype))


def _save(trained: Trained | Speculator, out: Path, dtype: torch.dtype | None, recipe: dict[str, Any]) -> None:
    trained.recipe = {name: recipe[name] for name in ("training", "options", "steps", "dev_loss")}
    trained.weights.to("cpu")
    trained.save_pretrained(out, dtype=dtype)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Turn off gradients of the model's weights inside the block."""
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    model.requires_grad_(False)
    try:
        yield
    finally:
        for name, p in model.named_parameters():
            p.requires_grad_(before[name])
