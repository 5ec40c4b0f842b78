"""Shapes: how large the verified trees are."""

from draftree.shaping.base import Fixed, Shape
from draftree.shaping.default import shape_for
from draftree.shaping.dynamic import DynamicTree

__all__ = ["DynamicTree", "Fixed", "Shape", "shape_for"]
