"""Passes that first make what later ones of their shape find, such as a recording: their time is not that of a step.

Counted by thread, as whoever times a step is in the thread that makes its passes, a draft model's among them.
"""

from __future__ import annotations

import threading

_of_thread = threading.local()


def note_preparation() -> None:
    """The pass under way is making what later ones find."""
    _of_thread.count = preparations() + 1


def preparations() -> int:
    """How many passes of this thread have made such things so far."""
    count: int = getattr(_of_thread, "count", 0)
    return count
