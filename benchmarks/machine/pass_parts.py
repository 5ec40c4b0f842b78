"""The inside of a pass of the compiled layers, by timing its parts one by one.

The layers are one call, which no clock can look into. So the same C functions are called one by one, after the same
context, in turns with the whole pass: all layers without embedding and head; each layer's two halves around its
attention; each matrix product alone; the head. Attention is what the layers take beyond their halves, and what lies
between products (norms, rotary angles, gating, sums) what the halves take beyond their products. A call from here
costs about a microsecond, which counts in parts of small models alone.

This file alone depends on the insides of the compiled runner.
"""

from __future__ import annotations

import ctypes
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks.harness import Experiment, Setup, bars, table_of
from draftree.bench.steps import Bandwidth, clock_of, settle
from draftree.progress import Watcher
from draftree.runner import Runner, open_runner
from draftree.runner.cpu.layers import CompiledAngles
from draftree.runner.cpu.runner import CpuRunner
from draftree.runner.layout.kinds import limits
from draftree.runner.plan import Plan, Segment
from draftree.runner.weights.packed import Packed

ROWS = (1, 8, 16)
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
    """The compiled product's operations a second in float32, of `TALL` rows with a matrix that stays in the caches."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._matrix = Packed([torch.nn.Linear(NARROW, NARROW, bias=False)])
        self._rows, self._out = torch.ones(TALL, NARROW), torch.empty(TALL, NARROW)
        self._laid, self._library = torch.empty_like(self._rows), library
        self._seconds: list[float] = []

    def sample(self) -> None:
        """Multiply once."""
        clock, threads = clock_of(torch.device("cpu")), torch.get_num_threads()
        start = clock()
        self._library.layer_product(
            *(self._matrix.described, self._rows.data_ptr(), TALL, threads, 0),
            *(self._laid.data_ptr(), self._out.data_ptr()),
        )
        self._seconds.append(clock() - start)

    @property
    def best(self) -> float:
        """The median."""
        return 2 * TALL * NARROW**2 / statistics.median(self._seconds)


class _Inside:
    """A pass of `rows` rows after `context` tokens."""

    def __init__(self, runner: CpuRunner, rows: int, context: int, tokens: Tensor) -> None:
        stack, library = runner.stack, runner._library
        cache = runner.new_cache(1, context + rows)
        result = runner.run(Plan.causal(tokens[:, :context]), cache)
        cache.commit([list(range(context))], result.segments)
        plan = Plan.causal(tokens[:, :rows].contiguous(), context)
        cache.open(0, 1, rows)
        segment = Segment(0, None, plan.positions, plan.visible)
        looked_up = runner.tables.of(segment, (), torch.float32, cache, runner.target.kinds[0])
        angles = CompiledAngles(looked_up, segment, stack)
        self._first = runner._enter(plan).detach().clone()
        self._x = x = self._first.clone()
        layers, threads = stack.layers, stack.threads(rows)
        kv, groups, dim = layers[0].parts.heads
        matrices = [m.described for layer in layers for m in layer._packed]
        inputs = {m.inputs: torch.zeros(rows, m.inputs) for m in matrices}
        out = torch.empty(rows, max(m.outputs for m in matrices))
        query = torch.zeros(1, kv, groups * rows, dim)
        laid = torch.empty(rows, max(inputs))
        self._held = inputs, out, query, cache, laid  # whose addresses the calls have
        given = rows, threads, 0, laid.data_ptr(), out.data_ptr()
        products = [(m, inputs[m.inputs].data_ptr(), *given) for m in matrices]
        halves = []
        for index, layer in enumerate(layers):
            keys, values = cache.stores(index, kv, (dim, dim), x)
            into = (layer._described, angles.described)
            enter = (*into, x.data_ptr(), query.data_ptr(), keys.data_ptr(), values.data_ptr())
            strides = (kv * groups * rows * dim, groups * rows * dim, dim)
            halves.append((enter, (*into, query.data_ptr(), *strides, x.data_ptr())))

        def run_halves() -> None:
            for enter, leave in halves:
                library.layer_enter(*enter)
                library.layer_leave(*leave)

        def run_products() -> None:
            for product in products:
                library.layer_product(*product)

        self.calls: dict[str, Callable[[], Any]] = {  # its parts, by name
            "whole": lambda: runner.run(plan, cache),
            "layers": lambda: stack.run(0, len(layers), x, angles),
            "halves": run_halves,
            "products": run_products,
            "head": lambda: runner._head(x),
        }
        count, seen = sum(m.inputs * m.outputs for m in matrices), context + (rows + 1) / 2
        size, of_head = (packed._panels.element_size() for packed in (layers[0]._packed[0], runner._head._packed))
        attended, head = len(layers) * kv * dim, runner._head._packed.described
        self.least = {  # bytes that a part reads and operations that it computes at least, by its name
            "linear": (size * count, 2.0 * count * rows),
            "attention": (8.0 * attended * context, 4.0 * attended * groups * rows * seen),
            "head": (of_head * head.inputs * head.outputs, 2.0 * head.inputs * head.outputs * rows),
        }

    def again(self) -> None:
        """Put the hidden states back to what the layers begin with."""
        self._x.copy_(self._first)


def pass_parts(runner: Runner, context: int, rounds: int, watcher: Watcher) -> dict[str, Any] | None:
    """Seconds of a pass by its parts, with floors; None where layers are not compiled, or do not see all of a context.

    Each part is timed `rounds` times behind `context` tokens, and medians are returned: `bandwidth` (bytes a second),
    `peak` (operations a second) and `passes`: for each number of rows the `whole`, the parts in `PARTS`, and `floors`
    of some of them, the larger of what bytes and operations take.
    """
    if not isinstance(runner, CpuRunner) or runner._cap is not None:
        return None
    if any(limits(kind, context + ROWS[-1]) for kind in runner.target.kinds):
        return None
    size = (1, max(context, ROWS[-1]))
    tokens = torch.randint(0, runner.target.vocab_size, size, generator=torch.Generator().manual_seed(0))
    clock, memory, peak = clock_of(torch.device("cpu")), Bandwidth(torch.device("cpu")), Peak(runner._library)
    watcher.stage("parts of passes", rounds + 1)
    times: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    with torch.inference_mode():
        insides = {rows: _Inside(runner, rows, context, tokens) for rows in ROWS}
        for number in range(rounds + 1):
            memory.sample()
            peak.sample()
            for rows, inside in insides.items():
                for name, call in inside.calls.items():
                    settle(inside.calls["whole"] if name == "head" else call, clock)
                    if name == "head":  # a large model's is out of the caches again when the layers are through
                        inside.calls["layers"]()
                    inside.again()
                    start = clock()
                    call()
                    elapsed = clock() - start
                    if number:  # the first round finds nothing in place
                        times[rows, name].append(elapsed)
            watcher.step()
    passes = []
    for rows, inside in insides.items():
        took = {name: statistics.median(times[rows, name]) for name in inside.calls}
        parts = {
            "embed": took["whole"] - took["layers"] - took["head"],
            "linear": took["products"],
            "attention": took["layers"] - took["halves"],
            "between": took["halves"] - took["products"],
            "head": took["head"],
        }
        floors = {name: max(read / memory.best, done / peak.best) for name, (read, done) in inside.least.items()}
        passes.append({"rows": rows, "whole": took["whole"]} | parts | {"floors": floors})
    return {"bandwidth": memory.best, "peak": peak.best, "context": context, "passes": passes}


EXPERIMENT = Experiment(
    run,
    ("rows", *PARTS, "whole", "linear_least", "attention_least", "head_least"),
    bars(*PARTS[1:4], "whole", label="rows", mark=None),
    {"context": 128, "rounds": 20},
    name="pass-parts",
)
