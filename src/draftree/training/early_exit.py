"""Training for early exits: the model's own head learns to read the output of its first layers.

A copy of the whole model is trained, its first layers and head too, so what comes out is another model with other
texts. Two losses: the mean of the exit's and the model's own (BiLD, sections 4.4 and 7.2.1), or of all layers, the
later the heavier (CALM; BiLD, section 7.2.1). The result is a stock Hugging Face folder.
"""

from __future__ import annotations

import copy
import json
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.drafting.folder import base_of
from draftree.runner.hooked.probe import probe
from draftree.runner.target import inspect_model
from draftree.training.align_objective import AlignObjective, answers_in
from draftree.training.objective import cross_entropy, hits_of
from draftree.training.options import TrainOptions
from draftree.training.record import write_curve
from draftree.training.rows import read_data
from draftree.training.run import arguments, claim, command, machine
from draftree.training.trainer import DrafterTrainer, Tell

LEARNING_RATE = 3e-4


class EarlyExitObjective(AlignObjective):
    """Weighted cross entropy of a model's head behind several of its layers, with every token of the answers.

    Args:
        model: a stock Hugging Face causal language model or encoder-decoder in evaluation mode; all of it is trained.
        weights: of the exits, by the layers run; the rest up to 1 is the whole model's. The first exit is reported.

    Attributes:
        places: two, the exit's next token and the whole model's.
    """

    places: tuple[int, ...] = (1, 1)

    def __init__(self, model: Any, weights: dict[int, float]) -> None:
        super().__init__(model)
        self.exits = weights
        self._layers = inspect_model(model).layers
        self._anatomy = probe(inspect_model(model))

    def forward(
        self,
        tokens: Tensor,
        length: Tensor,
        start: Tensor,
        splits: Tensor,
        real: Tensor,
        source: Tensor | None = None,
        source_length: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """See `AlignObjective.forward`; `hits` and `seen` are of the first exit and of the whole model."""
        states: dict[int, Tensor] = {}

        def note(run: int) -> Any:
            def hook(module: Any, args: Any, output: Any) -> None:
                states[run] = output[0] if isinstance(output, tuple) else output

            return hook

        with ExitStack() as stack:
            for run in self.exits:
                stack.callback(self._layers[run - 1].register_forward_hook(note(run)).remove)
            out = super().forward(tokens, length, start, splits, real, source, source_length)
        truth, there = answers_in(tokens, length, start)
        loss = (1 - sum(self.exits.values())) * out["loss"]
        for number, (run, weight) in enumerate(self.exits.items()):
            logits = self._anatomy.finish(self._anatomy.head(self._anatomy.close(states[run])))[:, :-1]
            loss = loss + weight * cross_entropy(logits, truth, there)
            if number == 0 and not self.training:
                hits, seen = hits_of(logits, truth, there)
                out["hits"] = torch.cat([hits[None], out["hits"]])
                out["seen"] = torch.cat([seen[None], out["seen"]])
        return out | {"loss": loss}


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
    tell: Tell = print,
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
        options: of the run; `splits` has no meaning here.
        tell: gets lines of progress.

    Raises:
        ValueError: an exit that is not there, bad data or options, or a loss that is no number any more.
    """
    options = options or TrainOptions()
    target = inspect_model(model)
    weights = exit_weights(exit_layer, len(target.layers), every_layer=every_layer)
    torch.manual_seed(options.seed)
    rows = read_data(data, target, options.max_length)
    base, dtype = base_of(target.model), target.dtype
    args = arguments(out, rows, options, LEARNING_RATE)
    settings = {"exit_layer": exit_layer, "every_layer": every_layer, "base": base.hash}
    record = {"method": "early-exit", "settings": settings, "options": options.recorded()}
    resume = claim(out, record, options.resume, args.process_index)
    trained = copy.deepcopy(target.model).eval()
    begin = time.perf_counter()
    objective = EarlyExitObjective(trained.float(), weights).train()  # half types lose small steps
    trainer = DrafterTrainer(objective, args, rows.train, rows.dev[: options.dev_rows], None, tell)
    scored = trainer.train_and_score(resume)
    trained.eval().to("cpu", dtype)
    agreement = {
        when: {"exit": entry["eval_accuracy"][0][0], "model": entry["eval_accuracy"][1][0]}
        for when, entry in (("before", scored[0]), ("after", scored[-1]))
    }
    recipe = {
        "method": "early-exit",
        "base_model": asdict(base),
        "exit_layer": exit_layer,
        "every_layer": every_layer,
        "options": options.recorded() | {"learning_rate": args.learning_rate},
        "data": rows.about | {"trained_on": len(rows.train), "dev": len(trainer.dev), "left_out": rows.left_out},
        "steps": trainer.state.global_step,
        "seconds": round(time.perf_counter() - begin, 1),
        "agreement": agreement,
        "cases": scored[-1]["eval_cases"][0],
        "machine": machine(args),
        "command": command(),
    }
    if args.process_index == 0:
        trained.save_pretrained(out)
        if tokenizer is not None:
            tokenizer.save_pretrained(out)
        (out / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")
        write_curve(trainer.state.log_history, out, f"{base.name}, read behind layer {exit_layer}")
    trainer.accelerator.wait_for_everyone()
    return recipe
