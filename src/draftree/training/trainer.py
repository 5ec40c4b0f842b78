"""Run one training in its folder: check the folder, train, write the result, the recipe and the curve.

Drafters and aligned small models share this run. They differ in their objective and in how they are saved.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from draftree.files import write_json, write_text
from draftree.runner.step_cost import chip_name
from draftree.training.objectives import RANKS, Objective
from draftree.training.options import CHECKPOINTS, RECIPE, TrainOptions, check_out
from draftree.training.rows import ByLength, Data, Row, RowSet, collate, spread

REPORT_EVERY = 20.0  # Seconds between two lines of progress.
SPENT = {"seconds": time.perf_counter, "cpu_seconds": time.process_time}  # of a run, its earlier parts included
WARMUP = 0.03  # The learning rate rises in this share of the steps.
Report = Callable[[str], None]


class Session:
    """Run the trainer in a folder.

    Args:
        out: folder of the result.
        data: training rows and dev rows, made by the target.
        options: options of the run.
        device: device of the target; on a CPU the run stays there.
        learning_rate: peak learning rate if the options name none.
        more: arguments of Hugging Face's `TrainingArguments`; they override the options.

    Attributes:
        args: Hugging Face's arguments.

    Raises:
        ValueError: an unfinished run in the folder without `resume`, no checkpoint with `resume`, or a finished run
            without `force`.
    """

    def __init__(
        self,
        out: Path,
        data: Data,
        options: TrainOptions,
        device: torch.device,
        learning_rate: float,
        **more: Any,
    ) -> None:
        self.out, self.data, self.options = out, data, options
        more["learning_rate"] = options.learning_rate or learning_rate
        self.args = arguments(out, len(data.train), options, device, **more)
        self._checkpoint = self._prepare()

    def _prepare(self) -> str | None:
        """Check and prepare the folder; return the checkpoint of a resumed run."""
        folder = self.out / CHECKPOINTS
        last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
        if self.options.resume:
            if last is None or (self.out / RECIPE).is_file():
                raise ValueError(f"{str(self.out)!r} holds no unfinished run with a checkpoint: leave --resume out.")
            return last
        if self.args.process_index > 0:
            return None
        check_out(self.out, force=self.options.force)
        if last is not None and not (self.out / RECIPE).is_file():
            raise ValueError(
                f"{str(self.out)!r} holds an unfinished run: add --resume to go on, or name another folder."
            )
        for old in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            shutil.rmtree(old)
        (self.out / RECIPE).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        return None

    def fit(self, objective: Objective, report: Report) -> list[dict[str, Any]]:
        """Train the weights of `objective`; return the log's entries with scores of the dev rows, in order.

        Raises:
            BadLossError: a loss or weight is not finite.
        """
        dev = spread(self.data.dev, self.options.dev_rows)
        self.trainer = DrafterTrainer(objective, self.args, self.data.train, dev, report)
        return self.trainer.train_and_score(self._checkpoint)

    def finish(self, own: dict[str, Any], title: str, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Save the result and write recipe.json and the curve, in the first process; return the recipe.

        Args:
            own: the method's entries of the recipe.
            title: title of the curve.
            save: writes the result; takes the recipe.
        """
        data, args, trainer = self.data, self.args, self.trainer
        recipe = own | {
            "options": self.options.recorded() | {"learning_rate": args.learning_rate} | own.get("options", {}),
            "data": data.about | {"trained_on": len(data.train), "dev": len(trainer.dev), "left_out": data.left_out},
            "steps": trainer.state.global_step,
            "processes": args.world_size,
            **{name: round(trainer.state.log_history[-1][name], 1) for name in SPENT},
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
            write_curve(trainer.state.log_history, self.out, title)
            write_json(self.out / RECIPE, recipe)
        trainer.accelerator.wait_for_everyone()
        return recipe


class BadLossError(ValueError):
    """Report a loss or weight that is not finite; name the last good checkpoint."""


class DrafterTrainer(Trainer):
    """Train an objective's weights on `train` rows and score it on `dev` rows; `report` gets lines of progress."""

    def __init__(
        self,
        objective: Objective,
        args: TrainingArguments,
        train: Sequence[Row],
        dev: Sequence[Row],
        report: Report,
    ) -> None:
        self.dev, self.learner = dev, objective
        self.order = ByLength(train, args.train_batch_size * args.world_size, args.seed)
        super().__init__(
            model=objective,
            args=args,
            train_dataset=RowSet(train, windows=True),
            eval_dataset=RowSet(dev, windows=False),
            data_collator=partial(collate, most=objective.splits, nearest=min(objective.places)),
            callbacks=[_Progress(report, self.order)],
        )
        self.remove_callback(PrinterCallback)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> ByLength:
        return self.order

    def train_and_score(self, resume: str | None) -> list[dict[str, Any]]:
        """Train, from the checkpoint `resume` if given; return the log's entries with scores of the dev rows."""
        self.train(resume_from_checkpoint=resume)
        scored = [entry for entry in self.state.log_history if "eval_accuracy" in entry]
        if not any(entry["step"] == self.state.global_step for entry in scored):
            self.evaluate()
            scored.append(self.state.log_history[-1])
        return scored

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Run one pass forward and back; return the loss.

        Raises:
            BadLossError: in every process, if the loss of any is not finite.
        """
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        self._require_finite(~loss.isfinite().all(), "The loss", self.state.global_step + 1)
        return loss

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        bad = torch.stack([~p.isfinite().all() for p in self.learner.parameters()]).any()
        self._require_finite(bad, "A weight", self.state.global_step)
        super()._save_checkpoint(*args, **kwargs)

    def _require_finite(self, bad: Tensor, what: str, step: int) -> None:
        if self.args.world_size > 1:
            bad = self.accelerator.reduce(bad.float(), "sum") > 0
        if not bad:
            return
        last = get_last_checkpoint(str(self.args.output_dir))
        checkpoint = f"the last good checkpoint is {last}" if last else "there is no checkpoint"
        raise BadLossError(
            f"{what} is not finite at step {step}, so training stopped; {checkpoint}: start again with a lower "
            "learning rate."
        )

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Score the dev rows; return and log `eval_loss`, `eval_accuracy` and `eval_cases`.

        `eval_accuracy`[d][r] is the share of cases of depth d + 1 whose true token was within the best `RANKS[r]`,
        `eval_cases`[d] the number of these cases.
        """
        objective = self.learner.eval()
        loader = DataLoader(
            RowSet(self.dev, windows=False),
            batch_size=self.args.eval_batch_size,
            sampler=range(self.args.process_index, len(self.dev), self.args.world_size),
            collate_fn=self.data_collator,
        )
        depths = len(objective.places)
        sums = torch.zeros(depths, len(RANKS) + 1, dtype=torch.float64, device="cpu")
        loss = torch.zeros(2, dtype=torch.float64, device="cpu")
        for inputs in loader:
            with self.compute_loss_context_manager():
                out = objective(**self._prepare_inputs(inputs))
            sums += torch.cat([out["hits"], out["seen"][:, None]], 1).cpu()
            cases = out["seen"].sum()
            loss += torch.stack([out["loss"] * cases, cases]).cpu()
        if self.args.world_size > 1:  # Some backends exchange tensors of devices only.
            sums, loss = (self.accelerator.reduce(t.to(self.args.device), "sum") for t in (sums, loss))
        shares = sums[:, :-1] / sums[:, -1:].clamp(min=1)
        scores: dict[str, Any] = {
            "eval_loss": float(loss[0] / loss[1].clamp(min=1)),
            "eval_accuracy": [[round(share, 5) for share in depth] for depth in shares.tolist()],
            "eval_cases": [int(n) for n in sums[:, -1].tolist()],
        }
        self.log(dict(scores))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, scores)
        objective.train()
        return scores


