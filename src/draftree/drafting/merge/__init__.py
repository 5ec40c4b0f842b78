"""Merge: the trees of several drafters under one node budget."""

from draftree.drafting.merge.drafter import Merge, parts_of

__all__ = ["Merge", "parts_of"]
