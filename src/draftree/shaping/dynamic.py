"""`DynamicTree`: trees sized step by step for most tokens per second, with pauses where drafting does not pay.

It holds the options and what is learned; `draftree.shaping.sizer` does the work in an engine.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from draftree.drafting.base import Drafter
from draftree.runner.step_cost import StepCost
from draftree.shaping.base import Fixed, Shape, Sizer
from draftree.shaping.sizer import DynamicSizer, Learned, StepTimes

if TYPE_CHECKING:
    from draftree.pruning.pruner import Pruner


class DynamicTree(Shape):
    """Sizes every step's trees by expected tokens and the cost of a step (ProPD, section 4.2).

    Args:
        max_nodes: most draft tokens per request.
        cost: the cost of a step, used unchanged; None measures it, and real steps correct it.

    Raises:
        TypeError, ValueError: an option of another kind or out of range.

    One object may serve several engines and threads; a lock guards what they learn about the drafter.
    """

    def __init__(self, max_nodes: int = 64, cost: StepCost | None = None) -> None:
        if max_nodes < 1:
            raise ValueError(f"max_nodes is {max_nodes}: give 1 or more, or use no drafter at all.")
        if cost is not None and not isinstance(cost, StepCost):
            raise TypeError(f"cost is a {type(cost).__name__}: give a StepCost, or None to measure it.")
        self.max_nodes = max_nodes
        self.measures = cost is None
        self._given = cost
        self._learned = Learned()
        self._times: WeakKeyDictionary[StepCost, StepTimes] = WeakKeyDictionary()  # by what was measured
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Return what was learned of draft tokens; a copy measures step times anew."""
        return {name: value for name, value in vars(self).items() if name not in ("_times", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _times=WeakKeyDictionary(), _lock=threading.Lock())

    def bind(
        self, cost: StepCost | None, drafter: Drafter, pruner: Pruner | None = None, *, packed: bool = True
    ) -> Sizer:
        """See `Shape.bind`."""
        known = self._given or cost
        if known is None:
            raise ValueError("DynamicTree needs the cost of steps: give `bind` a StepCost.")
        with self._lock:
            times = self._times.get(known)
            if times is None:
                # A copy, as the values of a dictionary by weak keys must not hold these.
                base = known if self._given is not None else known.for_batch()
                times = self._times[known] = StepTimes(base, learns=self.measures)
        return DynamicSizer(self._learned, times, drafter, pruner, max_nodes=self.max_nodes, packed=packed)


_trees: dict[int, tuple[weakref.ref[Drafter], DynamicTree]] = {}  # by id, as a user's drafter may have no hash
_lock = threading.RLock()  # reentrant: a drafter may be collected while it is held


def shape_for(drafter: Drafter) -> Shape:
    """Return the default shape of a drafter: its static tree, or the `DynamicTree` that belongs to it."""
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
