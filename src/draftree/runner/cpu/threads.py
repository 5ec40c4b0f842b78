"""How many threads a compiled pass runs on: as many as torch has, where the pass is worth them and they pay.

Threads that share a pass meet some fifty times in it. Where another process has taken one of their cores, each meeting
may last a time slice, and a pass a hundred times as long. So passes on several threads are timed: one that takes much
longer than one thread would is followed by a pause of all, in which passes run on one thread. The threads are then
tried again, behind pauses that double as long as it stays bad. What a pass gives does not depend on any of this.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

SLOW = 2.0  # times what one thread takes: less may be a longer context, or a slower moment
REST = 4.0  # seconds of pause for each second lost, so that single hiccups cost little
LONGEST_REST = 4.0  # seconds, which a stall of a tenth of a second is a small part of
PER_MULTIPLICATION = 1e-10  # seconds of one thread until it was timed: a row through weights from memory, and more
PER_PASS = 1e-3  # seconds that any pass may take besides


class Pauses:
    """When passes run on one thread because several were held up, for all models of a process.

    Python threads may race here; what is lost then is a few passes' knowledge.

    Args:
        clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self._ends, self._length = clock(), 0.0

    def left(self) -> float:
        """Seconds until the pause ends; 0 or less where there is none."""
        return self._ends - self.clock()

    def begin(self, lost: float) -> None:
        """Begin a pause because of so many seconds lost.

        It is twice the one before where that helped for no longer than it lasted.
        """
        again = -self.left() < self._length
        self._length = min(max(2 * self._length * again, REST * lost), LONGEST_REST)
        self._ends = self.clock() + self._length


PAUSES = Pauses()


class Pace:
    """Chooses threads for the passes of one piece of work, such as the layers of a model, and learns what they take.

    Args:
        pauses: those of the process.
    """

    def __init__(self, pauses: Pauses | None = None) -> None:
        self._pauses = PAUSES if pauses is None else pauses
        self.clock = self._pauses.clock
        self._alone: dict[int, float] = {}  # shortest time on one thread by `_size`, since threads were last held up

    def threads(self, work: int, worth: float) -> int:
        """Threads for a pass of so many multiplications, several where it has more than are `worth` waking them."""
        if work <= worth:
            return 1
        left = self._pauses.left()
        # A pass that outlasts the pause on one thread would lose more by it than threads may.
        return 1 if 0 < left > self._expected(work) else torch.get_num_threads()

    def took(self, work: int, threads: int, began: float) -> None:
        """Tell of a pass that has just ended.

        Args:
            work, threads: of the pass.
            began: what `clock` said before it.
        """
        seconds = self.clock() - began
        if threads == 1:
            size = _size(work)
            self._alone[size] = min(self._alone.get(size, seconds), seconds)
            return
        expected = self._expected(work)
        if seconds > SLOW * expected:
            self._pauses.begin(seconds - expected)
            self._alone.pop(_size(work), None)  # to be found out anew: contexts may have grown

    def _expected(self, work: int) -> float:
        """Seconds that one thread takes."""
        known = self._alone.get(_size(work))
        return PER_PASS + PER_MULTIPLICATION * work if known is None else known


def _size(work: int) -> int:
    """The same for passes whose work differs by less than a fifth or so."""
    bits = work.bit_length()
    return bits << 3 | work >> max(bits - 3, 0)
