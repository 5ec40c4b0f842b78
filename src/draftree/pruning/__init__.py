"""Pruning inside the pass: nodes that an early head holds unlikely leave before the later layers."""

from draftree.pruning.early import EarlyPruning
from draftree.pruning.early_head import EarlyHead, demo_early_head

__all__ = ["EarlyHead", "EarlyPruning", "demo_early_head"]
