"""`draftree bench inflate`: what a step costs at any size, with the small model's text."""

from __future__ import annotations

from typing import Annotated

import typer

from draftree.cli.measuring import Measuring
from draftree.cli.options import Context, MaxNewTokens, Model, StepRounds, grouped


@grouped
def inflate(
    *,
    params: Annotated[
        str | None, typer.Option(help="About how many parameters, such as 400M.", show_default="400M without --shape")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="A model's shape instead, such as llama-7b.", show_default=False)
    ] = None,
    model: Model = None,
    answers: Annotated[int, typer.Option(min=1, help="Prompts that both models answer, to see they are equal.")] = 4,
    max_new_tokens: MaxNewTokens = 24,
    context: Context = 128,
    rounds: StepRounds = 7,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.", show_default="the model's")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ..", show_default="cpu")] = None,
    measuring: Measuring,
) -> None:
    """Inflate a model in memory, see that it says the same, and time steps of 1 to 64 rows against HF's forward."""
    from draftree.bench.inflate.sizes import device_named, dtype_named, parameters_named, size_named
    from draftree.bench.inflate_measure import InflateSettings, run_inflate
    from draftree.bench.inflate_report import render, write_json, write_png
    from draftree.cli.screen import StageBar, drawn, tell_written, wide_console
    from draftree.models import load_model

    if params is not None and shape is not None:
        raise ValueError("Inflate to a number of parameters or to a shape: give --params or --shape.")
    if shape is None:
        params = params or "400M"
        parameters_named(params)
    else:
        size_named(shape)
    kind, place = dtype_named(dtype), device_named(device)
    found = measuring.begin()
    console = wide_console()
    small, tokenizer = load_model(model)
    settings = InflateSettings(rounds, context, answers, max_new_tokens)
    with StageBar(console) as bar:
        result = run_inflate(
            small,
            tokenizer,
            found,
            settings,
            params=params,
            shape=shape,
            dtype=kind,
            device=place,
            name=model,
            watcher=bar,
        )
    console.print(render(result))
    written = [write_json(result, measuring.out)]
    tell_written(console, written + drawn(console, lambda: write_png(result, measuring.out)))
