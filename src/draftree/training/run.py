"""One training run from a data set to a drafter folder, the same for every method."""

from __future__ import annotations

import json
import math
import platform
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from draftree.drafting.folder import base_of, model_hash
from draftree.runner.target import inspect_model
from draftree.training.objective import RANKS
from draftree.training.options import METHODS, TrainOptions, prepare
from draftree.training.record import write_curve
from draftree.training.rows import Data, read_data
from draftree.training.trainer import DrafterTrainer, Tell

CHECKPOINTS = "checkpoints"
RUN = "run.json"


def train(
    method: str,
    model: Any,
    data: Path,
    out: Path,
    *,
    settings: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    options: TrainOptions | None = None,
    dtype: torch.dtype | None = None,
    tell: Tell = print,
) -> dict[str, Any]:
    """Train `method` for `model` on the answers in `data`, and save the drafter into `out`; returns its recipe.

    `out` gets the drafter folder, recipe.json (everything that made it, and its dev accuracies), curve.json and
    curve.png, and the checkpoints. Under `accelerate launch` every process calls this, and the first one writes.

    Args:
        method: "bita", "hidden-transfer", "medusa" or "early-head".
        model: the target, frozen; it is moved to the training device.
        data: a data set of `draftree train data`, made by this model.
        out: folder to write.
        settings: of the drafter, as its `fresh` takes them.
        training: of the objective, such as `prefix_dropout`, `on_pseudo` or `decay`.
        options: of the run.
        dtype: type to store the weights in; None for fp32.
        tell: gets lines of progress.

    Raises:
        ValueError: bad data or options, a loss that is no number any more, a base model that has changed.
        TypeError: a setting that the method does not have.
    """
    options = options or TrainOptions()
    settings, training = settings or {}, training or {}
    torch.manual_seed(options.seed)
    target = inspect_model(model)
    trained, objective = prepare(method, target.model, settings, training)
    rows = read_data(data, target, options.max_length)
    splits = objective.splits if options.splits is None else options.splits or None
    trained.base = base_of(target.model)
    before = model_hash(target.model)
    args = arguments(out, rows, options, METHODS[method].learning_rate)
    record = {"method": method, "settings": trained.settings, "training": training, "options": options.recorded()}
    resume = claim(out, record, options.resume, args.process_index)
    frozen = {name: p.requires_grad for name, p in target.model.named_parameters()}
    target.model.requires_grad_(False).to(args.device)
    begin, worked = time.perf_counter(), time.process_time()
    try:
        trainer = DrafterTrainer(objective, args, rows.train, rows.dev[: options.dev_rows], splits, tell)
        final = trainer.train_and_score(resume)[-1]
    finally:
        for name, p in target.model.named_parameters():
            p.requires_grad_(frozen[name])
    if model_hash(target.model, again=True) != before:
        raise ValueError("The base model's weights have changed in training, so the drafter is of no use: report this.")
    seconds, worked = time.perf_counter() - begin, time.process_time() - worked
    recipe = {
        "method": method,
        "base_model": asdict(trained.base),
        "settings": trained.settings,
        "training": training,
        "options": options.recorded() | {"learning_rate": args.learning_rate, "splits": splits},
        "data": rows.about | {"trained_on": len(rows.train), "dev": len(trainer.dev), "left_out": rows.left_out},
        "parameters": sum(p.numel() for p in trained.weights.parameters()),
        "steps": trainer.state.global_step,
        "processes": args.world_size,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(worked, 1),  # of this process, all its threads: a busy machine moves it less
        "dev_loss": final["eval_loss"],
        "ranks": RANKS,
        "accuracy": {f"depth {d}": shares for d, shares in enumerate(final["eval_accuracy"], 1)},
        "cases": final["eval_cases"],
        "machine": machine(args),
        "command": command(),
    }
    if args.process_index == 0:
        trained.recipe = {name: recipe[name] for name in ("training", "options", "steps", "dev_loss")}
        trained.weights.to("cpu")
        trained.save_pretrained(out, dtype=dtype)
        (out / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")
        write_curve(trainer.state.log_history, out, f"{method} for {trained.base.name}")
    trainer.accelerator.wait_for_everyone()
    return recipe


def claim(out: Path, record: dict[str, Any], resume: bool, process: int = 0) -> str | None:
    """Take the folder for this run, as its first process; the checkpoint to go on from, or None for a new run.

    Raises:
        ValueError: a folder with an unfinished run and no word of resuming, or the other way round.
    """
    folder = out / CHECKPOINTS
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    if process:
        return last if resume else None
    if resume:
        if last is None:
            raise ValueError(f"There is no checkpoint in {str(folder)!r} to go on from: leave --resume out.")
        if json.loads((folder / RUN).read_text(encoding="utf-8")) != json.loads(json.dumps(record)):
            raise ValueError(f"{str(out)!r} was begun with other options: give the same ones, or leave --resume out.")
        return last
    if last is not None and not (out / "recipe.json").is_file():
        raise ValueError(f"{str(out)!r} holds an unfinished run: add --resume to go on, or name another folder.")
    if (folder / RUN).is_file():  # a finished run of ours makes room
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (out / "recipe.json").unlink(missing_ok=True)
    (folder / RUN).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return None


def arguments(out: Path, rows: Data, options: TrainOptions, learning_rate: float, **more: Any) -> TrainingArguments:
    """Hugging Face's arguments of a run; `learning_rate` where the options name none, `more` wins over all."""
    gpu = torch.cuda.is_available()
    bf16 = options.bf16 if options.bf16 is not None else gpu and torch.cuda.is_bf16_supported()
    fixed: dict[str, Any] = {
        "output_dir": str(out / CHECKPOINTS),
        "per_device_train_batch_size": options.batch,
        "per_device_eval_batch_size": options.batch,
        "gradient_accumulation_steps": options.accumulate,
        "num_train_epochs": options.epochs,
        "max_steps": options.steps or -1,
        "learning_rate": options.learning_rate or learning_rate,
        "lr_scheduler_type": "cosine",
        "weight_decay": options.weight_decay,
        "bf16": bool(bf16),
        "use_cpu": not gpu,
        "seed": options.seed,
        "logging_steps": 5,
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps",
        "eval_on_start": True,
        "save_strategy": "steps",
        "save_total_limit": 2,
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "label_names": [],
        "dataloader_pin_memory": gpu,
    }
    args = TrainingArguments(**(fixed | more))
    args._n_gpu = min(args.n_gpu, 1)  # several devices are for accelerate launch: one process each
    per_step = options.batch * options.accumulate * args.world_size
    steps = options.steps or math.ceil(len(rows.train) / per_step * options.epochs)
    args.warmup_steps = max(1, round(options.warmup * steps))
    args.eval_steps = max(1, steps // options.evaluations)
    args.save_steps = max(1, steps // options.checkpoints)
    return args


def machine(args: TrainingArguments) -> dict[str, Any]:
    """On what a run was made, for its recipe."""
    device = torch.cuda.get_device_name() if args.device.type == "cuda" else platform.machine()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "bf16": args.bf16,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def command() -> str | None:
    """The command line of this process, for the recipe; None where another program called."""
    own = Path(sys.argv[0]).stem in ("draftree", "__main__")
    return " ".join(["draftree", *sys.argv[1:]]) if own else None
