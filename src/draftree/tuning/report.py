"""What tuning leaves behind: a table on the terminal, and the file with the choice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

from draftree.bench.machine import describe, now
from draftree.bench.report import Table
from draftree.tuning.file import Spec, write_tuned
from draftree.tuning.live import Judged
from draftree.tuning.search import Choice
from draftree.tuning.space import PLAIN

COLUMNS = (
    "candidate", "prompts", "speed over plain", "tokens/s", "tokens/s as replayed", "acceptance length",
    "acceptance length as replayed",
)  # fmt: skip
CAPTION = (
    "Speed: total tokens / total time; over plain decoding [95 % bootstrap]. Acceptance length: 1 + accepted / steps."
)


def render(choice: Choice) -> RichTable:
    """What ran for real, for a rich console; the choice in bold."""
    recorded, judge, lessons = choice.prompts
    title = (
        f"{choice.replays} settings replayed on {recorded} answers, {lessons} answers taught tries, up to {judge} "
        f"other prompts judged; {choice.seconds:.0f} s"
    )
    return table_of(choice.judged, title).rich(bold=choice.judged.index(choice.best))


def table_of(judged: Sequence[Judged], title: str) -> Table:
    """Candidates that ran for real next to what replay has predicted."""
    rows = []
    for one in judged:
        row: dict[str, Any] = {
            "candidate": one.candidate.label,
            "prompts": one.prompts,
            "tokens/s": one.row.speed.value,
        }
        row |= one.row.over[PLAIN.name].columns("speed over plain")
        if one.row.stats is not None and one.row.stats.drafted:
            row["acceptance length"] = f"{one.row.stats.acceptance_length:.3f}"
        if one.predicted is not None:
            row["tokens/s as replayed"] = one.predicted.speed
            row["acceptance length as replayed"] = f"{one.predicted.stats.acceptance_length:.3f}"
        rows.append(row)
    return Table(title, rows, COLUMNS, CAPTION)


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
    return write_tuned(path, model, spec, choice.best.candidate.node_budget, why(choice), more, trie, tokenizer)


def _warm(spec: Spec | None) -> Spec | None:
    """The Lookahead in a spec that starts from a trie, if there is one."""
    if spec is None:
        return None
    return next((part for part in (spec, *spec.parts) if part.kind == "lookahead" and part.warm), None)


def why(choice: Choice) -> list[str]:
    """The choice in three lines."""
    best = choice.best
    if best.candidate.spec is None:
        first = f"Plain decoding: none of {choice.replays} settings is sure to be faster here."
    else:
        options = _options(best.candidate.spec)
        first = f"{best.candidate.label}{f' ({options})' if options else ''}: {_over(best)}."
    others = [one for one in choice.judged if one is not best and one.candidate.spec is not None]
    second = "Nothing else was measured."
    if others:
        near = max(others, key=lambda one: (one.stage, one.over_plain))
        second = f"Next best: {near.candidate.label}, {_over(near)}; {choice.replays} settings were replayed."
    return [first, second, _reason(choice)]


def _reason(choice: Choice) -> str:
    """Why it is as fast as it is, or why nothing is faster."""
    best = choice.best if choice.best.candidate.spec is not None else None
    if best is None or best.row.stats is None:
        tried = max(one.over_plain for one in choice.judged if one.candidate.spec is not None)
        cause = "too few draft tokens are accepted, or rows cost too much"
        return f"The fastest drafting ran at {tried:.2f} of plain speed: {cause}."
    length = best.row.stats.acceptance_length
    text = f"A step brings {length:.2f} tokens"
    if best.predicted is not None:
        text += f" (replay predicted {best.predicted.stats.acceptance_length:.2f})"
    text += f" and takes {length / best.over_plain:.2f} plain ones"
    return f"{text}."


def _over(one: Judged) -> str:
    prompts = "1 prompt, too few for an interval" if one.prompts == 1 else f"{one.prompts} prompts"
    return f"{one.row.over[PLAIN.name]:.2f} of plain speed on {prompts}"


def _options(spec: Spec) -> str:
    parts = [spec, *spec.parts]
    return ", ".join(f"{name} {value}" for part in parts for name, value in part.options.items())
