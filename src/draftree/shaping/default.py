"""The shape of a drafter whose user chose none; what it learns lasts from one call to the next."""

from __future__ import annotations

import threading
import weakref

from draftree.drafting.base import Drafter
from draftree.shaping.base import Fixed, Shape
from draftree.shaping.dynamic import DynamicTree

_trees: dict[int, tuple[weakref.ref[Drafter], DynamicTree]] = {}  # by id: a user's drafter may have no hash
_lock = threading.RLock()  # a drafter may go while it is held


def shape_for(drafter: Drafter) -> Shape:
    """A static tree for a drafter that has one by construction, else the dynamic tree that belongs to this drafter."""
    if drafter.node_budget is not None:
        return Fixed(drafter.node_budget)
    number = id(drafter)
    with _lock:
        held = _trees.get(number)
        if held is None or held[0]() is not drafter:
            held = _trees[number] = weakref.ref(drafter, lambda gone: _forget(number, gone)), DynamicTree()
        return held[1]


def _forget(number: int, gone: weakref.ref[Drafter]) -> None:
    with _lock:
        if number in _trees and _trees[number][0] is gone:
            del _trees[number]
