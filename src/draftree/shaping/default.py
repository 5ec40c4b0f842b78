"""The shape of a drafter whose user chose none; what it learns lasts from one call to the next."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from draftree.drafting.base import Drafter
from draftree.shaping.base import Fixed, Shape
from draftree.shaping.dynamic import DynamicTree

_shapes: WeakKeyDictionary[Drafter, Shape] = WeakKeyDictionary()
_lock = threading.Lock()


def shape_for(drafter: Drafter) -> Shape:
    """A static tree for a drafter that has one by construction, else the dynamic tree that belongs to this drafter."""
    with _lock:
        if drafter not in _shapes:
            fixed = drafter.node_budget
            _shapes[drafter] = DynamicTree() if fixed is None else Fixed(fixed)
        return _shapes[drafter]
