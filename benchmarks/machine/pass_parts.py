"""The inside of a pass of the compiled layers, by timing its parts one by one.

The layers are one call, which no clock can look into. So the same C functions are called one by one, after the same
context, in turns with the whole pass: all layers without embedding and head; each layer's two halves around its
attention; each matrix product alone; the head. Attention is what the layers take beyond their halves, and what lies
between products (norms, rotary angles, gating, sums) what the halves take beyond their products. Reaching C from here
costs some microseconds a call, which is measured by calls that do nothing and taken off.

This file alone depends on the insides of the compiled runner.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks.harness import Experiment, Setup, bars, table_of
from draftree.bench.steps import Bandwidth, clock_of, settle
from draftree.progress import Watcher
from draftree.runner import Runner, open_runner
from draftree.runner.cpu.layers import CompiledAngles, CompiledStack
from draftree.runner.cpu.packed import Packed
from draftree.runner.cpu.runner import CpuRunner
from draftree.runner.layout.kinds import limits
from draftree.runner.plan import Plan, Segment

ROWS = (1, 8, 16)
SIDE = 1024  # of the large matrices whose product gives the peak
NARROW, TALL = 512, 4096  # of the product that reads a matrix of 1 MiB again and again
PARTS = ("embed", "linear", "attention", "between", "head")


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Microseconds of a pass by part; and what bytes or operations of a part take at least."""
    found = pass_parts(open_runner(setup.model), setup["context"], setup["rounds"], setup.watcher)
    if found is None:
        raise ValueError("This model's layers are not compiled, or do not see all of a context: take another model.")
    rows = []
    for one in found["passes"]:
        rows.append({name: 1e6 * one[name] if name != "rows" else one[name] for name in ("rows", *PARTS, "whole")})
        rows[-1] |= {f"{name}_least": 1e6 * seconds for name, seconds in one["floors"].items()}
    remark = (
        f"{found['bandwidth'] / 1e9:.1f} GB/s, {found['peak'] / 1e9:.0f} billion operations a second, after "
        f"{setup['context']} tokens."
    )
    yield table_of(rows, remarks=[remark])


