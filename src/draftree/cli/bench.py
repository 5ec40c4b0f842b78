"""`draftree bench`: measurements, one verb each."""

from __future__ import annotations

import typer

from draftree.cli import bench_compare, bench_gpu, bench_quick, bench_run, bench_speed

app = typer.Typer(name="bench", help="Measure speed, acceptance and cost on this machine.", no_args_is_help=True)
for verb in (bench_quick.quick, bench_compare.compare, bench_speed.speed, bench_gpu.gpu, bench_run.run):
    app.command(verb.__name__)(verb)
app.command("list")(bench_run.list_experiments)
