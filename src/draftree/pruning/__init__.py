"""Pruning inside the pass: an early head drops unlikely nodes."""

from draftree.pruning.early import EarlyPruning
from draftree.pruning.early_head import EarlyHead, demo_early_head

__all__ = ["EarlyHead", "EarlyPruning", "demo_early_head"]
