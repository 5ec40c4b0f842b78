"""What can be trained for a frozen model: each method's objective, by the method's name."""

from __future__ import annotations

import inspect
from typing import Any

from draftree.drafting.folder import Trained, method_class
from draftree.errors import did_you_mean
from draftree.training.objective import DrafterObjective
from draftree.training.objective_bita import BiTAObjective
from draftree.training.objective_heads import EarlyHeadObjective, MedusaObjective
from draftree.training.objective_hidden_transfer import HiddenTransferObjective

METHODS: dict[str, type[DrafterObjective]] = {
    "bita": BiTAObjective,
    "hidden-transfer": HiddenTransferObjective,
    "medusa": MedusaObjective,
    "early-head": EarlyHeadObjective,
}


def prepare(
    method: str, model: Any, settings: dict[str, Any], training: dict[str, Any]
) -> tuple[Trained, DrafterObjective]:
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
    objective = METHODS[method]
    known = [name for name in inspect.signature(objective.__init__).parameters if name not in ("self", "trained")]
    for name in training:
        if name not in known:
            raise TypeError(f"The {method} objective has no option {name!r}.{did_you_mean(name, known)}")
    return trained, objective(trained, model, **training)
