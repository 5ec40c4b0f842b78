"""A small model that runs ahead of its text in one call: a row a request and step, each the best token of the last.

What a drafter asks of its own model is a handful of steps that each take less time than a call. `_ahead.h` makes them
one after the other; what comes back is what may follow each row.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int64, c_uint8, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftree.native import address
from draftree.runner.cpu.layers import LANES, CompiledHead, CompiledStack, _Pass
from draftree.runner.kv.cache import SlotCache
from draftree.runner.layout.skip import Skip


@dataclass(frozen=True, slots=True)
class AheadPlan:
    """What is asked of a run ahead: a row a request and step, as `Plan` is of a pass.

    Attributes:
        positions: [B], of each request's first row.
        given: tokens that each request reads before it goes on by itself; one or more, of any number for those that do
            not take part.
        steps: most of them, given tokens included.
        best: K, tokens told of what may follow each row.
        least: log-probability that the path of at least one request must have for another step; what follows given
            tokens is certain.
        each: log-probability that a token must have by itself for its path to be followed.
        ends: token ids behind which a path is not followed.
        taking_part: [B], False for requests whose rows do not matter; empty where all take part.
        skip: what all rows leave out, as in `Plan`.

    Raises:
        ValueError: numbers of requests that differ, a request that takes part with nothing to read, or less than one
            step or token told.
    """

    positions: Sequence[int]
    given: Sequence[Sequence[int]]
    steps: int
    best: int = 1
    least: float = -math.inf
    each: float = -math.inf
    ends: Sequence[int] = ()
    taking_part: Sequence[bool] = ()
    skip: Skip | None = None

    def __post_init__(self) -> None:
        batch = len(self.given)
        if not batch or len(self.positions) != batch or len(self.taking_part) not in (0, batch):
            raise ValueError(
                f"A run ahead of {batch} requests has {len(self.positions)} positions and {len(self.taking_part)} "
                "marks of who takes part: give one of each for every request, or no marks where all take part."
            )
        if not all(own or not part for own, part in zip(self.given, self.parts, strict=True)):
            raise ValueError("A request that runs ahead has no token to begin with: give each at least one.")
        if self.steps < 1 or self.best < 1:
            raise ValueError(f"steps is {self.steps} and best is {self.best}: give at least 1 of each.")

    @property
    def batch(self) -> int:
        """B, how many requests."""
        return len(self.given)

    @property
    def parts(self) -> Sequence[bool]:
        """[B], who takes part."""
        return self.taking_part or [True] * self.batch


class _Ahead(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("layers", "keys", "values")),
        ("count", c_int64),
        *((name, c_void_p) for name in ("embedding", "norm", "cosines", "sines", "head", "ends")),
        *((name, c_int64) for name in ("end_count", "last_position", "best")),
        *((name, c_float) for name in ("epsilon", "least", "each")),
        ("cross", c_void_p),
    )


class Course(NamedTuple):
    """What may follow each row of a run ahead.

    Attributes:
        tokens: by request and step made, K tokens, the likeliest first.
        logp: their log-probabilities there.
    """

    tokens: list[list[list[int]]]
    logp: list[list[list[float]]]


class Scratch:
    """Memory that a thread writes over with every call."""

    def __init__(self) -> None:
        self._held = threading.local()

    def floats(self, count: int) -> int:
        """Address of so many floats of this thread's."""
        held: Tensor | None = getattr(self._held, "floats", None)
        if held is None or held.numel() < count:
            with torch.inference_mode(False):
                held = self._held.floats = torch.empty(count, dtype=torch.float32, device="cpu")
        return address(held, torch.float32)


def prepared(library: Any) -> Any:
    """The library, its call described."""
    library.layer_ahead.restype = c_int64
    library.layer_ahead.argtypes = [POINTER(_Ahead), POINTER(_Pass), c_void_p, c_void_p, c_int64, *[c_void_p] * 4]
    return library


