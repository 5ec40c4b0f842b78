"""Leaving inside the pass: nodes that an early head holds unlikely; and, lossy, tokens whose states have settled."""

from draftree.pruning.calm import LossyCALM
from draftree.pruning.early import EarlyPruning
from draftree.pruning.early_head import EarlyHead, demo_early_head

__all__ = ["EarlyHead", "EarlyPruning", "LossyCALM", "demo_early_head"]
