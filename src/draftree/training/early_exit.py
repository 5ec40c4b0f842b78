"""Training for early exits: the model's own head learns to read the output of its first layers.

A copy of the whole model is trained, its first layers and head too, so what comes out is another model with other
texts. Two losses: the mean of the exit's and the model's own (BiLD, sections 4.4 and 7.2.1), or of all layers, the
later the heavier (CALM; BiLD, section 7.2.1). The result is a stock Hugging Face folder.
"""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from draftree.drafting.folder import base_of
from draftree.runner.target import inspect_model
from draftree.training.options import TrainOptions
from draftree.training.rows import read_data
from draftree.training.session import Session
from draftree.training.trainer import Report
from draftree.training.whole_model import EarlyExitObjective, check_trainable, in_float32, save_model


def exit_weights(exit_layer: int, layers: int, *, every_layer: bool) -> dict[int, float]:
    """Layers run -> weight of the loss there: a half for the exit, or i / (1 + .. + L) for every layer i, it first.

    Raises:
        ValueError: an exit that the model does not have.
    """
    if not 1 <= exit_layer < layers:
        raise ValueError(f"exit_layer is {exit_layer} and the model has {layers} layers: give 1 to {layers - 1}.")
    if not every_layer:
        return {exit_layer: 0.5}
    total = layers * (layers + 1) / 2
    order = [exit_layer, *(run for run in range(1, layers) if run != exit_layer)]
    return {run: run / total for run in order}


def train_early_exit(
    model: Any,
    data: Path,
    out: Path,
    exit_layer: int,
    *,
    every_layer: bool = False,
    tokenizer: Any = None,
    options: TrainOptions | None = None,
    report: Report = print,
) -> dict[str, Any]:
    """Fine-tune a copy of the whole `model` so that its head reads layer `exit_layer`, save it; returns the recipe.

    `out` gets the model as Hugging Face's `save_pretrained` writes it, recipe.json, curve.json and curve.png, and the
    checkpoints. The weights are others than the model's, so its texts are too: compare with it before using them.

    Args:
        model: a stock model; it is copied, and not changed.
        data: a data set of `draftree train data`, made by this model.
        out: folder to write.
        exit_layer: n, layers that the exit runs.
        every_layer: train every layer to be read (for `LossyCALM`), not this one alone.
        tokenizer: saved with the model; None for none.
        options: of the run.
        report: gets lines of progress.

    Raises:
        ValueError: an exit that is not there, a model that cannot be trained (`check_trainable`), bad data or options,
            or a loss that is no number any more.
    """
    options = options or TrainOptions()
    target = inspect_model(model)
    check_trainable(model)
    weights = exit_weights(exit_layer, len(target.layers), every_layer=every_layer)
    torch.manual_seed(options.seed)
    rows = read_data(data, target, options.max_length)
    base = base_of(target.model)
    settings = {"exit_layer": exit_layer, "every_layer": every_layer}
    made_of = {"method": "early-exit", "settings": settings}
    trained = copy.deepcopy(target.model).eval()
    with in_float32(trained):
        objective = EarlyExitObjective(trained, weights).train()  # which may refuse the model
        session = Session(out, made_of, rows, options, target.device, objective.learning_rate)
        scored = session.fit(objective, None, report)
    trained.eval()
    agreement = {
        when: {"exit": entry["eval_accuracy"][0][0], "model": entry["eval_accuracy"][1][0]}
        for when, entry in (("before", scored[0]), ("after", scored[-1]))
    }
    recipe = {"method": "early-exit", "base_model": asdict(base), **settings, "agreement": agreement}
    recipe["cases"] = scored[-1]["eval_cases"][0]
    title = f"{base.name}, read behind layer {exit_layer}"
    return session.finish(recipe, title, lambda _: save_model(trained, tokenizer, out))
