"""Result files of a comparison: JSON, CSV, Markdown, one page, and answers in Spec-Bench's own format."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from draftree.bench.case import Result
from draftree.bench.compare import Comparison
from draftree.bench.kit import REFERENCE, label_of
from draftree.bench.machine import MADE
from draftree.bench.pictures import case_data
from draftree.bench.report import CAPTION, HEADINGS, cells, remarks, title, write_json
from draftree.bench.samples import Sample
from draftree.bench.summary import Row
from draftree.engine.stats import STAGES
from draftree.files import replacing, write_text


def write_all(found: Comparison, tokenizers: dict[str, Any], folder: Path) -> list[Path]:
    """Write bench-compare.json, .csv, .md, .html and Spec-Bench's answers into `folder`; returns their paths."""
    table, text, html = (folder / f"bench-compare.{ending}" for ending in ("csv", "md", "html"))
    data = write_json(found.as_dict(), folder / "bench-compare.json")
    write_csv(found, table)
    write_text(text, "\n".join(markdown(found)))
    write_text(html, page(found))
    return [data, table, text, html, write_answers(found, tokenizers, folder)]


def write_csv(found: Comparison, path: Path) -> None:
    """A line for each model, case, method and set."""
    lines: list[dict[str, Any]] = []
    for result in (result for cases in found.models.values() for result in cases):
        made = {name: result.about[name] for name in ("model", "case", *MADE)}
        for name in result.names:
            named = made | {"method": name, "label": label_of(name), "set": "all"}
            row = result.rows.get(name)
            if row is None:
                lines.append(named | {"not_measured": result.unmeasured.get(name, "")})
                continue
            lines.append(named | {"differing_prompts": len(row.parted)} | _flat(row, result))
            lines += [named | {"set": one} | _flat(own, result) for one, own in row.by_set.items()]
    with replacing(path) as aside, aside.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, list(dict.fromkeys(name for line in lines for name in line)), restval="")
        writer.writeheader()
        writer.writerows(lines)


def _flat(row: Row, result: Result) -> dict[str, Any]:
    entry: dict[str, Any] = {"tokens": row.tokens, "seconds": row.seconds}
    over = {"over_hf_generate": row.over.get(REFERENCE), "over_plain": row.over.get(result.plain)}
    for column, estimate in {"tokens_per_second": row.speed, **over}.items():
        if estimate is not None:
            entry |= {column: estimate.value, f"{column}_low": estimate.low, f"{column}_high": estimate.high}
    stats = row.stats
    if stats is not None:
        entry |= {"steps": stats.steps, "drafted": stats.drafted, "accepted": stats.accepted}
        entry |= {f"{stage}_seconds": stats.seconds[stage] for stage in STAGES}
        entry |= {"acceptance_length": stats.acceptance_length, "overhead_efficiency": row.efficiency(result.plain)}
    return entry


def markdown(found: Comparison) -> list[str]:
    """Lines of a Markdown page."""
    about = found.about
    made = f"`{about['command']}` at commit {about['commit'] or 'unknown'}. {CAPTION}the reference."
    lines = ["# Comparison", "", made, ""]
    for name, cases in found.models.items():
        lines += [f"## {name}", ""]
        for result in cases:
            lines += [f"### {result.about['case']}", "", f"{title(result)}.", ""]
            lines += [f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
            lines += [f"| {' | '.join(cells(result, method))} |" for method in result.names]
            lines += ["", *(f"- {remark}" for remark in remarks(result)), ""]
    return lines


def page(found: Comparison) -> str:
    """One HTML file: tables and pictures, nothing fetched, no script; without matplotlib it has no pictures."""
    here = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    models = {name: [_for_page(result) for result in cases] for name, cases in found.models.items()}
    return here.get_template("page.html.j2").render(
        about=found.about, resumed=found.resumed, headings=HEADINGS, caption=CAPTION, models=models
    )


def _for_page(result: Result) -> dict[str, Any]:
    lines = [cells(result, method) for method in result.names]
    shown = {"title": title(result), "name": result.about["case"], "lines": lines, "remarks": remarks(result)}
    return shown | {"picture": case_data(result)}


def write_answers(found: Comparison, tokenizers: dict[str, Any], folder: Path) -> Path:
    """Write Spec-Bench's answer files, answers/MODEL/CASE/METHOD.jsonl, into `folder`; returns the answers' folder.

    Each line has `choices`, one for every round, with `turns`, `decoding_steps`, `new_tokens` and `wall_time` for each
    turn and `accept_lengths`, tokens of every step of all turns.
    """
    out = folder / "answers"
    for model, cases in found.models.items():
        for result in cases:
            own = out / file_name(model) / file_name(result.about["case"])
            own.mkdir(parents=True, exist_ok=True)
            for name in result.rows:
                rows = _spec_bench(result, name, tokenizers[model], model)
                text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                write_text(own / f"{file_name(name)}.jsonl", text)
    return out


def _spec_bench(result: Result, method: str, tokenizer: Any, model: str) -> list[dict[str, Any]]:
    own: dict[int, dict[int, list[Sample]]] = {}  # by task and round, the samples of all turns
    for sample in sorted(result.samples, key=lambda s: (s.task, s.round, s.turn)):
        if sample.method == method:
            own.setdefault(sample.task, {}).setdefault(sample.round, []).append(sample)
    rows = []
    for task, rounds in own.items():
        prompt = result.tasks[task].prompt
        choices = [
            {
                "index": index,
                "turns": [tokenizer.decode(s.answer.ids, skip_special_tokens=True) for s in turns],
                "decoding_steps": [len(s.answer.lengths) for s in turns],
                "new_tokens": [len(s.answer.ids) for s in turns],
                "wall_time": [s.answer.seconds for s in turns],
                "accept_lengths": [n for s in turns for n in s.answer.lengths],
            }
            for index, turns in rounds.items()
        ]
        question = int(prompt.id) if prompt.id.isdecimal() else prompt.id
        facts = {"question_id": question, "category": prompt.set, "model_id": f"{model}-{method}"}
        rows.append(facts | {"choices": choices})
    return rows


def file_name(text: str) -> str:
    """A name that every file system takes."""
    return re.sub(r"[^\w.+-]+", "-", Path(text).name).strip("-")
