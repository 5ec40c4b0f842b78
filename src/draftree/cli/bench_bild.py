"""`draftree bench bild`: quality against latency of a large and a small model that write one text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.options import (
    RESULTS,
    Field,
    MaxNewTokens,
    Results,
    Template,
    Threads,
    check_folder,
    use_threads,
)


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
    field: Field = None,
    reference: Annotated[
        str | None, typer.Option(help="Where a row has its reference.", show_default="no references")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="bleu or rouge-l.", show_default="bleu with --reference, or else rouge-l")
    ] = None,
    template: Template = None,
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
    max_new_tokens: MaxNewTokens = 80,
    batch: Annotated[int, typer.Option(min=1, help="Rows answered together for their texts.")] = 32,
    examples: Annotated[int, typer.Option(min=0, help="Rows that the page shows.")] = 6,
    threads: Threads = None,
    out: Results = RESULTS,
) -> None:
    """BiLD's grid of thresholds, its baselines and ablations: BLEU or ROUGE-L against latency (LOSSY by choice)."""
    from draftree.bench.bild import BildSettings, check_references, run_bild
    from draftree.bench.bild_open import open_pair, open_rows, read_thresholds
    from draftree.bench.bild_page import write_html
    from draftree.bench.bild_show import findings_of
    from draftree.bench.findings_files import write_json, write_png
    from draftree.cli.screen import StageBar, drawn, show_tables, tell_written, wide_console
    from draftree.training.align_inputs import template_of

    metric = metric or ("rouge-l" if reference is None else "bleu")
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
    check_folder(out)
    use_threads(threads)
    large, tokenizer, smalls = open_pair(model, small, aligned)
    out.mkdir(parents=True, exist_ok=True)
    console = wide_console()
    with StageBar(console) as bar:
        result = run_bild(
            large, tokenizer, smalls, rows, template_of(tokenizer, template), settings, out, name=model, watcher=bar
        )
    findings = findings_of(result)
    show_tables(console, findings, result.about)
    written = [write_json(findings, result.about, out, "bild")]
    pictures = drawn(console, lambda: write_png(findings, result.about, out, "bild"))
    page = write_html(result, tokenizer, out, pictures[0] if pictures else None)
    tell_written(console, [*written, *pictures, page])
