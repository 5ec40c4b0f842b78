"""What a step costs at any size, by its rows, against the memory's speed.

A small model is inflated in memory, the large one's answers are compared with its own, and steps of 1 to 64 rows after
a context are timed, Hugging Face's `forward` and draftree's runner in turns. A step reads every weight once, however
few its rows: no step is faster than the weights' bytes at the memory's bandwidth, which is measured here too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch

from benchmarks.harness import Experiment, Setup, lines, table_of
from benchmarks.inflate import Size, inflate
from benchmarks.inflate.sizes import dtype_named, parameters_named, size_named
from draftree.bench.equality import difference
from draftree.bench.steps import HF, LABELS, LOOP, check_context, time_rows
from draftree.engine import generate
from draftree.models import Placement
from draftree.prompts import take_per_set
from draftree.runner import open_runner

ROWS = (1, 2, 4, 8, 16, 32, 64)


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Milliseconds of a step by its rows, draftree's and Hugging Face's, on a model inflated to a size."""
    shape, params = setup["shape"] or None, setup.params
    if shape is not None and params is not None:
        raise ValueError("Inflate to a number of parameters or to a shape: give --params or shape.")
    kind = dtype_named(setup["dtype"]) if setup["dtype"] else None
    device = setup["device"] or None
    Placement(device or "auto").check()
    params = params or ("400M" if shape is None else None)
    size_named(shape) if shape else parameters_named(str(params))
    check_context(setup["context"], ROWS[-1], setup.small)
    setup.watcher.stage("inflating", None)
    large = inflate(setup.small, params, shape=shape, dtype=kind, device=device)
    runner, size = open_runner(large, "auto"), Size.of(large.config)
    equal = compare_models(setup, large)
    steps = time_rows(large, {LOOP: (runner, ROWS)}, setup["context"], setup["rounds"], setup.watcher)
    wide = pd.DataFrame(steps.rows).pivot(index="rows", columns="method", values="ms").reset_index()
    wide["hf_over_draftree"] = wide[LABELS[HF]] / wide[LABELS[LOOP]]
    floor = steps.floor
    answers = (
        f"answers differ: {equal['where']}" if equal["where"] else f"all {equal['tokens']} greedy tokens are equal"
    )
    remarks = [
        f"Floor: {floor['weight_bytes'] / 1e9:.2f} GB of weights at {floor['bandwidth'] / 1e9:.1f} GB/s take "
        f"{1000 * floor['seconds']:.1f} ms. Form of the runner: {runner.form}.",
        f"Against the small model, {equal['prompts']} prompts: logits differ by {equal['logits']:.2g} at most (their "
        f"deviation is {equal['spread']:.2g}); {answers}.",
    ]
    about = {
        "model": f"{setup.name or 'embedded chat-4m'} inflated to {params or shape}",
        "dtype": str(large.dtype)[6:],
    }
    yield table_of(
        steps.rows,
        remarks=remarks,
        tables={"Side by side": wide},
        about=about,
        more={"floor": floor, "equality": equal, "parameters": size.parameters, "form": runner.form},
    )


@torch.no_grad()
def compare_models(setup: Setup, large: Any) -> dict[str, Any]:
    """How equal two models are: logits on the prompts' rows, and greedy answers by the runner against HF's."""
    chosen = take_per_set([p for p in setup.prompts if not p.warm], 1)[: setup["answers"]]
    small, new, where = setup.small, setup["max_new_tokens"], []
    worst = spread = 0.0
    tokens = 0
    setup.watcher.stage("comparing answers", len(chosen))
    for prompt in chosen:
        ids = torch.tensor([setup.encode(prompt.text)])
        expected, found = small(ids).logits.float(), large(ids.to(large.device)).logits.float().cpu()
        worst = max(worst, float((found[..., : expected.shape[-1]] - expected).abs().max()))
        spread = max(spread, float(expected.std()))
        answer = small.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        greedy = answer[0, ids.shape[1] :].tolist()
        out = generate(large, ids.to(large.device), max_new_tokens=new, runner="auto")
        tokens += len(greedy)
        unequal = difference(small, ids[0].tolist(), greedy, out.sequences[0, ids.shape[1] :].tolist())
        where += [] if unequal is None else [f"prompt {prompt.id}: {unequal}"]
        setup.watcher.step()
    return {"prompts": len(chosen), "tokens": tokens, "logits": worst, "spread": spread, "where": where}


EXPERIMENT = Experiment(
    run,
    ("rows", "method", "ms", "over_one_row", "floor_share"),
    lines("rows", "ms", by="method", log=True),
    {"answers": 4, "max_new_tokens": 24, "context": 128, "rounds": 7, "shape": "", "dtype": "", "device": ""},
    name="inflate",
)
