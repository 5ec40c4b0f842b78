"""Trees sized step by step for most tokens a second, and no trees at all where drafting does not pay.

This is what a user chooses and what is learned; `draftree.shaping.sizer` is how it works in an engine.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from draftree.drafting.base import Drafter
from draftree.runner.step_cost import StepCost
from draftree.shaping.base import Shape, Sizer
from draftree.shaping.cost_line import CostLine
from draftree.shaping.learned import Learned
from draftree.shaping.sizer import DynamicSizer
from draftree.shaping.step_times import StepTimes

if TYPE_CHECKING:
    from draftree.pruning.pruner import Pruner

COSTS = ("measured", "line")
ACCEPTANCES = ("calibrated", "by-rank", "product")


class DynamicTree(Shape):
    """Sizes every step's trees by expected tokens and the cost of a step (ProPD, section 4.2).

    Args:
        max_nodes: most draft tokens per request.
        cost: what a step costs: "measured", a curve that the steps themselves keep true; "line", ProPD's straight line
            through their times; or a `StepCost` that is taken as it is.
        acceptance: how likely draft tokens are accepted: "calibrated", by how often such of the drafter's own
            probabilities were; "by-rank", by depth, rank and whether the parent lies on the best path; "product",
            ProPD's product of each depth's shares.

    Raises:
        ValueError: an option out of range.

    One object may serve several engines and threads: what is learned about the drafter is shared, under a lock.
    """

    def __init__(self, max_nodes: int = 64, cost: StepCost | str = "measured", acceptance: str = "calibrated") -> None:
        if max_nodes < 1:
            raise ValueError(f"max_nodes is {max_nodes}: give 1 or more, or use no drafter at all.")
        if isinstance(cost, str) and cost not in COSTS:
            raise ValueError(f"cost is {cost!r}: choose {' or '.join(COSTS)}, or give a StepCost.")
        if acceptance not in ACCEPTANCES:
            raise ValueError(f"acceptance is {acceptance!r}: choose {', '.join(ACCEPTANCES)}.")
        self.max_nodes, self.acceptance = max_nodes, acceptance
        self.measures = isinstance(cost, str)
        self._line = cost == "line"
        self._given = None if isinstance(cost, str) else cost
        self._learned = Learned(acceptance)
        self._times: WeakKeyDictionary[StepCost, StepTimes] = WeakKeyDictionary()  # by what was measured
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """What was learned of draft tokens; a copy learns what steps take anew."""
        return {name: value for name, value in vars(self).items() if name not in ("_times", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _times=WeakKeyDictionary(), _lock=threading.Lock())

    def bind(
        self, cost: StepCost | None, drafter: Drafter, pruner: Pruner | None = None, *, packed: bool = True
    ) -> Sizer:
        """See `Shape.bind`.

        Raises:
            ValueError: nothing says what a step costs.
        """
        known = self._given or cost
        if known is None:
            raise ValueError("DynamicTree has to know what steps cost: give `bind` a StepCost.")
        with self._lock:
            times = self._times.get(known)
            if times is None:
                # A copy, as the values of a dictionary by weak keys must not hold these.
                base = known if self._given is not None else known.for_batch()
                first = CostLine(base) if self._line else base
                times = self._times[known] = StepTimes(first, learns=self.measures)
        return DynamicSizer(self._learned, times, drafter, pruner, max_nodes=self.max_nodes, packed=packed)
