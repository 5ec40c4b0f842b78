"""`draftree bench gpu`: steps, answers and batches of a CUDA device, measured in a run of a few minutes, in one file.

A model of a well-known shape is inflated from the small one on the device, in bfloat16: its steps of 1 to 128 rows
stand against the speed of its memory, its answers against Hugging Face's ways of decoding in one interleaved run, and
the curve of its steps says which draft trees would pay in batches of 1 to 64. Nothing here knows what device it runs
on, so that tests run all of it on a CPU; the command demands CUDA.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from draftree.bench.case import Result, facts_of
from draftree.bench.inflate import Size
from draftree.bench.inflate.sizes import check_memory, size_named
from draftree.bench.inputs import Subject, encode_all
from draftree.bench.kit import (
    CAPTURED,
    COMPILED,
    LIMITED,
    PLAIN,
    PROMPT_LOOKUP,
    REFERENCE,
    RUNNERS,
    TENSORS,
    WARM,
    make_kit,
)  # fmt: skip
from draftree.bench.machine import now
from draftree.bench.methods import HuggingFace
from draftree.bench.report import Report, Table
from draftree.bench.speed import SpeedSettings, measure_answers, report_of
from draftree.bench.steps import LOOP, check_context, time_rows
from draftree.progress import Watcher
from draftree.prompts import Prompt
from draftree.runner import Runner, open_runner
from draftree.runner.step_cost import StepCost
from draftree.shaping.planner import choose

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
FORMS = (TENSORS, CAPTURED)  # of the runner; the one that `open_runner` chooses is timed in any case
FORM_ROWS = (1, 8, 64)  # to time them with: compiling takes its time
METHODS = (REFERENCE, COMPILED, PROMPT_LOOKUP, PLAIN, WARM, LIMITED)
ROOM = 3 * 2**30  # bytes for caches, logits and the buffers whose copying shows the bandwidth
COMPILING = 120.0  # seconds that are kept for Hugging Face's torch.compile
FEWEST = 2  # prompts that are answered however slow a device is
DEEPEST = 64  # draft tokens of a request that a choice may have


def check_device(name: str) -> None:
    """Raise a ValueError where this machine has no CUDA, or no device `name`."""
    if not torch.cuda.is_available():
        raise ValueError(
            "This machine has no CUDA device that torch can use, and draftree bench gpu measures one: run it where "
            "there is one, or measure this processor with draftree bench speed."
        )
    known = ["cuda", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    if name not in known:
        raise ValueError(f"There is no CUDA device {name!r}: choose one of {', '.join(known)}.")


def run_gpu(
    subject: Subject,
    prompts: Sequence[Prompt],
    settings: SpeedSettings,
    *,
    shape: str | Size = "llama-7b",
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    watcher: Watcher | None = None,
) -> Report:
    """Measure.

    Args:
        subject: the model to inflate, on the CPU; a llama, mistral or qwen2 model.
        prompts: to measure on and to warm the trie with.
        settings: how much.
        shape: of the large model, a name or a size.
        dtype: of its weights.
        device: where it is made.
        watcher: shows progress.

    Raises:
        ValueError: a shape that does not fit, a prompt or context beyond the model's, before any work.
    """
    watcher, started, began = watcher or Watcher(), now(), time.perf_counter()
    check_context(settings.context, ROWS[-1], subject.model)
    size, label = (size_named(shape), shape) if isinstance(shape, str) else (shape, "a given shape")
    check_memory(size, dtype, torch.device(device), ROOM)
    texts = encode_all(subject, prompts, settings.case)
    watcher.stage("inflating", None)
    large = subject.inflated(label, shape=size, dtype=dtype, device=device)
    runner = open_runner(large.model)
    forms = other_forms(large.model, runner)
    timed = {form: (other, FORM_ROWS) for form, other in forms.items()}
    steps = time_rows(large.model, runner, ROWS, settings.context, settings.rounds, watcher, timed)
    kit = make_kit(large, texts.lessons, settings.case, watcher)
    left = settings.seconds - (time.perf_counter() - began) - COMPILING * settings.compiled
    each = seconds_of_answer(large.model, texts.tasks[0].ids, settings.max_new_tokens)
    # Every method answers two prompts before it is measured.
    texts = texts.spread(max(FEWEST, int(left / (each * len((*METHODS, *FORMS)))) - 2))
    one = measure_answers(label, "gpu", kit, steps, texts, (*METHODS, *forms), watcher)
    spent = {"started": started, "seconds": time.perf_counter() - began}
    about = one.about | facts_of(settings, texts) | spent
    seconds = {row["rows"]: row["seconds"] for row in steps.rows if row["method"] == LOOP}
    chosen = choices(StepCost(list(seconds), list(seconds.values())), by_depth(one.case), packed=runner.packs)
    rows = [{"kind": "curve", "rows": n, "seconds": s} for n, s in seconds.items()]
    rows += [{"kind": "choice"} | row for row in chosen]
    more = {"floor": steps.floor, "answers": one.case.as_dict()}
    return report_of("gpu", about, [one], more, rows, [choice_table(chosen)])


def other_forms(model: Any, runner: Runner) -> dict[str, Runner]:
    """Runners of the forms that `runner` does not have, by name."""
    return {name: open_runner(model, RUNNERS[name]) for name in FORMS if RUNNERS[name] != runner.form}


def seconds_of_answer(model: Any, ids: Sequence[int], new: int) -> float:
    """About how long Hugging Face's `generate` takes for an answer of `new` tokens to `ids`."""
    few = min(16, new)
    method = HuggingFace(REFERENCE, model, few)
    method.answer(ids)  # the first call pays for what later ones find ready
    return method.answer(ids).seconds * new / few


def by_depth(case: Result) -> list[float]:
    """How often a step of the warm trie accepts to depth 1, 2, ..; empty where it was not measured."""
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


def choice_table(chosen: Sequence[dict[str, Any]]) -> Table:
    """`choices` as a table."""
    headings = ("batch", "draft tokens a request", "tokens a request and step", "ms of a step", "expected speed-up")
    title = "What would pay, by the curve and the warm trie's acceptance by depth"
    return Table(title, headings, [[f"{value:.2f}" for value in row.values()] for row in chosen])
