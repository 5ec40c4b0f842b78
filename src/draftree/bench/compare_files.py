"""Result files of a comparison: JSON, CSV, Markdown, and answers in Spec-Bench's own format."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftree.bench.compare import Comparison, Measured
from draftree.bench.compare_case import Result
from draftree.bench.compare_methods import REFERENCE, label_of
from draftree.bench.compare_plane import points_of
from draftree.bench.summary import Estimate, Row, shown
from draftree.engine.stats import STAGES

COLUMNS = (
    "model", "case", "set", "method", "label", "tokens", "seconds", "tokens_per_second", "tokens_per_second_low",
    "tokens_per_second_high", "over_hf_generate", "over_hf_generate_low", "over_hf_generate_high", "over_plain",
    "over_plain_low", "over_plain_high", "acceptance_length", "overhead_efficiency", "steps", "drafted", "accepted",
    *(f"{stage}_seconds" for stage in STAGES), "differing_prompts", "not_measured", "commit", "device", "dtype",
    "threads", "command",
)  # fmt: skip
SHOWN = 10  # differing prompts told in Markdown; JSON has all


def write_json(found: Comparison, folder: Path) -> Path:
    """Write bench-compare.json into `folder`; returns its path."""
    models = []
    for measured in found.models:
        plane = measured.plane
        models.append(
            {
                "model": measured.model,
                "cases": [result.as_dict() for result in measured.cases],
                "plane": None
                if plane is None
                else plane.as_dict() | {"points": [p.as_dict() for p in points_of(plane)]},
                "step_seconds": measured.costs,
            }
        )
    told = {"about": found.about, "resumed": found.resumed, "models": models}
    path = folder / "bench-compare.json"
    path.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def write_csv(found: Comparison, folder: Path) -> Path:
    """Write bench-compare.csv into `folder`, a line for each model, case, method and set; returns its path."""
    path = folder / "bench-compare.csv"
    with path.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS, restval="")
        writer.writeheader()
        for measured, result in _results(found):
            made = {key: result.about[key] for key in ("commit", "device", "dtype", "threads", "command")}
            made |= {"model": measured.model, "case": result.about["case"]}
            for name in result.names:
                named = made | {"method": name, "label": label_of(name)}
                if name not in result.rows:
                    writer.writerow(named | {"set": "all", "not_measured": result.unmeasured.get(name, "")})
                    continue
                row = result.rows[name]
                writer.writerow(named | {"set": "all", "differing_prompts": len(row.parted)} | _csv(row, result))
                for label, own in row.by_set.items():
                    writer.writerow(named | {"set": label} | _csv(own, result))
    return path


def _results(found: Comparison) -> Iterator[tuple[Measured, Result]]:
    for measured in found.models:
        for result in (*measured.cases, measured.plane):
            if result is not None:
                yield measured, result


def _csv(row: Row, result: Result) -> dict[str, Any]:
    entry: dict[str, Any] = {"tokens": row.tokens, "seconds": row.seconds}
    for column, estimate in (
        ("tokens_per_second", row.speed),
        ("over_hf_generate", row.over.get(REFERENCE)),
        ("over_plain", row.over.get(result.plain)),
    ):
        if estimate is not None:
            entry |= {column: estimate.value, f"{column}_low": estimate.low, f"{column}_high": estimate.high}
    stats = row.stats
    if stats is not None:
        entry |= {"steps": stats.steps, "drafted": stats.drafted, "accepted": stats.accepted}
        entry |= {f"{stage}_seconds": stats.seconds[stage] for stage in STAGES}
        entry |= {"acceptance_length": stats.acceptance_length, "overhead_efficiency": row.efficiency(result.plain)}
    return entry


def write_markdown(found: Comparison, folder: Path) -> Path:
    """Write bench-compare.md into `folder`; returns its path."""
    about = found.about
    lines = [
        "# Comparison",
        "",
        f"`{about['command']}` at commit {about['commit'] or 'unknown'}: {about['threads']} threads of "
        f"{about['device']}. Total tokens over total time, in brackets 95 % bootstrap intervals over prompts; "
        "acceptance length is 1 + accepted / steps; overhead efficiency is the speed over plain decoding over that.",
        "",
    ]
    for measured in found.models:
        lines += [f"## {measured.model}", ""]
        for result in measured.cases:
            lines += _case(result)
        if measured.plane is not None:
            lines += _plane(measured.plane)
    path = folder / "bench-compare.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _case(result: Result) -> list[str]:
    about = result.about
    lines = [
        f"### {about['case']}",
        "",
        f"{about['dtype']}, {about['prompts']} prompts of {len(about['sets'])} sets, up to "
        f"{about['settings']['max_new_tokens']} new tokens, {about['settings']['rounds']} rounds, trie warmed with "
        f"{about['warm_prompts']} answers.",
        "",
        "| method | tokens/s | over HF generate | over plain | acceptance length | overhead efficiency | differing |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in result.names:
        if name not in result.rows:
            lines.append(f"| {label_of(name)} | not measured | | | | | |")
            continue
        row = result.rows[name]
        drafts = row.stats is not None and row.stats.drafted > 0
        length = f"{row.stats.acceptance_length:.2f}" if drafts and row.stats else ""
        efficiency = row.efficiency(result.plain)
        cells = [
            label_of(name), interval(row.speed, "{:.0f}"), interval(row.over.get(REFERENCE), "{:.2f}"),
            interval(row.over.get(result.plain), "{:.2f}"), length,
            f"{efficiency:.2f}" if drafts and efficiency is not None else "", differing(result, name),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    slow, compared = result.disturbed
    quiet = f"{slow} of {compared} answers took over twice the time of the same answer in another round."
    lines += ["", quiet, ""] if compared else [""]
    lines += [f"- {label_of(name)}: {note}." for name, note in remarks(result)]
    for name, row in result.rows.items():
        lines += [f"- {label_of(name)}, prompt {task.prompt.id}: {where}" for task, where in row.parted[:SHOWN]]
    return [*lines, ""] if lines[-1] else lines


def _plane(result: Result) -> list[str]:
    lines = [
        f"### Accepted length and time to verify, {result.about['case']}",
        "",
        "| drafters | acceptance length | time of a pass, over plain | speed, over plain |",
        "|---|---|---|---|",
    ]
    for p in points_of(result):
        lines.append(f"| {label_of(p.method)} | {p.length:.2f} | {p.verify:.2f} | {p.speed:.2f} |")
    return [*lines, ""]


def interval(estimate: Estimate | None, number: str) -> str:
    """An estimate as Markdown and HTML print it; nothing for None."""
    return "" if estimate is None else shown(estimate, number).replace("\\[", "[")


def differing(result: Result, name: str) -> str:
    """How many prompts a method answers otherwise than the reference; nothing where that was not compared."""
    return "" if name in result.uncompared else str(len(result.rows[name].parted))


def remarks(result: Result) -> list[tuple[str, str]]:
    """(method, what else to know of it), why it was not measured first."""
    told = [(name, f"not measured: {result.unmeasured[name]}") for name in result.names if name in result.unmeasured]
    return [*told, *result.notes.items()]


def write_answers(found: Comparison, tokenizers: dict[str, Any], folder: Path) -> Path:
    """Write Spec-Bench's answer files, answers/MODEL/CASE/METHOD.jsonl, into `folder`; returns the answers' folder.

    Each line has `choices`, one for every round, with `turns`, `decoding_steps`, `new_tokens` and `wall_time` for each
    turn and `accept_lengths`, tokens of every step of all turns. Steps of methods that do not tell them are the passes
    of plain decoding.

    Args:
        found: what to write.
        tokenizers: by model's name.
        folder: where to.
    """
    out = folder / "answers"
    for measured, result in _results(found):
        own = out / file_name(measured.model) / file_name(result.about["case"])
        own.mkdir(parents=True, exist_ok=True)
        for name in result.rows:
            rows = _spec_bench(result, name, tokenizers[measured.model], measured.model)
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (own / f"{file_name(name)}.jsonl").write_text(text, encoding="utf-8")
    return out


def _spec_bench(result: Result, method: str, tokenizer: Any, model: str) -> list[dict[str, Any]]:
    rows = []
    for number, task in enumerate(result.tasks):
        own = [s for s in result.samples if s.method == method and s.task == number]
        choices = []
        for index in sorted({s.round for s in own}):
            turns = sorted((s for s in own if s.round == index), key=lambda s: s.turn)
            choices.append(
                {
                    "index": index,
                    "turns": [tokenizer.decode(s.answer.ids, skip_special_tokens=True) for s in turns],
                    "decoding_steps": [len(s.answer.lengths) for s in turns],
                    "new_tokens": [len(s.answer.ids) for s in turns],
                    "wall_time": [s.answer.seconds for s in turns],
                    "accept_lengths": [n for s in turns for n in s.answer.lengths],
                }
            )
        if choices:
            rows.append(
                {
                    "question_id": int(task.prompt.id) if task.prompt.id.isdecimal() else task.prompt.id,
                    "category": task.prompt.set,
                    "model_id": f"{model}-{method}",
                    "choices": choices,
                }
            )
    return rows


def file_name(text: str) -> str:
    """A name that every file system takes."""
    return re.sub(r"[^\w.+-]+", "-", Path(text).name).strip("-")
