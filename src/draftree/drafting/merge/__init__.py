"""Merge: the trees of several drafters under one node budget."""

from draftree.drafting.merge.drafter import Merge

__all__ = ["Merge"]
