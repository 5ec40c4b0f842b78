"""`draftree bench layers`: SelfSpeculative and CALM against plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.measuring import Measuring
from draftree.cli.options import Inflate, MaxNewTokens, Model, PerSet, Rounds, grouped


@grouped
def layers(
    *,
    model: Model = None,
    params: Inflate = None,
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
    per_set: PerSet = 2,
    max_new_tokens: MaxNewTokens = 96,
    rounds: Rounds = 2,
    measuring: Measuring,
) -> None:
    """What leaving out layers is worth: as drafts (lossless) and as early exits (CALM, LOSSY)."""
    from draftree.bench.layers import LayersSettings, run_layers
    from draftree.cli.screen import StageBar, show_findings, wide_console
    from draftree.drafting import SelfSpeculative
    from draftree.drafting.folder import demo_drafter
    from draftree.models import load_model

    default = LayersSettings()
    settings = LayersSettings(
        per_set,
        max_new_tokens,
        rounds,
        tuple(chain or default.chains),
        tuple(exit_layer or ()),
        tuple(default.thresholds if threshold is None else threshold),
    )
    found = measuring.begin()
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
    show_findings(console, findings, about, measuring.out, "layers")
