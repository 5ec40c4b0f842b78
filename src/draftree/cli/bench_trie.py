"""`draftree bench trie`: what the calls of the Lookahead trie take, and what its nodes weigh."""

from __future__ import annotations

import json
from typing import Annotated

import typer


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
    from rich.table import Table

    from draftree.bench.trie import measure_trie
    from draftree.cli.screen import wide_console

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
    console = wide_console()
    console.print(table)
    console.print(
        f"{figures['drafted']:.1f} nodes a draft; {figures['nodes']:,} nodes of {figures['bytes_per_node']:.1f} bytes; "
        f"{figures['bytes_grown']:,} bytes taken on in the second half; twin: {figures['backend']}"
    )
