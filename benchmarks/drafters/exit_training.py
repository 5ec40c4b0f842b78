"""Train a copy of a model so that its own head reads the output of its first layers (BiLD, sections 4.4 and 7.2.1).

The whole copy is trained, so its texts are others than the model's. The loss is the mean of the exit's and the model's
own. The result is a stock Hugging Face folder.
"""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftree.drafting.folder import base_of
from draftree.runner import layout_of
from draftree.runner.target import inspect_model
from draftree.training.align import AlignObjective, check_trainable, in_float32, save_model
from draftree.training.objectives import cross_entropy
from draftree.training.options import TrainOptions
from draftree.training.rows import Batch, read_data
from draftree.training.trainer import Report, Session


class EarlyExitObjective(AlignObjective):
    """The mean of two cross entropies with every token of the answers: of the exit, and of the whole model.

    Args:
        model: as of `AlignObjective`, in evaluation mode.
        exit_layer: n, layers that the exit runs.

    Attributes:
        places: two, the exit's next token and the whole model's.
    """

    learning_rate: ClassVar[float] = 3e-4
    places: tuple[int, ...] = (1, 1)

    def __init__(self, model: Any, exit_layer: int) -> None:
        super().__init__(model)
        self._exit = inspect_model(model).layers[exit_layer - 1]
        self._layout = layout_of(model)

    def measure(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """See `Objective.measure`; logits are [B, T - 1, V]."""
        states: list[Tensor] = []

        def note(module: Any, args: Any, output: Any) -> None:
            states.append(output[0] if isinstance(output, tuple) else output)

        handle = self._exit.register_forward_hook(note)
        try:
            loss, logits = super().measure(batch)
        finally:
            handle.remove()
        layout = self._layout
        own = layout.finish(layout.head(layout.close(states[0])))[:, :-1]
        return (loss + cross_entropy(own, *self.truths(batch)[0])) / 2, [own, *logits]


def check_exit(exit_layer: int, layers: int) -> None:
    """Raise a ValueError for an exit that a model of so many layers does not have."""
    if not 1 <= exit_layer < layers:
        raise ValueError(f"exit_layer is {exit_layer} and the model has {layers} layers: give 1 to {layers - 1}.")


def train_early_exit(
    model: Any,
    data: Path,
    out: Path,
    exit_layer: int,
    *,
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
    check_exit(exit_layer, len(target.layers))
    torch.manual_seed(options.seed)
    rows = read_data(data, target, options.max_length)
    base = base_of(target.model)
    settings = {"exit_layer": exit_layer}
    trained = copy.deepcopy(target.model).eval()
    with in_float32(trained):
        objective = EarlyExitObjective(trained, exit_layer).train()  # which may refuse the model
        session = Session(out, rows, options, target.device, objective.learning_rate)
        scored = session.fit(objective, report)
    trained.eval()
    agreement = {
        when: {"exit": entry["eval_accuracy"][0][0], "model": entry["eval_accuracy"][1][0]}
        for when, entry in (("before", scored[0]), ("after", scored[-1]))
    }
    recipe = {"method": "early-exit", "base_model": asdict(base), **settings, "agreement": agreement}
    recipe["cases"] = scored[-1]["eval_cases"][0]
    title = f"{base.name}, read behind layer {exit_layer}"
    return session.finish(recipe, title, lambda _: save_model(trained, tokenizer, out))
