"""Makes docs/results.md, the tables of README.md and other pages, and the table of the papers' claims from
benchmarks/results/*.json, and the list of experiments in the manual: `make results`.

A result file is what `draftree bench run NAME`, `quick`, `compare` or `speed` has written, as it is.
`python -m benchmarks.report FILE` checks it and copies it to benchmarks/results/NAME.json; `NAME=FILE` gives it another
name. What the page shows, in which order, and what the others show stand in benchmarks/results/shown.toml. In those a
table stands between `<!-- results:NAME -->` and `<!-- /results:NAME -->`, NAME being one of the `table`s there.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.harness.experiment import experiments
from benchmarks.harness.report import counted
from benchmarks.harness.tables import markdown, shown
from benchmarks.papers import claims
from draftree.bench.report import Table
from draftree.files import replacing, write_text

RESULTS = Path(__file__).parent / "results"
SHOWN = tomllib.loads((RESULTS / "shown.toml").read_text(encoding="utf-8"))
PAGE = Path(__file__).parents[1] / "docs" / "results.md"
MANUAL = PAGE.parent / "developer" / "experiments.md"
OTHERS = [
    PAGE.parent / page
    for page in (
        "../README.md",
        "serving.md",
        "scaling.md",
        "structured_output.md",
        "runners.md",
        "engines.md",
        "gguf.md",
        "methods/README.md",
        "methods/merge.md",
    )
]
USUAL = "AMD EPYC"  # what all tables of the page were measured on that name no other machine
ABOUT = ("commit", "command", "device", "threads", "dtype", "model")
HEAD = """# Results

This page is made by `make results` from the files in `benchmarks/results/`, which hold every row with its interval.
Each table names the commit that it was made at and the command as it was then;
[Experiments](developer/experiments.md) has the present names. Acceptance length is 1 + accepted / steps; in
brackets are 95 % bootstrap intervals over prompts. Unless a table says otherwise all is measured on 2-core AMD EPYC
machines in float32, on the embedded 4M model, or on one inflated from it: an inflated model has the cost of its
size and the small one's text ([how](developer/experiments.md#inflated-models)).
"""


def read(path: Path) -> dict[str, Any]:
    """Return the facts of a result file; raise a ValueError for an incomplete file, or one without its origin."""
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        about, rows, complete = facts["about"], facts["rows"], facts["complete"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no result file: name one that draftree bench has written.") from None
    if not complete or not rows:
        raise ValueError(f"{path} is not complete: a run that was stopped is no result.")
    missing = [name for name in ABOUT if about.get(name) is None]
    if missing:
        raise ValueError(f"{path.name} does not say its {', '.join(missing)}: a result without them is no result.")
    return facts


def page() -> str:
    """Return the page's text."""
    lines = [HEAD]
    for entry in SHOWN["page"]:
        facts = read(RESULTS / entry["file"])
        head, *table = block_of(facts, entry)
        if not (device := facts["about"]["device"]).startswith(USUAL):
            head += f" {device}."
        lines += [f"## {entry.get('title', facts['says'])}", "", head, *table, ""]
    return "\n".join(lines)


def block_of(facts: dict[str, Any], entry: dict[str, Any]) -> list[str]:
    """Return lines of a result: what it shows and how it was made, and its table; as an entry of shown.toml has it."""
    table = pd.DataFrame(facts["rows"])
    for name, values in entry.get("only", {}).items():
        table = table[table[name].isin(values)]
    about = facts["about"]
    text = entry.get("text", " ".join(facts["remarks"]))
    made = f"`{about['command']}` at {about['commit']}; {about['model']}, {counted(about['threads'], 'thread')}."
    columns = entry.get("columns", facts["columns"])
    return [f"{text} {made}", "", *markdown(shown(table, columns=columns))]


