"""Pruning inside the pass: an early head drops unlikely nodes."""

from draftree.pruning.early import EarlyHead, EarlyPruning, demo_early_head
