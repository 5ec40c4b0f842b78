"""Acceptance: from scored trees to tokens."""

from draftree.acceptance.base import Walk, lazy_walk
from draftree.acceptance.greedy import greedy_walks
from draftree.acceptance.sampled import PrefixChooser
from draftree.acceptance.typical import LossyTypical

__all__ = ["LossyTypical", "PrefixChooser", "Walk", "greedy_walks", "lazy_walk"]
