"""The cost of a step by its number of rows: a curve, measured by some passes and corrected by every real step.

Rows are cheap up to a point: a dozen on a CPU, some hundreds on a GPU; between two sizes of a matrix kernel the time
may jump. Passes before the first token find the rough shape. Later each real step moves the whole curve (a longer
context, a busy machine) and, by what is left, the point of its own row count.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftree.runner.base import Runner, preparations
from draftree.runner.plan import Plan

DEPTH = 8  # rows of a branch, in models whose time depends on depth
FIRST_ROWS: tuple[int, ...] = (1, 4, 8, 16, 32, 64, 128)  # measured in this order, as long as they are cheap
SPARSE = 3  # only every third is measured where each row count is prepared (captured), which takes a dozen passes
DEAR = 2.0  # times a plain step at which measuring stops
PATIENCE = 4.0  # seconds at which measuring stops
LEVEL_RATE = 0.15  # weight of one step in the level of all row counts
RATE, RATE_FIRST = 0.05, 0.25  # the same in what one row count has for itself, settled and for its first step
STALL = math.log(2.0)  # logarithm of how far off a single step counts, once its row count is known
TABLE = 1024  # row counts in the table
HOPE = 0.9  # factor on the time of a row count without a real step, so that likely gains are tried
RENEW, SETTLED = 16, 3  # steps between two renewals of the table; steps of a size up to which each renews it


class StepCost:
    """Seconds of a step by its rows: linear between known row counts and beyond the last two, never falling.

    Args:
        rows: ascending row counts, at least two.
        seconds: of a step with that many rows.
    """

    def __init__(self, rows: Any, seconds: Any) -> None:
        points = np.asarray(rows, dtype=np.int64), np.asarray(seconds, dtype=np.float64)
        if len(points[0]) < 2 or points[0].shape != points[1].shape or (np.diff(points[0]) <= 0).any():
            raise ValueError("A step-cost curve needs two or more ascending row counts, each with its seconds.")
        if not (np.isfinite(points[1]) & (points[1] > 0)).all():
            raise ValueError("A step-cost curve needs a finite time over 0 for each row count.")
        self._points = dict(zip(points[0].tolist(), np.log(points[1]).tolist(), strict=True))  # log-seconds, less level
        self._level = 0.0
        self._steps = 0
        self._seen: dict[int, int] = {}  # real steps by row count
        self._table: np.ndarray | None = None  # the curve from 0 rows on
        self._news = 0  # steps since it was made

    def for_batch(self) -> StepCost:
        """Return a curve of the same shape for another number of requests."""
        return StepCost(self.rows, self.seconds)

    @property
    def rows(self) -> np.ndarray:
        """Return the known row counts, ascending."""
        return np.array(sorted(self._points), dtype=np.int64)

    @property
    def seconds(self) -> np.ndarray:
        """Return the curve at `rows`."""
        return self.of(self.rows)

    def of(self, rows: Any) -> np.ndarray:
        """Return seconds of a step with `rows` rows, an array or number."""
        rows = np.asarray(rows, dtype=np.float64)
        known, seconds = self._known()
        inside = np.interp(rows, known, seconds)
        return np.where(rows > known[-1], _beyond(rows, known, seconds), inside)

    def _known(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the known row counts, ascending, and their seconds, which never fall."""
        known = self.rows
        seconds = np.exp(np.array([self._points[n] for n in known.tolist()]) + self._level)
        return known, _rising(seconds.tolist(), [self._seen.get(n, 0) + 1.0 for n in known.tolist()])

    @property
    def table(self) -> np.ndarray:
        """Return seconds of steps with 0, 1, ... rows, [TABLE]; renewed after some steps."""
        if self._table is None:
            self._table, self._news = self.of(np.arange(TABLE)), 0
        return self._table

    def look_up(self, rows: np.ndarray) -> np.ndarray:
        """Return seconds of steps with these whole numbers of rows; once steps are observed, less for untried ones."""
        table = self.table
        seconds = table[rows] if rows.max(initial=0) < len(table) else self.of(rows)
        return np.where(np.isin(rows, list(self._seen)), seconds, HOPE * seconds) if self._seen else seconds

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a real step."""
        seen = self._seen.get(rows, 0)
        if rows not in self._points:
            self._points[rows] = math.log(float(self.of(rows))) - self._level
        off = math.log(max(seconds, 1e-9)) - self._level - self._points[rows]
        if seen > 2:  # a stalled step counts as no more than a slow one
            off = min(max(off, -STALL), STALL)
        self._steps += 1
        # The machine and the context change from step to step, so the level follows at once; points follow slowly.
        shared = max(1 / self._steps, LEVEL_RATE) * off
        self._level += shared
        self._points[rows] += max(1 / (seen + 1 / RATE_FIRST), RATE) * (off - shared)
        self._seen[rows] = seen + 1
        self._news += 1
        if self._news >= RENEW or seen < SETTLED:
            self._table = None


def _beyond(rows: np.ndarray, known: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Extend the line through the last two known row counts."""
    slope = (seconds[-1] - seconds[-2]) / (known[-1] - known[-2])
    return seconds[-1] + slope * (rows - known[-1])


