"""`draftree bench inflate`: what a step costs at any size, by its rows, against the memory's speed.

A small model is inflated in memory (`draftree.bench.inflate`), the large one's answers are compared with its own, and
steps of 1 to 64 rows behind a context are timed, Hugging Face's `forward` and draftree's own interleaved. A step reads
every weight once, however few its rows: no step is faster than the weights' bytes at the memory's bandwidth, which is
measured here too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from draftree.bench.equality import difference
from draftree.bench.harness import Watcher
from draftree.bench.inflate import inflate
from draftree.bench.machine import describe, now
from draftree.bench.models import encode_prompt
from draftree.bench.prompts import Prompt, take_per_set
from draftree.bench.sizes import Size
from draftree.engine.generate import generate
from draftree.runner import Runner, open_runner
from draftree.runner.plan import Plan

ROWS = (1, 2, 4, 8, 16, 32, 64)
HF, LOOP = "hf_forward", "draftree_loop"
FORM_LABELS = {
    "draftree_tensors": "draftree, tensors",
    "draftree_captured": "draftree, captured",
}
LABELS = {HF: "HF forward", LOOP: "draftree, eager runner", **FORM_LABELS}
BUFFER = 256 * 2**20  # bytes, far beyond any cache


@dataclass(frozen=True, slots=True)
class InflateSettings:
    """What to measure.

    Attributes:
        rounds: how often each method takes a step of each number of rows.
        context: tokens before the rows.
        prompts: how many are answered by both models, to see that they are equal.
        max_new_tokens: most tokens of such an answer.
    """

    rounds: int = 7
    context: int = 128
    prompts: int = 4
    max_new_tokens: int = 24


@dataclass(frozen=True, slots=True)
class InflateResult:
    """A finished run.

    Attributes:
        about: commit, device, dtype, threads, command, versions, times, settings, the model's size.
        equality: of the two models, see `compare_models`.
        floor: `weight_bytes` of a step, `bandwidth` (bytes a second) and `seconds`, their quotient.
        rows: for each method and number of rows the median and fastest seconds of a step and all of them, the median
            over that of one row, and the floor over the median.
    """

    about: dict[str, Any]
    equality: dict[str, Any]
    floor: dict[str, float]
    rows: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; every row says where it was made."""
        made = {key: self.about[key] for key in ("commit", "device", "dtype", "threads", "command")}
        return asdict(self) | {"rows": [row | made for row in self.rows]}


def run_inflate(
    small: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    settings: InflateSettings,
    *,
    params: str | None = None,
    shape: str | None = None,
    dtype: torch.dtype | None = None,
    device: str | None = None,
    name: str | None = None,
    watcher: Watcher | None = None,
) -> InflateResult:
    """Inflate `small` and measure.

    Args:
        small: the model to inflate, on the CPU.
        tokenizer: its tokenizer.
        prompts: to compare the two models on; the first of every set in turn.
        settings: see there.
        params, shape, dtype, device: of the large model, see `inflate`.
        name: of the small model, None for the embedded one.
        watcher: hears how far it is.

    Raises:
        ValueError: a size that cannot be made, or a context beyond the model's.
    """
    limit = int(small.config.max_position_embeddings)
    if settings.context + ROWS[-1] > limit:
        raise ValueError(
            f"A context of {settings.context} and {ROWS[-1]} rows do not fit the model's {limit} positions: give a "
            "shorter one."
        )
    watcher, started = watcher or Watcher(), now()
    watcher.stage("inflating", None)
    large = inflate(small, params, shape=shape, dtype=dtype, device=device)
    size = Size.of(large.config)
    runner = open_runner(large, "auto")
    about = describe(large, name) | {"started": started}
    about["model"] += f" inflated to {params or shape}"
    chosen = take_per_set([p for p in prompts if not p.warm], 1)[: settings.prompts]
    watcher.stage("comparing answers", len(chosen))
    equality = compare_models(small, large, [encode_prompt(tokenizer, p.text) for p in chosen], settings, watcher)
    read = (size.parameters - size.vocab_size * size.hidden_size) * large.dtype.itemsize
    times, speed = time_steps(large, runner, settings, watcher)
    about |= {
        "finished": now(),
        "settings": asdict(settings),
        "size": asdict(size) | {"parameters": size.parameters},
        "runner": runner.form,
        "clock": "CPU time" if _clock(large.device) is time.thread_time else "time",
    }
    floor = {"weight_bytes": float(read), "bandwidth": speed, "seconds": read / speed}
    return InflateResult(about, equality, floor, _rows(times, floor["seconds"]))