def go(library: Any, ahead: _Ahead, p: _Pass, plan: AheadPlan, work: int) -> Course:
    """Make the steps of `plan`; `work` is the address of the memory that C asks for."""
    batch, steps, best = plan.batch, plan.steps, plan.best
    read: list[int] = []
    for own in plan.given:
        row = list(own[:steps]) or [0]
        read += row + [-1] * (steps - len(row))
    stops = (c_int64 * max(len(plan.ends), 1))(*plan.ends)
    ahead.ends, ahead.end_count = ctypes.addressof(stops), len(plan.ends)
    ahead.best, ahead.least, ahead.each = best, plan.least, plan.each
    paths = (c_float * batch)(*(0.0 if part else -math.inf for part in plan.parts))
    places, rows = (c_int64 * batch)(*plan.positions), (c_int64 * len(read))(*read)
    tokens, logp = (c_int64 * (steps * batch * best))(), (c_float * (steps * batch * best))()
    made = library.layer_ahead(ahead, p, places, rows, steps, paths, work, tokens, logp)
    begins = [[(s * batch + b) * best for s in range(made)] for b in range(batch)]
    return Course(
        [[tokens[i : i + best] for i in of_request] for of_request in begins],
        [[logp[i : i + best] for i in of_request] for of_request in begins],
    )


class ChainRunner:
    """Runs the layers of a compiled stack ahead.

    Plain ctypes throughout: behind a pass of the large model all code is out of the processor's caches, and then the
    few microseconds of an array operation are many.

    Args:
        library: the compiled functions.
        stack: all layers, or those that rows do not leave out.
        head: final norm and head.
        embedding: float32 [V, d], contiguous.
    """

    def __init__(self, library: ctypes.CDLL, stack: CompiledStack, head: CompiledHead, embedding: Tensor) -> None:
        self._library, self._scratch = prepared(library), Scratch()
        self._stack, self._head, self._embedding = stack, head, embedding

    def run(self, plan: AheadPlan, cache: SlotCache, tables: tuple[Tensor, Tensor]) -> Course:
        """See `Runner.run_ahead`; `cache` is open for them, `tables` are cosines and sines by position."""
        batch = plan.batch
        matrix = self._head._packed.described
        hidden, dim, threads = matrix.inputs, self._stack.dim, self._stack.threads(batch)
        starts = cache.starts
        scratch = batch * self._stack.scratch
        scores = threads * (2 * dim + max(starts) + plan.steps) * LANES
        angles = self._scratch.floats(2 * batch * dim + scratch + scores + batch * (2 * hidden + matrix.outputs))
        at = angles + 8 * batch * dim
        visible = (c_uint8 * batch)(*[1] * batch)
        p = _Pass(
            *(batch, 1, cache.first, cache.capacity, (c_int64 * batch)(*starts)),
            *(angles, angles + 4 * batch * dim, at, threads, cache.prefix_length, 0),
            *(ctypes.addressof(visible), None, at + 4 * scratch),
        )
        return go(self._library, self._ahead(cache, tables), p, plan, at + 4 * (scratch + scores))

    def _ahead(self, cache: SlotCache, tables: tuple[Tensor, Tensor]) -> _Ahead:
        """What runs over the same cache share."""
        known = cache.notes.get(self)
        if known is not None and known[0] is tables[0]:
            found: _Ahead = known[1]
            return found
        like, (weight, epsilon) = self._embedding, self._head._norm
        keys, values = self._stack.stores(cache, like)
        ahead = _Ahead(
            *(ctypes.addressof(self._stack._described), ctypes.addressof(keys), ctypes.addressof(values), len(keys)),
            *(address(part, torch.float32) for part in (like, weight, *tables)),
            ctypes.addressof(self._head._packed.described),
            last_position=len(tables[0]) - 1,
            epsilon=epsilon,
        )
        cache.notes[self] = tables[0], ahead, (keys, values)
        return ahead


def chain_runner_of(library: Any, stack: CompiledStack | None, head: Any, embedding: Any) -> ChainRunner | None:
    """A chain where all that it needs is compiled and plain."""
    if stack is None or not isinstance(head, CompiledHead) or type(embedding) is not torch.nn.Embedding:
        return None
    weight = embedding.weight.detach()
    if not weight.is_contiguous() or len({layer.parts.heads.dim for layer in stack._layers}) != 1:
        return None
    return ChainRunner(library, stack, head, weight)
