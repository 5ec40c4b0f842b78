"""What tuning leaves behind: a table on the terminal, and the file with the choice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from draftree.bench.machine import describe, now
from draftree.bench.summary import shown
from draftree.tuning.check import Checked
from draftree.tuning.file import Spec, write_tuned
from draftree.tuning.search import PLAIN, Choice


def render(choice: Choice) -> Table:
    """What ran for real, for a rich console."""
    recorded, judge, lessons = choice.prompts
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{choice.replays} settings replayed on {recorded} answers, {lessons} answers taught tries, up to "
        f"{judge} other prompts judged; {choice.seconds:.0f} s",
        title_justify="left",
        caption="Speed: total tokens / total time over plain decoding, \\[95 % bootstrap]. Acceptance length: "
        "1 + accepted / steps, live and as replayed.",
        caption_justify="left",
    )
    table.add_column("candidate")
    for heading in ("prompts", "speed over plain", "acceptance length", "as replayed"):
        table.add_column(heading, justify="right")
    for one in choice.judged:
        stats = one.row.stats
        table.add_row(
            one.candidate.label,
            str(one.prompts),
            escape(shown(one.row.over[PLAIN.name], "{:.2f}")),
            f"{stats.acceptance_length:.2f}" if stats is not None and stats.drafted else "-",
            f"{one.predicted.stats.acceptance_length:.2f}" if one.predicted is not None else "-",
            style="bold" if one is choice.best else "",
        )
    return table


def check_table(rows: Sequence[Checked]) -> Table:
    """Predicted against real acceptance, for a rich console."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"Replay against real runs, {rows[0].prompts if rows else 0} prompts",
        title_justify="left",
        caption="Acceptance length: 1 + accepted / steps. Trees sized by cost depend on what steps take, and are only "
        "predicted as well as that: the last column replays them with the real run's times.",
        caption_justify="left",
    )
    table.add_column("candidate")
    for heading in (
        "live",
        "replayed",
        "ratio",
        "by the run's\nown times",
        "worst set",
        "live\ntokens/s",
        "predicted\ntokens/s",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.candidate.label,
            f"{row.live:.3f}",
            f"{row.replayed:.3f}",
            f"{row.replayed / row.live:.4f}",
            "" if row.by_its_times is None else f"{row.by_its_times:.3f}",
            f"{row.worst_set[0]} {row.worst_set[1]:.3f}",
            f"{row.live_speed:.0f}",
            f"{row.replayed_speed:.0f}",
        )
    return table


def write_choice(choice: Choice, model: Any, tokenizer: Any, path: Path) -> list[Path]:
    """Write the choice to `path`, and next to it a trie that has seen all recorded answers; returns the paths."""
    spec = choice.best.candidate.spec
    warm = _warm(spec)
    trie = None if warm is None else choice.space.trie(warm, choice.texts)
    about = describe(model, None)
    more = {
        "made": {key: about[key] for key in ("commit", "versions")} | {"when": now()},
        "judged": [one.as_dict() for one in choice.judged],
    }
    return write_tuned(path, model, spec, choice.best.candidate.node_budget, choice.why(), more, trie, tokenizer)


def _warm(spec: Spec | None) -> Spec | None:
    """The Lookahead in a spec that starts from a trie, if there is one."""
    if spec is None:
        return None
    return next((part for part in (spec, *spec.parts) if part.kind == "lookahead" and part.warm), None)
