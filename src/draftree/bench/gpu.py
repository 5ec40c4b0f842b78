"""`draftree bench gpu`: all that is asked of a GPU, measured on one in a run of a few minutes, in one JSON file.

A model of a well-known shape is inflated from the small one on the device, in bfloat16: its steps of 1 to 128 rows
stand against the speed of its memory, its answers against Hugging Face's ways of decoding in one interleaved run, and
the curve of what steps cost tells what draft trees would pay for batches of 1 to 64. Nothing here knows what device it
runs on, so that tests run all of it on a CPU; the command asks for CUDA.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from draftree.bench.case import Result, Settings, encode_all, run_case, teach
from draftree.bench.figures import (
    case_lines,
    differing,
    draw_steps,
    draw_wanted,
    figure_lines,
    figures_of,
    step_lines,
)
from draftree.bench.findings import Findings
from draftree.bench.inflate import Size, inflate
from draftree.bench.inflate.sizes import size_named
from draftree.bench.kit import (
    CAPTURED,
    COMPILED,
    LIMITED,
    PLAIN,
    PROMPT_LOOKUP,
    REFERENCE,
    TENSORS,
    WARM,
    WAYS,
    Kit,
    runner_in,
)
from draftree.bench.machine import now
from draftree.bench.speed import spread
from draftree.bench.steps import check_context, time_rows
from draftree.progress import Watcher
from draftree.prompts import Prompt
from draftree.runner import Runner, open_runner
from draftree.runner.eager.product import free_bytes
from draftree.runner.step_cost import StepCost, measure_cost
from draftree.shaping.planner import choose

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
FORMS = (TENSORS, CAPTURED)  # beside the form that comes by itself
FORM_ROWS = (1, 8, 64)  # to time them with: compiling takes its time
METHODS = (REFERENCE, COMPILED, PROMPT_LOOKUP, PLAIN, WARM, LIMITED)
ROOM = 3 * 2**30  # bytes beside the weights: caches, buffers whose copying tells the bandwidth, logits
COMPILING = 120.0  # seconds that are kept for Hugging Face's torch.compile
FEWEST = 2  # prompts that are answered however slow a device is
DEEPEST = 64  # draft tokens of a request that a choice may have


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """How much to measure.

    Attributes:
        per_set: prompts of every set to answer, as far as the time goes.
        max_new_tokens: most tokens of an answer.
        rounds: how often a step of each kind is timed.
        context: tokens before its rows.
        warm_per_set: prompts of every set that warm the trie, by the small model.
        compiled: whether to measure what torch.compile makes of Hugging Face's static cache, and of our layers.
        seconds: that all may take; fewer prompts are answered where it would take longer.
    """

    per_set: int = 1
    max_new_tokens: int = 96
    rounds: int = 7
    context: int = 256
    warm_per_set: int = 23
    compiled: bool = True
    seconds: float = 480.0


def check_device(name: str) -> None:
    """Refuse a machine without CUDA.

    Raises:
        ValueError: it has none, or not that device.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "This machine has no CUDA device that torch can use, and draftree bench gpu measures one: run it where "
            "there is one, or measure this processor with draftree bench speed."
        )
    known = ["cuda", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    if name not in known:
        raise ValueError(f"There is no CUDA device {name!r}: choose one of {', '.join(known)}.")


def check_room(size: Size, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a size that leaves no memory for caches and buffers.

    Raises:
        ValueError: such a one.
    """
    need, free = size.parameters * dtype.itemsize + ROOM, free_bytes(device)
    if free is not None and need > free:
        raise ValueError(
            f"This takes about {need / 2**30:.1f} GiB on {device} and {free / 2**30:.1f} GiB are free: give a smaller "
            "--shape, or free memory there."
        )


def run_gpu(
    small: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    settings: GpuSettings,
    *,
    shape: str | Size = "llama-7b",
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    name: str | None = None,
    watcher: Watcher | None = None,
) -> Findings:
    """Measure.

    Args:
        small: the model to inflate, on the CPU; a llama, mistral or qwen2 model.
        tokenizer: its tokenizer.
        prompts: to measure on and to warm the trie with.
        settings: see there.
        shape: of the large model, a name or a size.
        dtype: of its weights.
        device: where it is made.
        name: of the small model, None for the embedded one.
        watcher: shows progress.

    Raises:
        ValueError: a shape that does not fit, a prompt or context beyond the model's, before any work.
    """
    watcher, began = watcher or Watcher(), time.perf_counter()
    check_context(settings.context, ROWS[-1], getattr(small.config, "max_position_embeddings", None))
    size = size_named(shape) if isinstance(shape, str) else shape
    check_room(size, dtype, torch.device(device))
    asked = Settings(settings.per_set, settings.max_new_tokens, 1, settings.warm_per_set, settings.compiled)
    texts = encode_all(small, tokenizer, prompts, asked)
    started = now()
    watcher.stage("inflating", None)
    large = inflate(small, shape=size, dtype=dtype, device=device)
    label = shape if isinstance(shape, str) else "inflated"
    runner = open_runner(large)
    forms = forms_beside(large, runner)
    timed = {form: (other, FORM_ROWS) for form, other in forms.items()}
    steps = time_rows(large, runner, ROWS, settings.context, settings.rounds, watcher, timed)
    watcher.stage("the curve of steps", None)
    cost = measure_cost(runner, ROWS)
    warm = teach(small, tokenizer, texts, asked, watcher)
    kit = Kit(large, settings.max_new_tokens, warm=warm, compiled=settings.compiled)
    left = settings.seconds - (time.perf_counter() - began) - COMPILING * settings.compiled
    count = _answered(large, texts.tasks[0].ids, settings, left, len(texts.tasks))
    texts = replace(texts, tasks=spread(texts.tasks, count))
    names = [method for method in (*METHODS, *forms) if settings.compiled or method != COMPILED]
    case = run_case(kit, tokenizer, texts, asked, names, name=name, watcher=watcher)
    about = case.about | {"started": started, "settings": asdict(settings), "runner": runner.form}
    about |= {"size": asdict(size) | {"parameters": size.parameters}, "seconds": time.perf_counter() - began}
    about["model"] += f" inflated to {label}"
    chosen = choices(cost, by_depth(case), packed=runner.packs)
    figures = figures_of("gpu", label, steps, case)
    rows = [figure.as_dict() for figure in figures] + [{"kind": "step"} | row for row in steps.rows]
    rows += [
        {"kind": "curve", "rows": int(n), "seconds": float(s)} for n, s in zip(cost.rows, cost.seconds, strict=True)
    ]
    rows += [{"kind": "choice"} | row for row in chosen]

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        draw_wanted(left, figures)
        draw_steps(right, [(label, steps)])

    lines = [[f"{row[name]:.2f}" for name in ("batch", "draft_tokens", "tokens", "ms", "speed_up")] for row in chosen]
    headings = ("batch", "draft tokens a request", "tokens a request and step", "ms of a step", "expected speed-up")
    table = "What would pay, by the curve and the warm trie's acceptance by depth", headings, lines
    tables = [figure_lines(figures), step_lines(label, steps), case_lines(label, case), table]
    remarks = [f"Runner: {runner.form}.", differing(label, case)]
    return Findings("gpu", about, rows, tables, draw, remarks, {"floor": steps.floor, "answers": case.as_dict()})


def forms_beside(model: Any, runner: Runner) -> dict[str, Runner]:
    """What runs passes in the forms that `runner` is not in, by their names."""
    names = [name for name in FORMS if WAYS[name] != runner.form]
    return {name: runner_in(model, name) for name in names}


def _answered(model: Any, ids: Sequence[int], settings: GpuSettings, left: float, most: int) -> int:
    """How many prompts the time is enough for, by how long an answer of Hugging Face's takes; first calls count."""
    given = torch.tensor([list(ids)], device=model.device)
    few, taken = min(16, settings.max_new_tokens), 0.0
    for _ in range(2):  # the first one finds nothing in place
        begin = time.perf_counter()
        model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=few, do_sample=False).tolist()
        taken = time.perf_counter() - begin
    each = taken * settings.max_new_tokens / few * (len(METHODS) + len(FORMS))
    return max(FEWEST, min(most, int(left / each) - 2))  # every method answers two prompts before it is measured


def by_depth(case: Result) -> list[float]:
    """How often a step of the warm trie accepts to depth 1, 2, ..; nothing without one."""
    row = case.rows.get(WARM)
    if row is None or row.stats is None or not row.stats.steps:
        return []
    return [count / row.stats.steps for count in row.stats.accepted_by_depth[:DEEPEST]]


def choices(cost: StepCost, accepted: Sequence[float], *, packed: bool) -> list[dict[str, Any]]:
    """What would pay for batches of like requests.

    Args:
        cost: of a step by its rows.
        accepted: probability that a request's draft is accepted to depth 1, 2, ..: one chain for each request.
        packed: whether the padding of smaller trees costs nothing.

    Returns
    -------
    For each batch the `draft_tokens` of a request (their mean, the likeliest first), `tokens` expected of it a step,
    `ms` of the step, and the `speed_up` expected over plain decoding.
    """
    found = []
    for batch in BATCHES:
        table = cost.of(np.arange(batch, batch * (1 + len(accepted)) + 1))
        sizes = choose([accepted] * batch, table.tolist(), packed=packed)
        tokens = 1 + sum(sum(accepted[:size]) for size in sizes) / batch
        seconds = float(table[sum(sizes) if packed else batch * max(sizes)])
        entry = {"batch": batch, "draft_tokens": sum(sizes) / batch, "tokens": tokens}
        found.append(entry | {"ms": 1000 * seconds, "speed_up": tokens * float(table[0]) / seconds})
    return found
