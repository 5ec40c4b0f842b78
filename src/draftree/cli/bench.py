"""`draftree bench`: measurements, one verb each."""

from __future__ import annotations

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
    bench_quick,
    bench_speed,
    bench_trie,
)

app = typer.Typer(name="bench", help="Measure speed, acceptance and cost on this machine.", no_args_is_help=True)
for verb in (
    bench_accuracy.accuracy,
    bench_bild.bild,
    bench_compare.compare,
    bench_gpu.gpu,
    bench_inflate.inflate,
    bench_layers.layers,
    bench_papers.list_experiments,
    bench_papers.run,
    bench_propd.propd,
    bench_quick.quick,
    bench_speed.speed,
    bench_trie.trie,
):
    app.command("list" if verb is bench_papers.list_experiments else verb.__name__)(verb)
