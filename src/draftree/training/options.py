"""How drafters are trained: the options of a run, and what each method needs of its own."""

from __future__ import annotations

import difflib
import inspect
from dataclasses import asdict, dataclass
from typing import Any

from draftree.drafting.folder import Trained, method_class
from draftree.training.objective import Objective
from draftree.training.objective_bita import BiTAObjective
from draftree.training.objective_heads import EarlyHeadObjective, MedusaObjective
from draftree.training.objective_hidden_transfer import HiddenTransferObjective


@dataclass(frozen=True, slots=True)
class Method:
    """An objective and the learning rate to begin with."""

    objective: type[Objective]
    learning_rate: float


METHODS = {
    "bita": Method(BiTAObjective, 3e-2),
    "hidden-transfer": Method(HiddenTransferObjective, 1e-3),
    "medusa": Method(MedusaObjective, 1e-3),
    "early-head": Method(EarlyHeadObjective, 1e-3),
}


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Options of a run, the same for every method.

    Attributes:
        epochs: passes over the data (BiTA: 4); `steps` wins over it.
        steps: optimizer steps.
        batch: rows of a pass, on each device.
        accumulate: passes of an optimizer step.
        learning_rate: at the top of the cosine; None for the method's own.
        warmup: share of the steps in which it rises.
        weight_decay: of AdamW.
        splits: split points of a row and pass; None for the method's own, 0 for all.
        max_length: rows with more tokens are left out; None for none.
        evaluations: how often the dev rows are scored.
        dev_rows: most dev rows to score.
        checkpoints: how many are written over the run.
        seed: of everything drawn.
        bf16: None where the device has it; True and False say so.
        resume: go on from the last checkpoint.
    """

    epochs: float = 4.0
    steps: int | None = None
    batch: int = 8
    accumulate: int = 1
    learning_rate: float | None = None
    warmup: float = 0.03
    weight_decay: float = 0.0
    splits: int | None = None
    max_length: int | None = None
    evaluations: int = 10
    dev_rows: int = 256
    checkpoints: int = 10
    seed: int = 0
    bf16: bool | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "accumulate", "evaluations", "dev_rows", "checkpoints"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give more than 0.")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps is {self.steps}: give at least 1.")
        if self.splits is not None and self.splits < 0:
            raise ValueError(f"splits is {self.splits}: give 0 for all split points, or more.")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate}: give more than 0.")

    def recorded(self) -> dict[str, Any]:
        """All of them but `resume`, which changes nothing in the result."""
        return {name: value for name, value in asdict(self).items() if name != "resume"}


def prepare(method: str, model: Any, settings: dict[str, Any], training: dict[str, Any]) -> tuple[Trained, Objective]:
    """An untrained drafter of `method` for `model`, and the objective that will train it.

    Args:
        method: one of `METHODS`.
        model: the model; it is moved nowhere.
        settings: of the drafter, as its `fresh` takes them.
        training: of the objective, such as `prefix_dropout`.

    Raises:
        ValueError: an unknown method, or settings outside what the model can have.
        TypeError: a setting that the method does not have.
    """
    trained = method_class(method).fresh(model, **settings)
    objective = METHODS[method].objective
    known = [name for name in inspect.signature(objective.__init__).parameters if name not in ("self", "trained")]
    for name in training:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"The {method} objective has no option {name!r}.{hint}")
    return trained, objective(trained, model, **training)
