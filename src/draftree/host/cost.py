"""What a step costs by its number of rows, measured on this machine for this model.

Rows are not cheap everywhere: a CPU is compute-bound from a dozen rows on, a GPU from some hundreds. The curve is
measured once (a few hundred milliseconds), kept in memory and on disk by model shape, device, dtype and threads.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftree.host.base import Host
from draftree.host.plan import Plan

ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32, 64, 128)  # close together where trees mostly end
BANDS = (128, 1024, 4096)  # tokens of context while measuring: that nearest below what the engine expects
SECONDS = 0.4  # time spent measuring, once the model has run once
PATIENCE = 4.0  # seconds after which no larger row counts are tried; the curve goes on straight from there
FEWEST = 3  # row counts that are always tried
FORMAT = 3  # of the file on disk
PACE = 0.1  # weight of one real step against the curve as it stands; single steps are noisy
SHARED = 0.85  # part of a step's news that concerns all row counts alike: a machine's speed changes more than its curve
TABLE = 256  # row counts in the planning table
TABLE_EVERY = 256  # steps between two renewals of it, each of which takes as long as a few rows
FAR_OFF = 4.0  # sum of the steps' logarithms of real over expected time that has it renewed before
DEAREST = 8.0  # times what is expected, as the first step of a batch counts
MOST_FACTOR = 2.0  # a step counts as no more than this much slower or faster than expected
TRIES = 3  # measurements, as long as they make no sense
CHECKED = (1, 16)  # rows of the steps that a curve from disk is checked by
CHECK_MOST = 0.1  # seconds of a step up to which that is done: it has to be cheap
AGREES = 1.3  # how far the two may grow apart before the curve is measured again


class StepCost:
    """Seconds of a step against rows: linear between measured points and beyond the last two.

    The measured curve is where it starts; `observe` keeps it true while contexts grow and the machine's load changes.

    Args:
        rows: ascending row counts.
        seconds: time of a step with that many rows; read as non-decreasing.
        offset: whether the curve is of other steps than those to come, off by a time that is the same for all row
            counts and that the first ones tell.
    """

    def __init__(self, rows: Any, seconds: Any, *, offset: bool = False) -> None:
        self.rows = np.asarray(rows, dtype=float)
        self._points = np.array(seconds, dtype=float)
        if len(self.rows) < 2 or len(self.rows) != len(self._points) or (np.diff(self.rows) <= 0).any():
            raise ValueError("A step-cost curve needs two or more ascending row counts, each with its seconds.")
        self._octaves = np.log2(self.rows)
        self._table: np.ndarray | None = None
        self._from_one = self._points  # the table without steps of no rows; the same object as long as the table is
        self._observed, self._off = 0, 0.0  # steps since the table was made, and the sum of how much they were off
        self._told = 0  # steps so far
        self._news: dict[int, tuple[float, int]] = {}  # by rows: sum and count of log-seconds to fold in
        self._unset = offset  # whether the offset is still to be told
        self._weights: dict[int, np.ndarray] = {}  # by rows: how much a step of so many concerns each point
        if not (np.isfinite(self._points) & (self._points > 0)).all():
            raise ValueError("A step-cost curve needs a finite time over 0 for each row count.")

    def for_batches(self) -> StepCost:
        """The curve for steps of several requests: each one's context has to be read, however many rows look at it."""
        return StepCost(self.rows, self.seconds, offset=True)

    @property
    def seconds(self) -> np.ndarray:
        """The curve at `rows`."""
        self._fold()
        return np.maximum.accumulate(self._points)

    def of(self, rows: Any) -> np.ndarray:
        """Seconds of a step with `rows` rows (array-like)."""
        self._fold()
        return self._at(rows)

    def _at(self, rows: Any) -> np.ndarray:
        rows, seconds = np.asarray(rows, dtype=float), np.maximum.accumulate(self._points)
        inside = np.interp(rows, self.rows, seconds)
        slope = (seconds[-1] - seconds[-2]) / (self.rows[-1] - self.rows[-2])
        return np.where(rows > self.rows[-1], seconds[-1] + slope * (rows - self.rows[-1]), inside)

    def table(self, first: int, stop: int) -> np.ndarray:
        """Seconds of steps with `first` to `stop` - 1 rows; a view of a table kept for planning every step."""
        if self._table is None or len(self._table) < stop:
            self._renew(stop)
        assert self._table is not None
        return self._table[first:stop]

    def from_one(self, count: int) -> np.ndarray:
        """Seconds of steps with 1, 2, .. rows, at least `count` of them; the same array until the table is renewed."""
        if self._table is None or len(self._table) <= count:
            self._renew(count + 1)
        return self._from_one

    def _renew(self, stop: int) -> None:
        self._table = self.of(np.arange(max(stop, TABLE)))
        self._observed, self._off = 0, 0.0
        self._from_one = self._table[1:]

    def _fold(self) -> None:
        """Let the points know of the news."""
        for rows, (news, count) in self._news.items():
            weights = self._weights.get(rows)
            if weights is None:
                octaves = np.abs(self._octaves - math.log2(rows))
                weights = self._weights[rows] = SHARED + (1 - SHARED) * np.exp(-octaves)
            # As if each step had been told at once: what the others have told already is not told again.
            known = float(np.log(self._at(rows)))
            self._told += count
            share = max(1 - (1 - PACE) ** count, count / self._told)  # the first ones tell how quick the machine is now
            self._points *= np.exp(share * (news / count - known) * weights)
        self._news.clear()

    def observe(self, rows: int, seconds: float, steps: int = 1) -> None:
        """So many real steps had `rows` rows and took `seconds`: bend the curve there, and shift the rest a little.

        A factor, not a sum, is averaged over time, so that one stalled step weighs no more than a slow one.
        """
        expected = float(self.from_one(rows)[rows - 1])
        if self._unset:
            self._points += max(min(seconds, DEAREST * expected) - expected, -0.5 * float(self._points[0]))
            self._unset, self._table = False, None
            return
        news, count = self._news.get(rows, (0.0, 0))
        told = min(max(seconds, expected / MOST_FACTOR), expected * MOST_FACTOR)
        self._news[rows] = news + steps * math.log(told), count + steps
        self._off += steps * math.log(told / expected)
        self._observed += steps
        if self._observed >= TABLE_EVERY or abs(self._off) > FAR_OFF:
            self._table = None


