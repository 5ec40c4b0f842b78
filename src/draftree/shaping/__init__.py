"""Shapes: how large the verified trees are."""

from draftree.shaping.base import Fixed, Shape
from draftree.shaping.dynamic import DynamicTree, shape_for
