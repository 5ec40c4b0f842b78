"""Acceptance: from scored trees to tokens."""

from draftree.acceptance.base import ScoredTree, Walk, lazy_walk
from draftree.acceptance.bild import LossyBiLD
from draftree.acceptance.greedy import greedy_walks
from draftree.acceptance.lossy import LossyRule
from draftree.acceptance.sampled import PrefixChooser
from draftree.acceptance.typical import LossyTypical

__all__ = ["LossyBiLD", "LossyRule", "LossyTypical", "PrefixChooser", "ScoredTree", "Walk", "greedy_walks", "lazy_walk"]