class Peak:
    """Floating-point operations a second in float32, sampled in turns with what is compared with it.

    The better of torch's product of two large matrices, and the compiled one of `TALL` rows with a matrix that stays in
    the caches: a library may not know the processor, and then a step is faster than its peak.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._clock = clock_of(torch.device("cpu"))
        self._a, self._b = torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE)
        self._held = Packed([torch.nn.Linear(NARROW, NARROW, bias=False)])
        self._rows, self._out = torch.ones(TALL, NARROW), torch.empty(TALL, NARROW)
        given = self._held.described, self._rows.data_ptr(), TALL, torch.get_num_threads(), 0, self._out.data_ptr()
        self._compiled = partial(library.layer_product, *given)
        self._samples: dict[str, list[float]] = {"torch": [], "compiled": []}

    def sample(self) -> None:
        """Multiply by both."""
        ways: dict[str, tuple[int, Callable[[], Any]]] = {
            "torch": (2 * SIDE**3, lambda: torch.mm(self._a, self._b)),
            "compiled": (2 * TALL * NARROW**2, self._compiled),
        }
        for name, (operations, way) in ways.items():
            start = self._clock()
            way()
            self._samples[name].append(operations / (self._clock() - start))

    @property
    def best(self) -> float:
        """The median of the faster way."""
        return max(statistics.median(samples) for samples in self._samples.values())


@dataclass(frozen=True, slots=True)
class _Work:
    """What a part of a pass has to read and to compute at least."""

    bytes_read: float
    operations: float


class _Inside:
    """The parts of a pass of `rows` rows after `context` tokens, each as a call without arguments."""

    def __init__(self, runner: CpuRunner, stack: CompiledStack, rows: int, context: int, tokens: Tensor) -> None:
        self._runner, self._library, self._stack, self._rows = runner, runner._library, stack, rows
        cache = self._cache = runner.new_cache(1, context + rows)
        square = torch.ones(1, context, context, dtype=torch.bool).tril()
        result = runner.run(Plan(tokens[:, :context], torch.arange(context)[None], square), cache)
        cache.commit([list(range(context))], result.segments)
        positions = context + torch.arange(rows)[None]
        self._plan = Plan(tokens[:, :rows].contiguous(), positions, torch.ones(1, rows, rows, dtype=torch.bool).tril())
        cache.open(0, 1, rows)
        segment = Segment(0, None, positions, self._plan.visible)
        looked_up = runner.tables.of(segment, (), torch.float32, cache, runner.target.kinds[0])
        angles = self._angles = CompiledAngles(looked_up, segment, stack)
        self._first = runner._embedding(self._plan.tokens).detach().clone()
        self._x = self._first.clone()
        layers, threads = stack.layers, stack.threads(rows)
        kv, groups, dim = layers[0].parts.heads
        widest = max(m.described.outputs for layer in layers for m in layer._packed)
        self._out = torch.empty(rows, widest)
        self._query = torch.zeros(1, kv, groups * rows, dim)
        given = {m.described.inputs: torch.zeros(rows, m.described.inputs) for layer in layers for m in layer._packed}
        self._given = given
        matrices = [m.described for layer in layers for m in layer._packed]
        out = self._out.data_ptr()
        self._products = [(m, given[m.inputs].data_ptr(), rows, threads, 0, out) for m in matrices]
        self._nothing = [(m, given[m.inputs].data_ptr(), 0, 1, 0, out) for m in matrices]
        of_pass, x, query = angles.described, self._x.data_ptr(), self._query.data_ptr()
        self._halves = []
        for index, layer in enumerate(layers):
            keys, values = cache.stores(index, kv, (dim, dim), self._x)
            enter = (layer._described, of_pass, x, query, keys.data_ptr(), values.data_ptr())
            leave = (layer._described, of_pass, query, kv * groups * rows * dim, groups * rows * dim, dim, x)
            self._halves.append((enter, leave))
        weights = 4.0 * sum(m.inputs * m.outputs for m in matrices)
        seen = context + (rows + 1) / 2
        context_bytes = 8.0 * len(layers) * kv * dim * context
        head = runner._head._packed.described
        self.work = {
            "linear": _Work(weights, weights / 2 * rows),
            "attention": _Work(context_bytes, 4.0 * len(layers) * kv * groups * dim * rows * seen),
            "head": _Work(4.0 * head.inputs * head.outputs, 2.0 * head.inputs * head.outputs * rows),
        }

    def calls(self) -> dict[str, Callable[[], Any]]:
        """By name, what is timed."""
        product, enter, leave = (getattr(self._library, f"layer_{name}") for name in ("product", "enter", "leave"))

        def halves() -> None:
            for entering, leaving in self._halves:
                enter(*entering)
                leave(*leaving)

        def products() -> None:
            for call in self._products:
                product(*call)

        def nothing() -> None:
            for call in self._nothing:
                product(*call)

        return {
            "whole": lambda: self._runner.run(self._plan, self._cache),
            "layers": lambda: self._stack.run(0, len(self._stack.layers), self._x, self._angles),
            "halves": halves,
            "products": products,
            "nothing": nothing,
            "head": lambda: self._runner._head(self._x),
        }

    def again(self) -> None:
        """Put the hidden states back to what the layers begin with."""
        self._x.copy_(self._first)


def pass_parts(runner: Runner, context: int, rounds: int, watcher: Watcher) -> dict[str, Any] | None:
    """Seconds of a pass by its parts, with floors; None where layers are not compiled, or do not see all of a context.

    Args:
        runner: of the model.
        context: tokens before the rows.
        rounds: how often each part is timed; medians are returned.
        watcher: shows how far it is.

    Returns
    -------
    `bandwidth` (bytes a second), `peak` (operations a second) and `passes`: for each number of rows the `whole`, the
    parts in `PARTS`, and `floors` of some of them, the larger of what bytes and operations take.
    """
    if not isinstance(runner, CpuRunner) or runner._cap is not None:
        return None
    if any(limits(kind, context + ROWS[-1]) for kind in runner.target.kinds):
        return None
    size = (1, max(context, ROWS[-1]))
    tokens = torch.randint(0, runner.target.vocab_size, size, generator=torch.Generator().manual_seed(0))
    clock, memory = clock_of(torch.device("cpu")), Bandwidth(torch.device("cpu"))
    peak = Peak(runner._library)
    watcher.stage("parts of passes", rounds + 1)
    with torch.inference_mode():
        insides = {rows: _Inside(runner, runner.stack, rows, context, tokens) for rows in ROWS}
        times: dict[tuple[int, str], list[float]] = {}
        for number in range(rounds + 1):
            memory.sample()
            peak.sample()
            for rows, inside in insides.items():
                calls = inside.calls()
                for name, call in calls.items():
                    settle(calls["whole"] if name == "head" else call, clock)
                    if name == "head":  # a large model's is out of the caches again when the layers are through
                        calls["layers"]()
                    inside.again()
                    start = clock()
                    call()
                    elapsed = clock() - start
                    if number:  # the first round finds nothing in place
                        times.setdefault((rows, name), []).append(elapsed)
            watcher.step()
    medians = {key: statistics.median(seconds) for key, seconds in times.items()}
    passes = []
    for rows, inside in insides.items():
        took = {name: medians[rows, name] for name in inside.calls()}
        a_call = took["nothing"] / len(inside._nothing)
        halves, linear = took["halves"] - 2 * a_call * len(inside._halves), took["products"] - took["nothing"]
        parts = {
            "embed": took["whole"] - took["layers"] - took["head"],
            "linear": linear,
            "attention": took["layers"] - halves,
            "between": halves - linear,
            "head": took["head"],
        }
        floors = {
            name: max(work.bytes_read / memory.best, work.operations / peak.best) for name, work in inside.work.items()
        }
        passes.append({"rows": rows, "whole": took["whole"]} | parts | {"floors": floors})
    return {"bandwidth": memory.best, "peak": peak.best, "context": context, "passes": passes}


EXPERIMENT = Experiment(
    "pass-parts",
    "",
    run,
    ("rows", *PARTS, "whole", "linear_least", "attention_least", "head_least"),
    bars(*PARTS[1:4], "whole", label="rows", mark=None),
    {"context": 128, "rounds": 20},
)
