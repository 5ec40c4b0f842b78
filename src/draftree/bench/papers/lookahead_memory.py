"""Lookahead's Table 5: peak memory by decoding length, each in a process of its own."""

from __future__ import annotations

from typing import Any

import torch
from rich import box
from rich.table import Table

from draftree.bench.analysis_setup import Findings, plain_axis
from draftree.bench.memory import compare_memory
from draftree.bench.papers.claims import Claim
from draftree.bench.papers.lookahead import LookaheadSetup
from draftree.bench.papers.lookahead_claims import MEMORY

LENGTHS = (2, 8, 16, 64, 128)


def memory(setup: LookaheadSetup) -> Findings:
    """Peak memory of whole processes that answer the same prompts, drafted over plain.

    Raises:
        ValueError: a process failed.
    """
    setup.watcher.stage("processes", 2 * len(LENGTHS))
    prompts = [task.ids for task in setup.tasks]
    rows: list[dict[str, Any]] = []
    for length in LENGTHS:
        found = compare_memory(prompts, setup.new, torch.get_num_threads(), None, length)
        if "why" in found:
            raise ValueError(f"Memory could not be measured: {found['why']}")
        rows.append(found | {"paper": _printed(MEMORY, length)})
        setup.watcher.step()
        setup.watcher.step()
    table = Table(
        "decoding length", "plain, MiB", "drafted, MiB", "more", "paper: AntGLM-10B, A100", box=box.SIMPLE_HEAD,
        pad_edge=False, title="Peak memory of the whole process", title_justify="left", title_style="bold",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            str(row["decoding_length"]), f"{row['plain_bytes'] / 2**20:.1f}", f"{row['drafted_bytes'] / 2**20:.1f}",
            f"{row['overhead']:+.1%}", row["paper"],
        )  # fmt: skip

    def draw(figure: Any) -> None:
        axis = figure.add_subplot()
        axis.plot(LENGTHS, [100 * row["overhead"] for row in rows], "o-")
        plain_axis(axis, "Peak memory over plain decoding", "decoding length", "%")

    remark = "Two processes a row, of the same prompts; libraries are counted, and of 4M parameters they are the most."
    return Findings(rows, [table], draw, (6, 3.6), remarks=[remark])


def _printed(claim: Claim, length: int) -> str:
    """The paper's increase over decoding without Lookahead, which it calls a decoding length of 1."""
    with_it, without = float(claim.cell(str(length), "GiB")), float(claim.cell("1", "GiB"))
    return f"{with_it} GiB, {with_it / without - 1:+.1%}"
