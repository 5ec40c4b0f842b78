"""`draftree bench gpu`: steps, answers and batches on a GPU, in one run."""

from __future__ import annotations

from typing import Annotated

import typer

from draftree.cli.measuring import Measuring
from draftree.cli.options import Compiled, Context, DrafterWarm, Model, StepRounds, grouped


@grouped
def gpu(
    *,
    shape: Annotated[str, typer.Option(help="Shape of the inflated model.")] = "llama-7b",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ..")] = "cuda",
    model: Model = None,
    per_set: Annotated[int, typer.Option(min=1, help="Prompts of every set, as far as the time goes.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 96,
    rounds: StepRounds = 7,
    context: Context = 256,
    drafter_warm: DrafterWarm = 23,
    compiled: Compiled = True,
    minutes: Annotated[float, typer.Option(min=0, help="That all may take; fewer prompts where it is long.")] = 8,
    measuring: Measuring,
) -> None:
    """A CUDA device against its memory's speed and Hugging Face's ways: steps, answers, batches, in one file."""
    from draftree.bench.gpu import check_device, run_gpu
    from draftree.bench.inflate.sizes import dtype_named, size_named
    from draftree.bench.inputs import Subject
    from draftree.bench.speed import SpeedSettings
    from draftree.cli.screen import StageBar, show_report, wide_console

    size_named(shape)
    kind = dtype_named(dtype)
    check_device(device)
    prompts, console = measuring.begin(), wide_console()
    settings = SpeedSettings(
        per_set, max_new_tokens, rounds, context, drafter_warm, compiled=compiled, seconds=60 * minutes
    )
    subject = Subject.load(model)
    with StageBar(console) as bar:
        report = run_gpu(subject, prompts, settings, shape=shape, dtype=kind, device=device, watcher=bar)
    show_report(console, report, measuring.out)
