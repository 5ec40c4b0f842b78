"""`draftree bench bild`: quality against latency of a large and a small model that write one text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def bild(
    model: Annotated[
        str | None, typer.Option(help="The large model: folder or hub name.", show_default="the embedded model")
    ] = None,
    small: Annotated[str | None, typer.Option(help="The small model as it was trained.", show_default="none")] = None,
    aligned: Annotated[
        str | None,
        typer.Option(help="The small model aligned with the large one.", show_default="the embedded model's own"),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Rows to answer: JSON lines, or a folder of them.", show_default="those of the package"),
    ] = None,
    field: Annotated[
        str | None, typer.Option(help="Where a row has its input.", show_default="turns, prompt or question")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="Where a row has its reference.", show_default="no references")
    ] = None,
    metric: Annotated[str, typer.Option(help="bleu or rouge-l.")] = "bleu",
    template: Annotated[
        str | None,
        typer.Option(
            help="full, short, or a text with {question} in it.",
            show_default="short; the bare input without a chat template",
        ),
    ] = None,
    thresholds: Annotated[
        list[str] | None,
        typer.Option(help="FALLBACK:ROLLBACK of a point of the grid, once for each.", show_default="a grid of 5 by 5"),
    ] = None,
    window: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Of speculative decoding with a fixed window, once for each.", show_default="3 to 10"),
    ] = None,
    ablations: Annotated[
        bool, typer.Option("--ablations/--no-ablations", help="Leave out rollback, and fallback, as well.")
    ] = True,
    limit: Annotated[int, typer.Option(min=1, help="Most rows for quality.")] = 500,
    timed: Annotated[int, typer.Option(min=1, help="Rows of them whose answers are timed.")] = 40,
    rounds: Annotated[int, typer.Option(min=1, help="How often these are answered.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 80,
    batch: Annotated[int, typer.Option(min=1, help="Rows answered together for their texts.")] = 32,
    examples: Annotated[int, typer.Option(min=0, help="Rows that the page shows.")] = 6,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="torch's choice")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("bench-results"),
) -> None:
    """BiLD's grid of thresholds, its baselines and ablations: BLEU or ROUGE-L against latency (LOSSY by choice)."""
    import torch

    from draftree.bench.bild import BildSettings, check_references, run_bild
    from draftree.bench.bild_open import open_pair, open_rows, read_thresholds
    from draftree.bench.bild_page import write_html
    from draftree.bench.bild_show import findings_of
    from draftree.bench.findings_files import heading, write_json, write_png
    from draftree.bench.plot import has_matplotlib
    from draftree.cli.common import StageBar, wide_console
    from draftree.training.align_inputs import template_of

    default = BildSettings()
    settings = BildSettings(
        read_thresholds(thresholds) if thresholds else default.thresholds,
        tuple(window or default.windows),
        metric,
        timed,
        rounds,
        max_new_tokens,
        batch,
        ablations,
        examples,
    )
    rows = open_rows(data, field, reference, limit)
    check_references(rows, metric)
    if threads is not None:
        torch.set_num_threads(threads)
    large, tokenizer, smalls = open_pair(model, small, aligned)
    out.mkdir(parents=True, exist_ok=True)
    console = wide_console()
    with StageBar(console) as bar:
        result = run_bild(
            large, tokenizer, smalls, rows, template_of(tokenizer, template), settings, out, name=model, watcher=bar
        )
    findings = findings_of(result)
    console.print(heading(result.about), markup=False)
    for one in findings.tables:
        console.print(one)
    for remark in findings.remarks:
        console.print(remark, markup=False)
    written = [write_json(findings, result.about, out, "bild")]
    picture = write_png(findings, result.about, out, "bild") if has_matplotlib() else None
    if picture is None:
        console.print("No plot: it needs matplotlib, which pip install 'draftree\\[bench]' brings.")
    else:
        written.append(picture)
    written.append(write_html(result, tokenizer, out, picture))
    console.print("Written: " + ", ".join(str(path) for path in written), markup=False)