def measure_cost(
    host: Host, seconds: float = SECONDS, counts: Sequence[int] = ROWS, context: int = BANDS[0]
) -> StepCost:
    """Time steps of 1 to 128 rows behind `context` tokens, in sweeps up and down.

    A step finds in the caches what the one before left there, so each comes behind one of about as many rows. And a
    machine's speed changes within seconds: what counts is the time against the others of the same sweep.
    """
    with host.lock, host.guard():
        return _measure(host, seconds, counts, context)


def _measure(host: Host, seconds: float, counts: Sequence[int], wanted: int) -> StepCost:
    device = host.target.device
    limit = host.target.max_positions or wanted + counts[-1]
    context = max(1, min(wanted, limit - counts[-1]))
    rows = [n for n in counts if context + n <= limit]
    cache = host.new_cache(1, context + rows[-1])
    encoder = None
    if host.target.encoder_decoder:
        encoder = host.new_encoder(1)
        encoder.admit(0, torch.zeros(context, dtype=torch.long, device=device))

    def run(count: int) -> float:
        start = cache.lengths[0]
        plan = Plan(
            tokens=torch.zeros(1, count, dtype=torch.long, device=device),
            positions=start + torch.arange(count, device=device)[None],
            visible=torch.ones(1, count, count, dtype=torch.bool, device=device).tril(),
            first_logit_row=count - 1 if start == 0 else 0,
        )
        begin = time.perf_counter()
        result = host.run(plan, cache, encoder=encoder)
        result.logits[0, -1, 0].item()  # waits for the device
        elapsed = time.perf_counter() - begin
        if start == 0:
            cache.commit([list(range(count))], result.segments)
        return elapsed

    run(context)
    first: list[float] = []
    for n in rows:
        if len(first) >= FEWEST and sum(first) > PATIENCE:
            break
        first.append(run(n))
    rows = rows[: len(first)]
    sweeps: list[list[float]] = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        sweeps.append([run(n) for n in reversed(rows)][::-1])
        sweeps.append([run(n) for n in rows])
    times = np.log(sweeps or [first])
    levels = times.mean(1, keepdims=True)
    return StepCost(rows, np.exp(np.median(times - levels, axis=0) + np.median(levels)))


