"""Extend Hugging Face's Trainer: collate rows, score dev rows, stop at a bad loss, train only the drafter's weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from draftree.training.objectives import RANKS, Objective
from draftree.training.rows import ByLength, Row, RowSet, collate

REPORT_EVERY = 20.0  # Seconds between two lines of progress.

Report = Callable[[str], None]


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

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.order.set_epoch(int(state.epoch or 0))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
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
