"""Steps of some rows, draftree's and Hugging Face's, timed in turns, and the speed of the memory.

A step reads every weight once, however few its rows, so no step is faster than the weights' bytes at the memory's
bandwidth. Steps are timed as they follow each other in decoding: some of the same kind go before each timed one, so
that what the caches hold of a small model is there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks.harness.kit import EAGER, GRAPHS
from benchmarks.harness.kit import PLAIN as LOOP
from draftree.bench.measure import Task, measure
from draftree.bench.methods import Answer, Method
from draftree.prompts import Prompt, Watcher
from draftree.runner import Runner, inspect_model
from draftree.runner.plan import Plan
from draftree.runner.weights.packed import in_16_bits

HF = "hf-forward"
LABELS = {HF: "HF forward", LOOP: "draftree", EAGER: "draftree, eager", GRAPHS: "draftree, CUDA graphs"}
BUFFER = 256 * 2**20  # bytes, far beyond any cache
SETTLING, LONG = 10, 0.02  # most steps before a timed one, and seconds of them that are enough


@dataclass(frozen=True, slots=True)
class Steps:
    """Timed steps of a model."""

    # For each method (its label) and number of rows the method's `name`, `ms` (median), `over_one_row`, `floor_share`
    # (the floor over the median) and `samples` (seconds).
    rows: list[dict[str, Any]]
    floor: dict[str, float]  # `weight_bytes` of a step, `bandwidth` (bytes a second) and `seconds`, their quotient


def time_rows(
    model: Any,
    runners: Mapping[str, tuple[Runner, Sequence[int]]],
    context: int,
    rounds: int,
    watcher: Watcher,
    *,
    batch: int = 1,
) -> Steps:
    """Time steps of some rows behind `context` tokens, in turns; Hugging Face's with as many rows as those of `LOOP`.

    `runners` are those of a decoder-only model by their names in `LABELS`, each with the rows to time it with, 1 among
    them; each is timed `rounds` times, with `batch` texts of that context and so many rows.
    """
    counts = runners[LOOP][1]
    size = (batch, max(context, *counts))
    vocabulary = min(1000, runners[LOOP][0].target.vocab_size)
    tokens = torch.randint(0, vocabulary, size, generator=torch.Generator().manual_seed(0)).to(model.device)
    memory = Bandwidth(model.device)
    kinds = {HF: (_hf_steps(model, tokens, context), counts)}
    for name, (own, some) in runners.items():
        kinds[name] = _own_steps(own, tokens, context, max(some)), some
    methods = [_Rows(f"{name}, {n}", step, n, model.device) for name, (step, some) in kinds.items() for n in some]
    watcher.stage("steps", rounds * (1 + len(methods)))
    times: dict[str, list[float]] = {}
    for sample in measure([memory, *methods], [Task(Prompt("", "", ""), [])], rounds, watcher):
        times.setdefault(sample.method, []).append(sample.answer.seconds)
    read = weight_bytes(model)
    floor = {"weight_bytes": float(read), "bandwidth": memory.best, "seconds": read / memory.best}
    found = []
    for name, (_, some) in kinds.items():
        one = statistics.median(times[f"{name}, 1"])
        for n in some:
            samples = times[f"{name}, {n}"]
            median = statistics.median(samples)
            facts = {"rows": n, "method": LABELS[name], "name": name, "ms": 1000 * median, "over_one_row": median / one}
            found.append(facts | {"floor_share": floor["seconds"] / median, "samples": samples})
    return Steps(found, floor)


class _Rows(Method):
    """Steps of one kind with so many rows, timed in place of answers."""

    def __init__(self, name: str, step: Callable[[int], None], rows: int, device: torch.device) -> None:
        super().__init__(name)
        self._step, self._device = partial(step, rows), device

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        settle(self._step, clock_of(self._device))
        return [Answer([], timed(self._step, self._device))]


def settle(step: Callable[[], Any], clock: Callable[[], float]) -> None:
    """Take a step until the caches hold what it leaves there: some times, or once where it takes long."""
    begin = clock()
    for _ in range(SETTLING):
        step()
        if clock() - begin > LONG:
            break


class Bandwidth(Method):
    """Bytes a second that torch's threads move to or from the memory of `device`, sampled between timed steps."""

    def __init__(self, device: torch.device) -> None:
        super().__init__("memory")
        self._device = device
        self._source = torch.empty(BUFFER // 4, device=device).fill_(1.0)
        self._copied = torch.empty_like(self._source).zero_()
        self._copying: list[float] = []
        self._summing: list[float] = []

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        return [Answer([], self.sample())]

    def sample(self) -> float:
        """Copy a large buffer, and sum it; returns the seconds of both."""
        size = self._source.nbytes
        copying = timed(lambda: self._copied.copy_(self._source), self._device)
        summing = timed(self._source.sum, self._device)
        self._copying.append(2 * size / copying)
        self._summing.append(size / summing)
        return copying + summing

    @property
    def best(self) -> float:
        """Return the median of the faster of both."""
        return max(statistics.median(self._copying), statistics.median(self._summing))


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a step reads at least: all but the embedding, of which it takes rows; a tied head counts.

    Matrices in float32 whose numbers 16 bits hold count as such, since the runner for a CPU reads them so.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    read = [weight.detach() for weight in model.parameters() if weight is head or weight is not embedding]
    return sum(int((in_16_bits(weight) if weight.dim() == 2 else weight).nbytes) for weight in read)


def check_context(context: int, most: int, model: Any) -> None:
    """Raise a ValueError for a context that leaves no room for `most` rows in the model's positions."""
    limit = inspect_model(model).max_positions
    if limit is not None and context + most > limit:
        raise ValueError(
            f"A context of {context} and {most} rows do not fit the model's {limit} positions: give a shorter one."
        )


def clock_of(device: torch.device) -> Callable[[], float]:
    """CPU time where one thread does everything: it does not count the time of other processes."""
    return time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def timed(step: Callable[[], Any], device: torch.device) -> float:
    """Return seconds that `step` takes on `device`, whose queue is empty before and after."""
    clock, wait = clock_of(device), (lambda _: None) if device.type == "cpu" else torch.accelerator.synchronize
    wait(device)
    start = clock()
    step()
    wait(device)
    return clock() - start


def _hf_steps(model: Any, tokens: Tensor, context: int) -> Callable[[int], None]:
    cache = DynamicCache()
    held: dict[str, Any] = {inspect_model(model).cache_argument: cache, "use_cache": True}
    with torch.no_grad():
        model(tokens[:, :context], logits_to_keep=1, **held)

    @torch.no_grad()
    def step(rows: int) -> None:
        model(tokens[:, :rows], **held)
        cache.crop(context - cache.get_seq_length())  # a negative number of tokens: so many are taken away

    return step


def _own_steps(runner: Runner, tokens: Tensor, context: int, most: int) -> Callable[[int], None]:
    tokens = tokens.to(runner.plan_device)
    cache = runner.new_cache(len(tokens), context + most)
    result = runner.run(Plan.causal(tokens[:, :context]), cache)
    cache.commit([list(range(context))] * len(tokens), result.segments)

    def step(rows: int) -> None:
        runner.run(Plan.causal(tokens[:, :rows], context), cache)

    return step