def cached_cost(host: Host, context: int = BANDS[0]) -> StepCost:
    """The curve of `host` behind about `context` tokens, from memory or disk if this machine has measured it before."""
    band = max((band for band in BANDS if band <= context), default=BANDS[0])
    key = torch.get_num_threads(), band
    if key not in host.costs:
        host.costs[key] = _from_disk(host, band)
    return host.costs[key]


def _from_disk(host: Host, band: int) -> StepCost:
    path = _cache_folder() / f"{_key(host, band)}.json"
    try:
        held = json.loads(path.read_text())
        cost = StepCost(held["rows"], held["seconds"])
        if _still_true(host, cost, band):
            return cost
    except (OSError, ValueError, KeyError, TypeError):
        pass  # none yet, or a damaged one: measured again and written over
    cost = measure_cost(host, context=band)
    for _ in range(TRIES - 1):
        if _plausible(cost):
            break
        cost = measure_cost(host, context=band)
    if not _plausible(cost):  # good enough for this process, and nothing to hand on to others
        return StepCost(cost.rows, np.minimum(cost.seconds, cost.rows * cost.seconds[0]))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"rows": cost.rows.tolist(), "seconds": cost.seconds.tolist()}, file)
        Path(file.name).replace(path)
    except OSError:
        pass  # a read-only home costs a measurement per process, nothing more
    return cost


def _still_true(host: Host, cost: StepCost, band: int) -> bool:
    """Whether a few steps agree with the curve's shape: it may have been measured beside a busy process."""
    if not _plausible(cost):
        return False
    if cost.of(CHECKED[-1]) > CHECK_MOST or cost.rows[-1] < CHECKED[-1]:
        return True
    now = measure_cost(host, 4 * float(cost.of(CHECKED[-1])), CHECKED, band)
    few, many = now.of(CHECKED) / cost.of(CHECKED)
    return bool(1 / AGREES < few / many < AGREES)


def _plausible(cost: StepCost) -> bool:
    """Whether rows together take less than twice what each takes alone.

    Where several threads share a pass of many rows and another process is busy, they wait for each other: a thousand
    times as long as a row that one thread passes. Such a curve would forbid all guesses for good.
    """
    return bool((cost.seconds <= 2 * cost.rows * cost.seconds[0]).all())


def _cache_folder() -> Path:
    home = os.environ.get("DRAFTREE_CACHE")
    return Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "draftree"


def _key(host: Host, band: int = BANDS[0]) -> str:
    target = host.target
    device = target.device
    chip = chip_name(device)
    shape = {
        k: v for k, v in sorted(target.config.to_dict().items()) if isinstance(v, int | float) or k == "model_type"
    }
    facts = [
        FORMAT,
        host.form,
        shape,
        str(target.dtype),
        str(device),
        chip,
        torch.get_num_threads(),
        torch.__version__,
        band,
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def chip_name(device: torch.device) -> str:
    """The GPU or processor behind `device` by its maker's name, where the system tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration, IndexError):
        return platform.processor() or platform.machine()
