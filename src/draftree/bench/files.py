"""Result files of a comparison: JSON, CSV, Markdown, one page, and answers in Spec-Bench's own format."""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from draftree.bench.case import COLUMNS, Result
from draftree.bench.case_report import CAPTION, remarks
from draftree.bench.compare import Comparison, file_name
from draftree.bench.pictures import method_colour, png
from draftree.bench.report import Report, Table
from draftree.bench.samples import Sample
from draftree.bench.verdict import verdict
from draftree.files import replacing, write_text

NESTED = ("stats", "differing_prompts", "by_set")  # of a row, what is no column


def write_all(found: Comparison, reports: Sequence[Report], folder: Path) -> list[Path]:
    """Write bench-compare.json, .csv, .md, .html and Spec-Bench's answers into `folder`; returns their paths."""
    report = comparison_report(found)
    table, text, html = (folder / f"bench-compare.{ending}" for ending in ("csv", "md", "html"))
    written = report.write(folder)
    answers = write_answers(found, folder)
    write_csv(report, table)
    write_text(text, "\n".join(markdown(found, reports)))
    write_text(html, page(found, reports))
    return [*written, table, text, html, answers]


def comparison_report(found: Comparison) -> Report:
    """All cases in one table, whose rows name model and case."""
    rows, lines, cases, verdicts = [], [], [], []
    for result in found.cases:
        named = {name: result.about[name] for name in ("model", "case")}
        rows += [named | row for row in result.entries()]
        lines += [f"{named['model']}, {line}" for line in remarks(result)]
        cases.append({"about": result.about} | result.facts())
        verdicts.append(f"{named['model']}, {named['case']}: {verdict(result)}")
    says = "Whole answers, by model, batch size, sampling and method"
    more = {"resumed": found.resumed, "cases": cases}
    tables = [Table(says, rows, ("model", "case", *COLUMNS))]
    return Report("compare", says, found.about, tables, lines, more, verdicts=verdicts)


def write_csv(report: Report, path: Path) -> None:
    """A line for each model, case, method and set."""
    lines: list[dict[str, Any]] = []
    for row in report.as_dict()["rows"]:
        plain = {name: value for name, value in row.items() if name not in NESTED}
        seconds = row["stats"]["seconds"] if row["stats"] else {}
        lines.append({"set": "all"} | plain | {f"{stage}_seconds": spent for stage, spent in seconds.items()})
        of_method = {name: row[name] for name in ("model", "case", "method", "name")}
        lines += [{"set": name} | of_method | figures for name, figures in row["by_set"].items()]
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, list(dict.fromkeys(name for line in lines for name in line)), restval="")
        writer.writeheader()
        writer.writerows(lines)


def markdown(found: Comparison, reports: Sequence[Report]) -> list[str]:
    """Lines of a Markdown page."""
    about = found.about
    lines = ["# Comparison", "", f"`{about['command']}` at commit {about['commit'] or 'unknown'}. {CAPTION}", ""]
    for report in reports:
        lines += [f"## {report.about['model']}, {report.about['case']}", "", *report.verdicts, ""]
        for table in report.tables:
            lines += [f"{table.title}.", "", *table.markdown(), ""]
        lines += [*(f"- {remark}" for remark in report.remarks), ""]
    return lines


def page(found: Comparison, reports: Sequence[Report]) -> str:
    """One HTML file: tables and pictures, nothing fetched, no script; without matplotlib it has no pictures."""
    here = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    pictures = [base64.b64encode((report.draw and png(report.draw)) or b"").decode() for report in reports]
    cases = list(zip(reports, pictures, strict=True))
    return here.get_template("page.html.j2").render(found=found, cases=cases, caption=CAPTION, colour=method_colour)


def write_answers(found: Comparison, folder: Path) -> Path:
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
                rows = _spec_bench(result, name, found.tokenizers[model], model)
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
