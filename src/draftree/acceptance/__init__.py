"""Acceptance: from scored trees to tokens."""

from draftree.acceptance.base import AcceptedPath, LossyRule, ScoredTree, lazy_walk
from draftree.acceptance.bild import LossyBiLD
from draftree.acceptance.sampled import PrefixChooser
from draftree.acceptance.typical import LossyTypical

__all__ = [
    "AcceptedPath",
    "LossyBiLD",
    "LossyRule",
    "LossyTypical",
    "PrefixChooser",
    "ScoredTree",
    "lazy_walk",
]
