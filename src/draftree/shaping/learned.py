"""What `DynamicTree` knows of a drafter's draft tokens: over all requests and engines, and of one request."""

from __future__ import annotations

import copy
import threading
from typing import Any

from draftree.drafting.acceptance_statistics import FADING_OWN, AcceptanceStatistics
from draftree.shaping.modes import Modes

GAIN_FIRST = 0.5  # accepted draft tokens a step, before any was seen
FIRST_TREE = 4.0  # draft tokens of a request's largest recent tree, before any


class Learned:
    """What is known of a drafter's draft tokens, over all requests and engines."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held while any of it is read or changed
        self.ledger = AcceptanceStatistics()  # counts of all requests
        self.modes: Modes | None = None  # what drafting brought; None before the first engine says which ways there are
        self.gain = GAIN_FIRST  # accepted draft tokens a step

    def __getstate__(self) -> dict[str, Any]:
        with self.lock:  # copied here, since engines of other threads may go on learning
            return {name: copy.deepcopy(value) for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.RLock())


class OfRequest:
    """What is known of one request's draft tokens, and how it drafts next."""

    __slots__ = ("chances", "gain", "ledger", "modes", "next", "recent")

    def __init__(self, modes: Modes, first: int, gain: float) -> None:
        self.ledger = AcceptanceStatistics(FADING_OWN)
        self.modes, self.gain = modes, gain
        self.next = first  # way of drafting in the next step to be planned
        self.recent = FIRST_TREE  # draft tokens of the largest tree verified recently
        self.chances: list[float] | None = None  # by cell, that draft tokens are accepted; None: to be read again
