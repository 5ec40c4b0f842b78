"""The file of `draftree tune`: a drafter with its tree size, and the model and machine of the measurement.

`load_tuned` makes the drafter again, tree size included, so that one argument is enough for `generate`, the engine and
the command line.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from draftree.drafting import Drafter, Merge
from draftree.drafting.folder import model_hash, named_drafter
from draftree.registry import DRAFTERS
from draftree.runner import inspect_model
from draftree.runner.step_cost import chip_name


@dataclass(frozen=True)
class Tuned:
    """The contents of a tuned file.

    Attributes:
        drafters: names to merge, as `--drafter` takes them; empty for plain decoding. Folders are relative to the file.
        node_budget: draft tokens of every step; None for trees sized by cost.
        model: SHA-256 of the model's weights.
        machine: device, dtype and threads of the measurement.
        results: the table of the measurement, one entry for each candidate.
    """

    drafters: list[str]
    node_budget: int | None
    model: str
    machine: dict[str, Any]
    results: list[dict[str, Any]]


def make_drafter(names: Sequence[str], model: Any, tokenizer: Any) -> Drafter | None:
    """Return the drafter of these names, merged if there are several; None for no name."""

    made = [named_drafter(name, model, tokenizer) for name in names]
    if len(made) > 1:
        return Merge(made)
    return made[0] if made else None


def machine_of(model: Any) -> dict[str, Any]:
    """Return the properties of the machine on which a choice depends: device, dtype and threads."""
    return {
        "device": chip_name(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def write_tuned(
    path: Path, model: Any, drafters: Sequence[str], node_budget: int | None, results: list[dict[str, Any]]
) -> None:
    """Write a choice for `model` to `path`; see `Tuned` for the other arguments. Folders are given from here."""
    folder = path.parent.absolute()
    # A leading ./ tells a folder from a drafter of the same name.
    relative = [name if name in DRAFTERS else os.path.join(".", os.path.relpath(name, folder)) for name in drafters]
    tuned = Tuned(relative, node_budget, model_hash(inspect_model(model).model), machine_of(model), results)
    path.write_text(json.dumps(asdict(tuned), indent=2) + "\n", encoding="utf-8")


def load_tuned(path: str | Path, model: Any, tokenizer: Any = None) -> Drafter | None:
    """Return the drafter that `draftree tune` chose for `model`.

    Args:
        path: the file that `draftree tune` wrote.
        model: the Hugging Face model that was measured.
        tokenizer: the model's; needed if the choice has a small model, whose tokenizer must be the same.

    Returns:
        A drafter for `drafter=`, whose `node_budget` holds the tree size; None if plain decoding was fastest.

    Raises:
        ValueError: no such file, not a tuned file, another model, or a missing drafter folder.

    Warns:
        UserWarning: the choice was made on another device, in another dtype or with another number of threads.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"There is no tuned choice {str(path)!r}: give a file that draftree tune wrote.")
    try:
        tuned = Tuned(**json.loads(path.read_text(encoding="utf-8")))
        drafters = [str(name) for name in tuned.drafters]
        machine = dict(tuned.machine)
    except (ValueError, TypeError):
        raise ValueError(f"{path} is not a file of draftree tune: give a file that it wrote.") from None
    if tuned.model != model_hash(inspect_model(model).model):
        raise ValueError(f"{path} was tuned for another model: run draftree tune with this one.")
    for name, value in machine_of(model).items():
        before = machine.get(name, value)
        if before != value:
            warnings.warn(
                f"{path} was tuned with {name} {before}, and this is {value}: another drafter may be faster here. Run "
                "draftree tune again.",
                stacklevel=2,
            )
    drafter = make_drafter([_from_here(path, name) for name in drafters], model, tokenizer)
    if drafter is not None:
        drafter.node_budget = tuned.node_budget
    return drafter


def _from_here(path: Path, name: str) -> str:
    """Return a name of the file `path`, a folder as an absolute path."""
    if name in DRAFTERS:
        return name
    folder = path.parent.absolute() / name
    if not folder.is_dir():
        raise ValueError(f"{path} names the drafter {name!r}, which is missing: put it back, or run draftree tune.")
    return str(folder)