class _Progress(TrainerCallback):
    """Report each scoring, and now and then a step in between; set the epoch of the rows' order.

    In a resumed run of several processes, nothing else sets this epoch.
    """

    def __init__(self, report: Report, order: ByLength) -> None:
        self.report, self.order = report, order
        self.reported = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin, self.first = time.monotonic(), state.global_step
        before = state.log_history[-1] if state.log_history else {}  # of the run that is resumed
        self.spent = [before.get(name, 0.0) - now() for name, now in SPENT.items()]

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.order.set_epoch(int(state.epoch or 0))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        pairs = zip(SPENT.items(), self.spent, strict=True)
        state.log_history[-1] |= {name: now() + spent for (name, now), spent in pairs}
        if not state.is_world_process_zero or not logs:
            return
        if "eval_accuracy" in logs:
            top = " ".join(f"{depth[0]:.1%}" for depth in logs["eval_accuracy"])
            self.report(f"step {state.global_step}: dev loss {logs['eval_loss']:.4f}, top-1 by depth {top}")
        elif "loss" in logs and time.monotonic() - self.reported > REPORT_EVERY:
            self.reported = time.monotonic()
            done = state.global_step - self.first
            left = (state.max_steps - state.global_step) * (self.reported - self.begin) / max(done, 1)
            self.report(
                f"step {state.global_step} of {state.max_steps}: loss {logs['loss']:.4f}, {left / 60:.1f} min left"
            )