def _rising(values: list[float], weights: list[float]) -> np.ndarray:
    """Return the rising sequence nearest to `values` by weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, count
    for value, weight in zip(values, weights, strict=True):
        count = 1
        while pools and pools[-1][0] > value:
            mean, more, members = pools.pop()
            value = (value * weight + mean * more) / (weight + more)
            weight, count = weight + more, count + members
        pools.append((value, weight, count))
    return np.repeat([mean for mean, _, _ in pools], [count for _, _, count in pools])


def measure_cost(runner: Runner, *, clock: Callable[[], float] = time.perf_counter) -> StepCost:
    """Time single passes of growing numbers of rows, fifteen at most; `clock` gives seconds."""
    with runner.lock, runner.guard():
        return _measure(runner, clock)


def _measure(runner: Runner, clock: Callable[[], float]) -> StepCost:
    target, rows = runner.target, FIRST_ROWS
    device = target.device
    most = min(rows[-1], target.max_positions or rows[-1])
    cache = runner.new_cache(1, most)
    encoder = None
    if target.encoder_decoder:
        encoder = runner.new_encoder(1)
        encoder.admit(0, torch.zeros(rows[0], dtype=torch.long, device=device))

    if target.recurrence is not None:  # Trees grow behind a state.
        read = Plan.causal(torch.zeros(1, 1, dtype=torch.long, device=device), prompt=True)
        cache.commit([[0]], runner.run(read, cache).segments)

    def run(count: int) -> float:
        plan = Plan.causal(torch.zeros(1, count, dtype=torch.long, device=device))
        if target.recurrence is not None:  # A recurrence takes its time by the depth of a tree.
            plan.visible = plan.visible & branches(count).to(device)
        while True:
            before, begin = preparations(), clock()
            result = runner.run(plan, cache, encoder=encoder)  # nothing is committed: the next pass writes over it
            result.logits[0, -1, 0].item()  # waits for the device
            seconds = clock() - begin
            if preparations() == before:
                return seconds

    def quickest(count: int) -> float:
        """Return the time of the faster of two passes, as one may be interrupted; of one pass on a slow machine."""
        seconds = run(count)
        return seconds if clock() - began > PATIENCE else min(seconds, run(count))

    began, before = clock(), preparations()
    found = {rows[0]: quickest(rows[0])}
    if preparations() > before:
        rows = rows[::SPARSE]
    for count in rows[1:]:
        if len(found) > 1 and (max(found.values()) > DEAR * found[rows[0]] or clock() - began > PATIENCE):
            break
        if count > most:
            break
        found[count] = quickest(count)
    if len(found) == 1:  # a context of one token: rows cost what they cost
        found[2 * rows[0]] = found[rows[0]]
    known = sorted(found)
    return StepCost(known, [max(found[n], 1e-9) for n in known])


def branches(count: int) -> torch.Tensor:
    """Return BoolTensor [1, count, count]: True within branches of `DEPTH` rows behind a common root."""
    branch = (torch.arange(count, device="cpu") - 1).div(DEPTH, rounding_mode="floor")
    return ((branch[:, None] == branch) | (branch < 0))[None]


def cached_cost(runner: Runner, clock: Callable[[], float] = time.perf_counter) -> StepCost:
    """Return the curve of `runner` for torch's number of threads, measured at the first call (or by another clock)."""
    if clock is not time.perf_counter:
        return measure_cost(runner, clock=clock)
    threads = torch.get_num_threads()
    if threads not in runner.costs:
        runner.costs[threads] = measure_cost(runner)
    cost: StepCost = runner.costs[threads]
    return cost


def chip_name(device: torch.device) -> str:
    """The GPU or processor behind `device` by its maker's name, where the system tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration, IndexError):
        return platform.processor() or platform.machine()
