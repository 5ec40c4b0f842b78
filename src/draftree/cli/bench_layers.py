"""`draftree bench layers`: SelfSpeculative and CALM against plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def layers(
    model: Annotated[
        str | None, typer.Option(help="Model folder or hub name.", show_default="the embedded model")
    ] = None,
    params: Annotated[
        str | None, typer.Option(help="Inflate the model to about so many parameters, as 200M.", show_default="no")
    ] = None,
    skip_set: Annotated[
        Path | None,
        typer.Option(help="Folder that draftree train skip-set wrote.", show_default="the embedded model's"),
    ] = None,
    exit_layer: Annotated[
        list[int] | None, typer.Option(min=1, help="Draft from this early exit as well, once for each.")
    ] = None,
    chain: Annotated[
        list[int] | None, typer.Option(min=1, help="Length of a bare chain, once for each.", show_default="1, 2, 4")
    ] = None,
    threshold: Annotated[
        list[float] | None,
        typer.Option(min=0, max=1, help="Of CALM, once for each.", show_default="0.9, 0.95, 0.98, 1"),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with a 'prompt' each, or a folder of such files.", show_default="those of the package"
        ),
    ] = None,
    per_set: Annotated[int, typer.Option(min=1, help="Prompts of every set to measure on.")] = 2,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="How often every prompt is answered.")] = 2,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="torch's choice")] = None,
    out: Annotated[Path, typer.Option(help="Folder for bench-layers.json and bench-layers.png.")] = Path(
        "bench-results"
    ),
) -> None:
    """What leaving out layers is worth: as drafts (lossless) and as early exits (CALM, LOSSY)."""
    import torch

    from draftree.bench.layers import LayersSettings, run_layers
    from draftree.bench.models import load_model
    from draftree.bench.prompts import embedded_prompts, read_prompts
    from draftree.cli.common import StageBar, show_findings, wide_console
    from draftree.drafting import SelfSpeculative
    from draftree.drafting.folder import demo_drafter

    default = LayersSettings()
    settings = LayersSettings(
        per_set,
        max_new_tokens,
        rounds,
        tuple(chain or default.chains),
        tuple(exit_layer or ()),
        tuple(default.thresholds if threshold is None else threshold),
    )
    found = embedded_prompts() if prompts is None else read_prompts(prompts)
    out.mkdir(parents=True, exist_ok=True)
    if threads is not None:
        torch.set_num_threads(threads)
    small, tokenizer = load_model(model)
    searched = None
    if skip_set is not None:
        searched = SelfSpeculative.from_pretrained(skip_set, small)
    elif model is None:
        searched = demo_drafter("self-speculative", small)
    console = wide_console()
    with StageBar(console) as bar:
        findings, about = run_layers(
            small, tokenizer, found, settings, skip_set=searched, params=params, name=model, watcher=bar
        )
    show_findings(console, findings, about, out, "layers")
