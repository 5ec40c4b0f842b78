"""`draftree bench`: measurements, one verb each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from draftree.cli import (
    bench_accuracy,
    bench_bild,
    bench_compare,
    bench_gpu,
    bench_inflate,
    bench_layers,
    bench_papers,
    bench_propd,
    bench_speed,
)

app = typer.Typer(name="bench", help="Measure speed, acceptance and cost on this machine.", no_args_is_help=True)
app.command("accuracy")(bench_accuracy.accuracy)
app.command("bild")(bench_bild.bild)
app.command("compare")(bench_compare.compare)
app.command("gpu")(bench_gpu.gpu)
app.command("inflate")(bench_inflate.inflate)
app.command("layers")(bench_layers.layers)
app.command("list")(bench_papers.list_experiments)
app.command("run")(bench_papers.run)
app.command("propd")(bench_propd.propd)
app.command("speed")(bench_speed.speed)


@app.command("quick")
def quick(
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with a 'prompt' each, or a folder of such files.", show_default="those of the package"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model folder or hub name.", show_default="the embedded model")
    ] = None,
    per_set: Annotated[int, typer.Option(min=1, help="Prompts of every set to measure on.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 96,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="torch's choice")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often every prompt is answered.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder for bench-quick.json and bench-quick.png.")] = Path("bench-results"),
    drafter_warm: Annotated[int, typer.Option(min=0, help="Prompts of every set that warm the trie.")] = 23,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Measure HF with static cache and torch.compile.")
    ] = True,
) -> None:
    """Hugging Face's ways of decoding and ours, interleaved in one process: speed, acceptance, equality, memory."""
    import torch

    from draftree.bench.compare_case import Settings
    from draftree.bench.models import load_model
    from draftree.bench.plot import has_matplotlib, write_png
    from draftree.bench.prompts import embedded_prompts, read_prompts
    from draftree.bench.quick import run_quick
    from draftree.bench.report import render, write_json
    from draftree.cli.common import StageBar, wide_console

    found = embedded_prompts() if prompts is None else read_prompts(prompts)
    out.mkdir(parents=True, exist_ok=True)
    if threads is not None:
        torch.set_num_threads(threads)
    settings = Settings(per_set, max_new_tokens, rounds, drafter_warm, compiled)
    console = wide_console()
    loaded, tokenizer = load_model(model)
    with StageBar(console) as bar:
        result = run_quick(loaded, tokenizer, found, settings, name=model, watcher=bar)
    console.print(render(result))
    written = [write_json(result, out)]
    if has_matplotlib():
        written.append(write_png(result, out))
    else:
        console.print("No plot: it needs matplotlib, which pip install 'draftree\\[bench]' brings.")
    console.print("Written: " + ", ".join(str(path) for path in written), markup=False)


@app.command("trie")
def trie(
    prompts: Annotated[int, typer.Option(min=1, help="Requests to serve.")] = 200,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 400,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 120,
    vocabulary: Annotated[int, typer.Option(min=8, help="Token ids in use.")] = 32_000,
    decoding_length: Annotated[int, typer.Option(min=1, help="Nodes a retrieval asks for.")] = 64,
    branch_length: Annotated[int, typer.Option(min=1, help="Most tokens of a branch.")] = 12,
    warm_answers: Annotated[int, typer.Option(min=0, help="Answers stored before measuring.")] = 0,
    backend: Annotated[str, typer.Option(help="auto, c or python.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Time every call of the Lookahead trie on made text, and weigh its nodes."""
    from rich.console import Console
    from rich.table import Table

    from draftree.bench.trie import measure_trie

    figures = measure_trie(
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        vocabulary=vocabulary,
        decoding_length=decoding_length,
        branch_length=branch_length,
        warm_answers=warm_answers,
        backend=backend,
    )
    if as_json:
        print(json.dumps(figures))
        return
    table = Table(title="Lookahead trie, microseconds", title_justify="left")
    table.add_column("call")
    for column in ("median", "p99", "max"):
        table.add_column(column, justify="right")
    for key, call in (
        ("begin_us", "insert a prompt"),
        ("extend_us", "store a token"),
        ("retrieve_us", "retrieve a draft"),
        ("end_us", "drop a prompt"),
    ):
        table.add_row(call, *(f"{figures[key][column]:.1f}" for column in ("median", "p99", "max")))
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{figures['drafted']:.1f} nodes a draft; {figures['nodes']:,} nodes of {figures['bytes_per_node']:.1f} bytes; "
        f"{figures['bytes_grown']:,} bytes taken on in the second half; twin: {figures['backend']}"
    )
