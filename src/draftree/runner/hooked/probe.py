"""The anatomy of a model, for those who have no runner of it at hand: drafters inside the model, training, pruning."""

from __future__ import annotations

from draftree.runner.hooked.anatomy import Anatomy, forget_changed_anatomy
from draftree.runner.hooked.runner import HookedRunner
from draftree.runner.target import Target

__all__ = ["Anatomy", "probe"]


def probe(target: Target) -> Anatomy:
    """See `anatomy.anatomy_of`."""
    forget_changed_anatomy(target.model)
    return HookedRunner(target).anatomy
