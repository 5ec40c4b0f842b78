"""Steps, answers and batches of a CUDA device, measured in a run of a few minutes: `draftree bench gpu`.

A model of a well-known shape is inflated from the small one on the device, in bfloat16: its steps of 1 to 128 rows
stand against the speed of its memory, its answers against Hugging Face's ways of decoding in one interleaved run, and
the curve of its steps says which draft trees would pay in batches of 1 to 64. Nothing here knows what device it runs
on, so that tests run all of it on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from benchmarks.harness import Experiment, Setup, table_of
from benchmarks.harness import kit as names
from benchmarks.harness.inputs import Settings, Texts, encode_all
from benchmarks.harness.kit import Case, make_kit, run_case
from benchmarks.inflate.sizes import Size, check_memory, dtype_named, parameters_named, size_for, size_named
from benchmarks.machine.speed import COLUMNS, draw_steps, figures_of, stage_table, step_table
from benchmarks.machine.steps import LOOP, Steps, check_context, time_rows
from draftree.bench.methods import HuggingFace
from draftree.bench.report import Table
from draftree.checkpoints import Placement
from draftree.runner import Runner, open_runner
from draftree.runner.step_cost import StepCost
from draftree.shaping.planner import choose

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
FORMS = (names.EAGER, names.GRAPHS)  # of the runner; the one that `open_runner` chooses is timed in any case
FORM_ROWS = (1, 8, 64)  # to time them with: compiling takes its time
METHODS = (names.REFERENCE, names.COMPILED, names.PROMPT_LOOKUP, names.PLAIN, names.WARM, names.LIMITED)
ROOM = 3 * 2**30  # bytes for caches, logits and the buffers whose copying shows the bandwidth
COMPILING = 120.0  # seconds that are kept for Hugging Face's torch.compile
FEWEST = 2  # prompts that are answered however slow a device is
DEEPEST = 64  # draft tokens of a request that a choice may have


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """A device against its memory's speed and Hugging Face's ways of decoding, on a model of a well-known shape."""
    began = time.perf_counter()
    label, size = size_of(setup)
    dtype, device, compiled = dtype_named(setup["dtype"]), check_device(setup["device"]), setup["compiled"]
    check_context(setup["context"], ROWS[-1], setup.small)
    check_memory(size, dtype, torch.device(device), ROOM)
    settings = Settings(setup["per_set"], setup["max_new_tokens"], 1, setup["warm_per_set"], compiled)
    texts = encode_all(setup.subject, setup.prompts, settings)
    setup.watcher.stage("inflating", None)
    large = setup.subject.inflated(label, shape=size, dtype=dtype, device=device)
    runner = open_runner(large.model)
    forms = other_forms(large.model, runner)
    timed = {LOOP: (runner, ROWS)} | {form: (other, FORM_ROWS) for form, other in forms.items()}
    steps = time_rows(large.model, timed, setup["context"], setup["rounds"], setup.watcher)
    kit = make_kit(large, texts.lessons, settings, setup.watcher)
    left = 60 * setup["minutes"] - (time.perf_counter() - began) - COMPILING * compiled
    each = seconds_of_answer(large.model, texts.tasks[0].ids, settings.max_new_tokens)
    # Every method answers two prompts before it is measured.
    texts = spread(texts, max(FEWEST, int(left / (each * len((*METHODS, *FORMS)))) - 2))
    methods = [method for method in (*METHODS, *forms) if compiled or method != names.COMPILED]
    case = run_case(kit, texts, methods, setup.watcher)
    curve = {row["rows"]: row["ms"] / 1000 for row in steps.rows if row["name"] == LOOP}
    chosen = choices(StepCost(list(curve), list(curve.values())), by_depth(case), packed=runner.packs)
    tables = {table.title: frame(table) for table in (step_table(steps), case.table(), stage_table(case))}
    about = {name: case.about[name] for name in ("model", "dtype", "device", "prompts", "sets")}
    yield table_of(
        figures_of(steps, case),
        remarks=[*case.remarks(), f"Runner: {runner.form}."],
        tables=tables | {"What would pay, by the curve and the warm trie's acceptance by depth": pd.DataFrame(chosen)},
        about=about | {"runner": runner.form},
        more={"floor": steps.floor, "curve": curve, "steps": steps.rows},
    )


def plot(figure: Any, table: pd.DataFrame) -> None:
    """The steps."""
    more = table.attrs["more"]
    draw_steps(figure, Steps(more["steps"], more["floor"]))


def check_device(name: str) -> str:
    """`name`, if it is a device of this machine; raise a ValueError if it is not."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            "This machine has no CUDA device that torch can use: run this where there is one, or give another --device."
        )
    Placement(name).check()
    return name


def size_of(setup: Setup) -> tuple[str, Size]:
    """Return the inflated model's name in tables, and its size."""
    if setup.params is None:
        return setup["shape"], size_named(setup["shape"])
    return setup.params, size_for(parameters_named(setup.params), Size.of(setup.small.config))


def frame(table: Table) -> pd.DataFrame:
    """Return the shown columns of a table, with their intervals."""
    columns = [f"{name}{end}" for name in table.columns for end in ("", "_low", "_high")]
    return pd.DataFrame([{name: row[name] for name in columns if name in row} for row in table.rows])


def spread(texts: Texts, count: int) -> Texts:
    """`count` tasks or all, evenly from the whole list, so that they are of as many sets as can be."""
    count = min(count, len(texts.tasks))
    chosen = [i * len(texts.tasks) // count for i in range(count)]
    return replace(texts, tasks=[texts.tasks[i] for i in chosen])


def other_forms(model: Any, runner: Runner) -> dict[str, Runner]:
    """Runners of the forms that `runner` does not have, by name."""
    return {name: open_runner(model, names.RUNNERS[name]) for name in FORMS if names.RUNNERS[name] != runner.form}


def seconds_of_answer(model: Any, ids: Sequence[int], new: int) -> float:
    """About how long Hugging Face's `generate` takes for an answer of `new` tokens to `ids`."""
    few = min(16, new)
    method = HuggingFace(names.REFERENCE, model, few)
    method.answer(ids)  # the first call pays for what later ones find ready
    return method.answer(ids).seconds * new / few


def by_depth(case: Case) -> list[float]:
    """Return the share of the warm trie's steps that accept to depth 1, 2, ..; empty if it was not measured."""
    row = case.rows.get(names.WARM)
    if row is None or row.stats is None or not row.stats.steps:
        return []
    return [count / row.stats.steps for count in row.stats.accepted_by_depth[:DEEPEST]]


def choices(cost: StepCost, accepted: Sequence[float], *, packed: bool) -> list[dict[str, Any]]:
    """Return the draft tokens that pay for batches of like requests.

    Each request has one chain of draft tokens, `accepted` with these probabilities to depth 1, 2, ..; if trees are
    `packed`, the padding of smaller ones costs nothing. For each batch there are the `draft_tokens` of a request (their
    mean, the likeliest first), `tokens` expected of it a step, `ms` of that, and the `speed_up` over plain decoding.
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


EXPERIMENT = Experiment(
    run,
    COLUMNS,
    plot,
    {
        **{"shape": "llama-7b", "dtype": "bfloat16", "device": "cuda", "per_set": 1, "max_new_tokens": 96},
        **{"rounds": 7, "context": 256, "warm_per_set": 23, "compiled": True, "minutes": 8.0},
    },
    name="gpu",
)
