"""One training run in its folder: the folder is taken, the trainer runs, the result, a recipe and a curve are left.

Drafters and aligned small models are trained by such a run; they differ in what is trained and
in how it is saved.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from draftree.files import write_json
from draftree.runner.step_cost import chip_name
from draftree.training.curve import write_curve
from draftree.training.objective import Objective
from draftree.training.options import CHECKPOINTS, RECIPE, TrainOptions, check_out
from draftree.training.rows import Data, spread
from draftree.training.trainer import DrafterTrainer, Report

WARMUP = 0.03  # share of the steps in which the learning rate rises


class Session:
    """A run of the trainer in a folder.

    Args:
        out: the folder; taken for this run at once.
        method: the name of what is trained, by which a finished result of another kind is refused.
        data: rows to train on and to report on, made by the model that is trained for.
        options: of the run.
        device: of the model that made the data; where that is the processor, the run stays there.
        learning_rate: where the options name none.
        more: of Hugging Face's arguments, which win over those of the options.

    Attributes:
        args: Hugging Face's arguments.

    Raises:
        ValueError: a folder with an unfinished run and no word of resuming, or the other way round; or one with a
            finished run that is not to be replaced.
    """

    def __init__(
        self,
        out: Path,
        method: str,
        data: Data,
        options: TrainOptions,
        device: torch.device,
        learning_rate: float,
        **more: Any,
    ) -> None:
        self.out, self.data, self.options = out, data, options
        more["learning_rate"] = options.learning_rate or learning_rate
        self.args = arguments(out, len(data.train), options, device, **more)
        self._checkpoint = self._claim(method)

    def _claim(self, method: str) -> str | None:
        """Check and prepare the folder; return the checkpoint to go on from, None for a new run."""
        folder = self.out / CHECKPOINTS
        last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
        if self.options.resume:
            if (self.out / RECIPE).is_file():
                raise ValueError(f"{str(self.out)!r} holds a finished run, which cannot go on: leave --resume out.")
            if last is None:
                raise ValueError(f"There is no checkpoint in {str(folder)!r} to go on from: leave --resume out.")
            return last
        if self.args.process_index > 0:
            return None
        check_out(self.out, method, force=self.options.force)
        if last is not None and not (self.out / RECIPE).is_file():
            raise ValueError(
                f"{str(self.out)!r} holds an unfinished run: add --resume to go on, or name another folder."
            )
        for old in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            shutil.rmtree(old)
        (self.out / RECIPE).unlink(missing_ok=True)  # The folder holds a finished result again at the end of the run.
        folder.mkdir(parents=True, exist_ok=True)
        return None

    def fit(self, objective: Objective, splits: int | None, report: Report) -> list[dict[str, Any]]:
        """Train; the log's entries with scores of the dev rows, in order.

        Args:
            objective: what is trained.
            splits: split points of a row and pass; None for all.
            report: gets lines of progress.

        Raises:
            BadLossError: a loss or weight is no number any more.
        """
        begin, worked = time.perf_counter(), time.process_time()
        dev = spread(self.data.dev, self.options.dev_rows)
        self.trainer = DrafterTrainer(objective, self.args, self.data.train, dev, splits, report)
        scored = self.trainer.train_and_score(self._checkpoint)
        spent = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - worked}
        self._seconds = {name: round(value, 1) for name, value in spent.items()}
        return scored

    def finish(self, own: dict[str, Any], title: str, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Save the result and write recipe.json and the curve, in the first process; returns the recipe.

        Args:
            own: what the recipe has besides the facts of every run.
            title: of the curve.
            save: gets the recipe, and writes the result. The recipe is written after it: then the run is whole.
        """
        data, args, trainer = self.data, self.args, self.trainer
        recipe = own | {
            "options": self.options.recorded() | {"learning_rate": args.learning_rate} | own.get("options", {}),
            "data": data.about | {"trained_on": len(data.train), "dev": len(trainer.dev), "left_out": data.left_out},
            "steps": trainer.state.global_step,
            "processes": args.world_size,
            **self._seconds,
            "machine": {
                "device": chip_name(args.device),
                "threads": torch.get_num_threads(),
                "bf16": args.bf16,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "command": command(),
        }
        if args.process_index == 0:
            save(recipe)
            write_json(self.out / RECIPE, recipe)
            write_curve(trainer.state.log_history, self.out, title)
        trainer.accelerator.wait_for_everyone()
        return recipe


def arguments(out: Path, rows: int, options: TrainOptions, device: torch.device, **more: Any) -> TrainingArguments:
    """Hugging Face's arguments of a run on so many rows; `more` wins over all.

    Raises:
        ValueError: another GPU than the first one.
    """
    gpu = torch.cuda.is_available() and device.type != "cpu"
    if gpu and device.index and "RANK" not in os.environ:  # Hugging Face's trainer takes the first
        raise ValueError(
            f"Training runs on the first GPU that it sees: set CUDA_VISIBLE_DEVICES={device.index} and leave "
            f"--device {device} out."
        )
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"
    bf16 = options.bf16 if options.bf16 is not None else launched or (gpu and torch.cuda.is_bf16_supported())
    fixed: dict[str, Any] = {
        "output_dir": str(out / CHECKPOINTS),
        "per_device_train_batch_size": options.batch,
        "per_device_eval_batch_size": options.batch,
        "gradient_accumulation_steps": options.accumulate,
        "num_train_epochs": options.passes,
        "max_steps": options.steps or -1,
        "lr_scheduler_type": "cosine",
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
    args.mixed_precision = "bf16" if args.bf16 else "no"  # else the environment's, which is accelerate's default
    args._n_gpu = min(args.n_gpu, 1)  # several devices are for accelerate launch: one process each
    per_step = options.batch * options.accumulate * args.world_size
    steps = options.steps or math.ceil(rows / per_step * options.passes)
    args.warmup_steps = max(1, round(WARMUP * steps))
    args.eval_steps = math.ceil(steps / options.evaluations)
    args.save_steps = math.ceil(steps / options.checkpoints)
    return args


def command() -> str | None:
    """The command line of this process, for the recipe; None where another program called."""
    own = Path(sys.argv[0]).stem in ("draftree", "__main__")
    return shlex.join(["draftree", *sys.argv[1:]]) if own else None