@torch.no_grad()
def compare_models(
    small: Any, large: Any, prompts: Sequence[list[int]], settings: InflateSettings, watcher: Watcher
) -> dict[str, Any]:
    """How equal two models are.

    Returns
    -------
    `prompts` and `tokens` compared, `logits` (largest difference on the prompts' rows, over the small model's
    vocabulary), `spread` (their standard deviation), and `differing`: prompts where the large model's greedy answer by
    the eager runner is not Hugging Face's of the small one, with the place.
    """
    differing, worst, spread, tokens = [], 0.0, 0.0, 0
    for number, ids in enumerate(prompts):
        given = torch.tensor([ids])
        expected = small(given).logits.float()
        found = large(given.to(large.device)).logits.float().cpu()
        worst = max(worst, float((found[..., : expected.shape[-1]] - expected).abs().max()))
        spread = max(spread, float(expected.std()))
        length = settings.max_new_tokens
        answer = small.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=length, do_sample=False)
        wanted = _new(answer, ids)
        got = generate(large, given.to(large.device), max_new_tokens=length, runner="auto").sequences
        tokens += len(wanted)
        parted = difference(small, ids, wanted, _new(got, ids))
        if parted is not None:
            differing.append({"prompt": number, "where": str(parted), **parted.as_dict()})
        watcher.step()
    return {"prompts": len(prompts), "tokens": tokens, "logits": worst, "spread": spread, "differing": differing}


def _new(sequences: Tensor, ids: list[int]) -> list[int]:
    """The new tokens of the one row of `sequences`."""
    held: list[int] = sequences[0, len(ids) :].tolist()
    return held


class Bandwidth:
    """Bytes a second that torch's threads move to or from memory, sampled beside what is to be held against it.

    Args:
        device: whose memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._clock = device, _clock(device)
        self._source = torch.empty(BUFFER // 4, device=device).fill_(1.0)
        self._copied = torch.empty_like(self._source).zero_()
        self._samples: dict[str, list[float]] = {"copying": [], "summing": []}

    def sample(self) -> None:
        """Copy a large buffer, and sum it."""
        ways: dict[str, tuple[int, Callable[[], Any]]] = {
            "copying": (2, lambda: self._copied.copy_(self._source)),
            "summing": (1, lambda: self._source.sum()),
        }
        for name, (times, way) in ways.items():
            _wait(self._device)
            start = self._clock()
            way()
            _wait(self._device)
            self._samples[name].append(times * self._source.nbytes / (self._clock() - start))

    @property
    def best(self) -> float:
        """The median of the faster way."""
        return max(statistics.median(samples) for samples in self._samples.values())


def time_steps(
    large: Any, runner: Runner, settings: InflateSettings, watcher: Watcher
) -> tuple[dict[tuple[str, int], list[float]], float]:
    """Seconds of steps by method and rows, and the memory's bandwidth (bytes a second), all interleaved.

    The order of the methods turns from round to round.
    """
    device, context = large.device, settings.context
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 1000, (1, max(context, ROWS[-1])), generator=generator).to(device)
    steps = {HF: _hf_steps(large, tokens, context), LOOP: _runner_steps(runner, tokens, context)}
    clock, memory = _clock(device), Bandwidth(device)
    times: dict[tuple[str, int], list[float]] = {(name, rows): [] for name in steps for rows in ROWS}
    watcher.stage("steps", (settings.rounds + 1) * len(times))
    for number in range(settings.rounds + 1):
        names = list(steps) if number % 2 else list(steps)[::-1]
        for rows in ROWS:
            memory.sample()
            for name in names:
                _wait(device)
                start = clock()
                steps[name](rows)
                _wait(device)
                elapsed = clock() - start
                if number:  # the first round finds nothing in place
                    times[name, rows].append(elapsed)
                watcher.step()
    return times, memory.best


def _hf_steps(model: Any, tokens: Tensor, context: int) -> Callable[[int], None]:
    cache = DynamicCache()
    with torch.no_grad():
        model(tokens[:, :context], past_key_values=cache, use_cache=True, logits_to_keep=1)

    @torch.no_grad()
    def step(rows: int) -> None:
        model(tokens[:, :rows], past_key_values=cache, use_cache=True)
        cache.crop(context - cache.get_seq_length())  # a negative number of tokens: so many are taken away

    return step


def _runner_steps(runner: Runner, tokens: Tensor, context: int) -> Callable[[int], None]:
    tokens, device = tokens.to(runner.plan_device), runner.plan_device
    cache = runner.new_cache(1, context + ROWS[-1])

    def plan(first: int, rows: int) -> Plan:
        square = torch.ones(1, rows, rows, dtype=torch.bool, device=device).tril()
        return Plan(tokens[:, :rows], first + torch.arange(rows, device=device)[None], square)

    result = runner.run(plan(0, context), cache)
    cache.commit([list(range(context))], result.segments)

    def step(rows: int) -> None:
        runner.run(plan(context, rows), cache)

    return step


def _clock(device: torch.device) -> Callable[[], float]:
    """CPU time where one thread does everything: it does not count the time of other processes."""
    return time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rows(times: dict[tuple[str, int], list[float]], floor: float) -> list[dict[str, Any]]:
    rows = []
    for (name, count), seconds in times.items():
        median = statistics.median(seconds)
        rows.append(
            {
                "method": name,
                "label": LABELS[name],
                "rows": count,
                "seconds": median,
                "fastest": min(seconds),
                "over_one_row": median / statistics.median(times[name, 1]),
                "floor_share": floor / median,
                "samples": seconds,
            }
        )
    return rows
