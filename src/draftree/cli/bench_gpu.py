"""`draftree bench gpu`: the experiment `gpu` of a checkout, with options of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from draftree.cli.bench_run import run_experiment
from draftree.cli.measuring import Measuring
from draftree.cli.options import Compiled, DrafterWarm, Model, RequestState, StepRounds, Threads, grouped, use_threads


@grouped
def gpu(
    *,
    shape: Annotated[str, "Shape of the inflated model."] = "llama-7b",
    dtype: Annotated[str, "bfloat16, float16 or float32."] = "bfloat16",
    device: Annotated[str, "cuda, cuda:1, .."] = "cuda",
    model: Model = None,
    threads: Threads = None,
    per_set: Annotated[int, typer.Option(min=1, help="Prompts of every set, as far as the time goes.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 96,
    rounds: StepRounds = 7,
    context: RequestState = 256,
    drafter_warm: DrafterWarm = 23,
    compiled: Compiled = True,
    minutes: Annotated[float, typer.Option(min=0, help="Time limit; fewer prompts where it is short.")] = 8,
    measuring: Measuring,
) -> None:
    """A CUDA device against its memory's speed and Hugging Face's ways: steps, answers, batches; from a checkout."""
    use_threads(threads)
    given = {"shape": shape, "dtype": dtype, "device": device, "per_set": per_set, "max_new_tokens": max_new_tokens}
    given |= {"rounds": rounds, "context": context, "warm_per_set": drafter_warm, "compiled": compiled}
    run_experiment("gpu", given | {"minutes": minutes}, measuring, model)
