"""`draftree bench inflate`: what a step costs at any size, with the small model's text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def inflate(
    params: Annotated[
        str | None, typer.Option(help="About how many parameters, such as 400M.", show_default="400M without --shape")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="A model's shape instead, such as llama-7b.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model folder or hub name to inflate.", show_default="the embedded model")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with a 'prompt' each, or a folder of such files.", show_default="those of the package"
        ),
    ] = None,
    answers: Annotated[int, typer.Option(min=1, help="Prompts that both models answer, to see they are equal.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of such an answer.")] = 24,
    context: Annotated[int, typer.Option(min=1, help="Tokens before the rows of a step.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="How often a step of each kind is timed.")] = 7,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.", show_default="the model's")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ..", show_default="cpu")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="torch's choice")] = None,
    out: Annotated[Path, typer.Option(help="Folder for bench-inflate.json and bench-inflate.png.")] = Path(
        "bench-results"
    ),
) -> None:
    """Inflate a model in memory, see that it says the same, and time steps of 1 to 64 rows against HF's forward."""
    import torch

    from draftree.bench.inflate_measure import InflateSettings, run_inflate
    from draftree.bench.inflate_report import render, write_json, write_png
    from draftree.bench.models import load_model
    from draftree.bench.plot import has_matplotlib
    from draftree.bench.prompts import embedded_prompts, read_prompts
    from draftree.bench.sizes import device_named, dtype_named, parameters_named, size_named
    from draftree.cli.common import StageBar, wide_console

    if params is not None and shape is not None:
        raise ValueError("Inflate to a number of parameters or to a shape: give --params or --shape.")
    if shape is None:
        params = params or "400M"
        parameters_named(params)
    else:
        size_named(shape)
    kind, place = dtype_named(dtype), device_named(device)
    found = embedded_prompts() if prompts is None else read_prompts(prompts)
    out.mkdir(parents=True, exist_ok=True)
    if threads is not None:
        torch.set_num_threads(threads)
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
    written = [write_json(result, out)]
    if has_matplotlib():
        written.append(write_png(result, out))
    else:
        console.print("No plot: it needs matplotlib, which pip install 'draftree\\[bench]' brings.")
    console.print("Written: " + ", ".join(str(path) for path in written), markup=False)
