"""Load a published drafter: by its files, the class that runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftree.drafting.published.block import DFlash
from draftree.drafting.published.eagle import Eagle3
from draftree.drafting.published.features import FeatureDrafter
from draftree.drafting.published.mtp import MTP
from draftree.published import kind_of, refuse_published
from draftree.runner.target import inspect_model

LOADERS: dict[str, Callable[[Path, int], FeatureDrafter]] = {
    "EAGLE-3": Eagle3.load,
    "P-EAGLE": Eagle3.load,
    **dict.fromkeys(("DFlash", "JetSpec", "DSpark", "DFlash2"), DFlash.load),
}


def load_published(folder: Path, model: Any) -> FeatureDrafter:
    """Return the published drafter of a folder, for `model`.

    Raises:
        ValueError: a kind that draftree does not run, files that do not fit together, or another model's drafter.
    """
    target, kind = inspect_model(model), kind_of(folder) or ""
    if kind == "MTP-Draft":
        drafter: FeatureDrafter = MTP.load(folder, target)
    elif kind in LOADERS:
        drafter = LOADERS[kind](folder, len(target.layers))
    else:
        refuse_published(folder)
        raise ValueError(f"{str(folder)!r} holds no drafter.")
    drafter.bind(target)
    return drafter
