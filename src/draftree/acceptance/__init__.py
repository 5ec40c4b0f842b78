"""Acceptance: from scored trees to tokens."""

from draftree.acceptance.base import AcceptedPath, LossyRule, ScoredTree, lazy_walk
from draftree.acceptance.lossy import LossyBiLD, LossyTypical
from draftree.acceptance.sampled import PrefixChooser