def side_by_side(entry: dict[str, Any], folder: Path) -> list[str]:
    """Return the lines of a table of one figure of several results, a column each, as an entry of shown.toml has it.

    With `across`, there is a column for every value of that column too, and no intervals.
    """
    by = [entry["by"]] if isinstance(entry["by"], str) else entry["by"]
    value, across = entry["value"], entry.get("across")
    columns: dict[str, pd.DataFrame] = {}
    made, results = [], []
    for name, file in entry["files"].items():
        facts = read(folder / file)
        results.append(facts)
        table = pd.DataFrame(facts["rows"])
        if across is None:
            ends = {f"{value}_{end}": f"{name}_{end}" for end in ("low", "high")}
            columns[name] = table[[*by, value, *ends]].rename(columns={value: name} | ends)
        else:
            for one, own in table.groupby(across, sort=False):
                columns[f"{one}, {name}"] = own[[*by, value]].rename(columns={value: f"{one}, {name}"})
        made.append(f"`{facts['about']['command']}` at {facts['about']['commit']}")
    keys = pd.concat([own[by] for own in columns.values()]).drop_duplicates()  # of a row that not all of them have too
    joined = reduce(lambda left, right: left.merge(right, on=by, how="left"), columns.values(), keys)
    about = f"{facts['about']['device']}, {counted(facts['about']['threads'], 'thread')}, {facts['about']['dtype']}"
    table = shown(joined, columns=[*by, *columns])
    text = entry["text"].replace("DIFFERING", differing(results))
    return [f"{text} {about}; {', '.join(made)}.", "", *markdown(table)]


def differing(results: Sequence[Mapping[str, Any]]) -> str:
    """Return in words how many answers differ from those of the first engine's plain decoding."""
    rows = [row for facts in results for row in facts["rows"] if "differing" in row]
    differ, answers = (sum(row[name] for row in rows) for name in ("differing", "answers"))
    return "no answer differs" if not differ else f"{differ} of {answers} answers differ from plain decoding's"


def tables(text: str) -> str:
    """Return a page with new tables between its result markers; raise a ValueError for an unknown block."""
    for name in re.findall(r"<!-- results:([\w-]+) -->", text):
        begin, end = f"<!-- results:{name} -->", f"<!-- /results:{name} -->"
        if name not in SHOWN["table"] or text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{begin} needs a table in benchmarks/results/shown.toml, and one {end}.")
        entry = SHOWN["table"][name]
        if "files" in entry:
            block = "\n".join(side_by_side(entry, RESULTS))
        else:
            facts = read(RESULTS / entry["file"])
            head, *table = block_of(facts, entry)
            block = "\n".join([f"{head} {facts['about']['device']}, {facts['about']['dtype']}.", *table])
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{block}\n\n{end}{rest.split(end)[1]}"
    return text


def manual(text: str) -> str:
    """Return the manual's page with a new list of experiments; those that run the same share a line."""
    begin, end = "<!-- experiments -->", "<!-- /experiments -->"
    names: dict[str, list[str]] = {}
    for name, experiment in experiments().items():
        names.setdefault(experiment.says, []).append(f"`{name}`")
    rows = [{"names": ", ".join(own), "what runs": says} for says, own in names.items()]
    made = "\n".join(markdown(Table("", rows, ("names", "what runs"))))
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{made}\n\n{end}{rest.split(end)[1]}"


def keep(argument: str, folder: Path = RESULTS) -> Path:
    """Copy the result FILE or NAME=FILE, which `read` checks, into the folder of results; returns where it is."""
    name, sign, file = argument.partition("=")
    path = Path(file if sign else argument)
    read(path)
    kept = folder / f"{name if sign else path.stem.removeprefix('bench-').removeprefix('run-')}.json"
    with replacing(kept) as temporary:
        shutil.copyfile(path, temporary)
    return kept


def main(arguments: list[str]) -> None:
    """Keep the results named, and write the page and the tables of others."""
    try:
        for argument in arguments:
            print(f"Kept: {keep(argument)}")
        write_text(PAGE, page())
        write_text(claims.PAGE, claims.page(RESULTS))
        for place in OTHERS:
            write_text(place, tables(place.read_text(encoding="utf-8")))
        write_text(MANUAL, manual(MANUAL.read_text(encoding="utf-8")))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