def arguments(out: Path, rows: int, options: TrainOptions, device: torch.device, **more: Any) -> TrainingArguments:
    """Return Hugging Face's arguments of a run on `rows` rows; `more` overrides all.

    Raises:
        ValueError: another GPU than the first one.
    """
    gpu = torch.cuda.is_available() and device.type != "cpu"
    if gpu and device.index and "RANK" not in os.environ:  # Hugging Face's trainer takes the first GPU.
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
    args.mixed_precision = "bf16" if args.bf16 else "no"  # Accelerate would take the environment's setting.
    args._n_gpu = min(args.n_gpu, 1)  # Accelerate launch runs one process for each device.
    per_step = options.batch * options.accumulate * args.world_size
    steps = options.steps or math.ceil(rows / per_step * options.passes)
    args.warmup_steps = max(1, round(WARMUP * steps))
    args.eval_steps = math.ceil(steps / options.evaluations)
    args.save_steps = math.ceil(steps / options.checkpoints)
    return args


def command() -> str | None:
    """Return the command line of this process for the recipe; None if another program called."""
    own = Path(sys.argv[0]).stem in ("draftree", "__main__")
    return shlex.join(["draftree", *sys.argv[1:]]) if own else None


def write_curve(history: list[dict[str, Any]], folder: Path, title: str) -> None:
    """Write the Trainer's log as curve.json, and as curve.png if matplotlib is installed."""
    names = {"loss": "loss", "dev_loss": "eval_loss", "dev_accuracy": "eval_accuracy"}
    curve = {
        name: [[entry["step"], entry[logged]] for entry in history if logged in entry] for name, logged in names.items()
    }
    write_text(folder / "curve.json", json.dumps(curve) + "\n")
    if find_spec("matplotlib") is not None:
        _draw(curve, folder / "curve.png", title)


def _draw(curve: dict[str, Any], path: Path, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    losses, shares = figure.subplots(1, 2)
    if curve["loss"]:
        losses.plot(*zip(*curve["loss"], strict=True), color="0.7", linewidth=1, label="training")
    losses.plot(*zip(*curve["dev_loss"], strict=True), color="C0", marker=".", label="dev")
    losses.set_ylim(0, 1.3 * max(loss for _, loss in curve["dev_loss"]))
    losses.set_title("Loss")
    steps = [step for step, _ in curve["dev_accuracy"]]
    for depth, _ in enumerate(curve["dev_accuracy"][-1][1]):
        top = [100 * scores[depth][0] for _, scores in curve["dev_accuracy"]]
        shares.plot(steps, top, color=f"C{depth}", marker=".", label=f"depth {depth + 1}")
    shares.set_title("Correct likeliest tokens, % of dev cases")
    for axis in (losses, shares):
        axis.set_xlabel("step")
        axis.legend(frameon=False)
    figure.suptitle(title, parse_math=False)
    figure.savefig(path, dpi=110)
