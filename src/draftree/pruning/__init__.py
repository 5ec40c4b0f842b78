"""Pruning inside the pass: nodes that an early head holds unlikely leave before the later layers."""
