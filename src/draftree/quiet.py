"""Whether the machine is quiet, so that figures of speed mean something, and how many threads pay on it.

Two threads that wait for each other crawl where another process keeps one core busy, and they do so by other factors in
other ways of decoding: ratios of speeds that were taken then are wrong. The system's load average cannot say it: it
is of the last minute, which the demo before this one was part of, and not every system has one. So other processes'
time is taken while the demo runs, and where that is not known, or another guest has the core, that of a fixed product.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

SIDE = 320  # of the matrices whose product is timed: about a millisecond on one core
FEW = 6  # products at a time
SLOWER = 1.1  # times one thread's product: then several threads do not pay
UNEVEN = 1.5  # median over best of the products: then something interferes
OTHERS = 0.15  # cores that other processes may take


def time_products(count: int) -> list[float]:
    """Seconds of `count` products, with torch's present threads."""
    import torch

    square = torch.ones(SIDE, SIDE, dtype=torch.float32, device="cpu")
    found = []
    for _ in range(count + 1):  # the first one wakes the threads
        begin = time.perf_counter()
        square @ square
        found.append(time.perf_counter() - begin)
    return found[1:]


def busy_seconds() -> float | None:
    """Seconds that all processes but this one have computed since the system began; None where it does not say."""
    try:
        ticks = [int(part) for part in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    idle = ticks[3] + ticks[4]  # idle, and waiting for disks
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK") - time.process_time()


class Quiet:
    """Looks at the machine before, between and after pieces of work.

    Args:
        products: times so many of a fixed product.
        others: seconds that other processes have computed; None where that is not known.
        clock: seconds.
    """

    def __init__(
        self,
        products: Callable[[int], list[float]] = time_products,
        others: Callable[[], float | None] = busy_seconds,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._products, self._others, self._clock = products, others, clock
        self._times: list[float] = []
        self._begin = clock(), others()

    def choose_threads(self) -> str | None:
        """Have torch use one thread where several are slower; says so then. Takes some 20 ms."""
        import torch

        count = torch.get_num_threads()
        if count == 1:
            return None
        several = statistics.median(self._products(FEW))
        torch.set_num_threads(1)
        if several > SLOWER * statistics.median(self._products(FEW)):
            return f"{count} threads are slower than one here, as on a busy machine: the demo uses one."
        torch.set_num_threads(count)
        return None

    def look(self) -> None:
        """Take some times; a few milliseconds."""
        self._times += self._products(FEW)

    def trouble(self) -> str | None:
        """Why figures of the work since the beginning mean little, in a sentence; None on a quiet machine."""
        begin, before = self._begin
        seconds, now = self._clock() - begin, self._others()
        if before is not None and now is not None and now - before > OTHERS * seconds:
            return f"The machine is not quiet: other processes took {(now - before) / seconds:.1f} of its cores."
        if self._times and statistics.median(self._times) > UNEVEN * min(self._times):
            slow = statistics.median(self._times) / min(self._times)
            return f"The machine is not quiet: the same work took {slow:.1f} times as long as at best."
        return None
