"""Makes docs/results.md, the tables of README.md and other pages, and the table of the papers' claims from
benchmarks/results/*.json, and the list of experiments in the manual: `make results`.

A result file is what `draftree bench run NAME`, `quick`, `compare` or `speed` has written, as it is.
`python -m benchmarks.report FILE` checks it and copies it to benchmarks/results/NAME.json; `NAME=FILE` gives it another
name. What the page shows, in which order, and what the others show stand in benchmarks/results/shown.toml. In those a
table stands between `<!-- results:NAME -->` and `<!-- /results:NAME -->`, NAME being one of the `table`s there. Tables
have plots in docs/pictures/results.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.chart import SERIES, Bar, chart
from benchmarks.harness.experiment import experiments
from benchmarks.harness.plots import NAMING
from benchmarks.harness.report import counted
from benchmarks.harness.tables import markdown, shown
from benchmarks.papers import claims
from draftree.bench.report import Table, number
from draftree.files import replacing, write_text
from draftree.pages import colour_of, drafter_of

RESULTS = Path(__file__).parent / "results"
SHOWN = tomllib.loads((RESULTS / "shown.toml").read_text(encoding="utf-8"))
PAGE = Path(__file__).parents[1] / "docs" / "results.md"
PLOTS = PAGE.parent / "pictures" / "results"
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
        "images.md",
        "methods/README.md",
        "methods/published.md",
        "methods/merge.md",
    )
]
USUAL = "AMD EPYC"  # what all tables of the page were measured on that name no other machine
ABOUT = ("commit", "command", "device", "threads", "dtype", "model")
HEAD = """# Results

`make results` makes this page from `benchmarks/results/`, which has every row with its interval. Each table names its
commit and its command as it was then; [Experiments](developer/experiments.md) has the present names. Acceptance length
is 1 + accepted / steps; brackets are 95 % bootstrap intervals over prompts. Unless a table says otherwise all is
measured on 2-core AMD EPYC machines in float32, on the embedded 4M model or one inflated from it, which has the cost of
its size and the small one's text ([how](developer/experiments.md#inflated-models)).
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
        table = [*picture(Path(entry["file"]).stem, entry, PAGE), *table]
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
    return [f"{text} {made}", "", *markdown(in_words(shown(table, columns=columns)))]


NAMED = re.compile("|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in SHOWN["names"]))


def word(name: str) -> str:
    """Return the name of a thing of ours in words: "lookahead+draft-model" as "Lookahead + draft model"."""
    return NAMED.sub(lambda found: SHOWN["names"][found[0]], re.sub(r"(?<=[\w-])\+(?=\w)", " + ", name))


def heading(column: str) -> str:
    """Return a column's heading in words."""
    return SHOWN["headings"].get(column) or word(column).replace("_", " ")


def in_words(table: Table) -> Table:
    """Return a table with its headings and the names of things in words."""
    rows: list[dict[str, Any]] = []
    for row in table.rows:
        ends = {f"{heading(name)}_{end}": row.get(f"{name}_{end}") for name in table.columns for end in ("low", "high")}
        cells = {name: word(row[name]) if isinstance(row.get(name), str) else row.get(name) for name in table.columns}
        rows.append(ends | {heading(name): cell for name, cell in cells.items()})
    return Table(table.title, rows, [heading(name) for name in table.columns])


def joined(entry: dict[str, Any], folder: Path = RESULTS) -> tuple[pd.DataFrame, list[str], list[dict[str, Any]]]:
    """Return one figure of several results as a table, its columns besides `by`, and the facts of the results."""
    by = [entry["by"]] if isinstance(entry["by"], str) else entry["by"]
    value, across = entry["value"], entry.get("across")
    columns: dict[str, pd.DataFrame] = {}
    results = [read(folder / file) for file in entry["files"].values()]
    for name, facts in zip(entry["files"], results, strict=True):
        table = pd.DataFrame(facts["rows"])
        if across is None:
            ends = {f"{value}_{end}": f"{name}_{end}" for end in ("low", "high")}
            columns[name] = table[[*by, value, *ends]].rename(columns={value: name} | ends)
        else:
            for one, own in table.groupby(across, sort=False):
                column = one if len(results) == 1 else f"{one}, {name}"
                columns[column] = own[[*by, value]].rename(columns={value: column})
    keys = pd.concat([own[by] for own in columns.values()]).drop_duplicates()  # of a row that not all of them have too
    table = reduce(lambda left, right: left.merge(right, on=by, how="left"), columns.values(), keys)
    return table, list(columns), results


def side_by_side(entry: dict[str, Any], folder: Path) -> list[str]:
    """Return the lines of a table of one figure of several results, a column each, as an entry of shown.toml has it.

    With `across`, there is a column for every value of that column too, and no intervals.
    """
    table, columns, results = joined(entry, folder)
    by = [entry["by"]] if isinstance(entry["by"], str) else entry["by"]
    made = [f"`{facts['about']['command']}` at {facts['about']['commit']}" for facts in results]
    about = results[-1]["about"]
    where = f"{about['device']}, {counted(about['threads'], 'thread')}, {about['dtype']}"
    text = entry["text"].replace("DIFFERING", differing(results))
    return [f"{text} {where}; {', '.join(made)}.", "", *markdown(in_words(shown(table, columns=[*by, *columns])))]


def plot(entry: dict[str, Any]) -> str:
    """Return the plot of a table: bars of the columns `plot` of its entry in shown.toml, named by those in `names`."""
    if "files" in entry:
        table, series, _ = joined(entry)
        names = [entry["by"]] if isinstance(entry["by"], str) else entry["by"]
        title, mark = entry["value"], entry["value"].startswith("over")
    else:
        facts = read(RESULTS / entry["file"])
        table, series = pd.DataFrame(facts["rows"]), entry["plot"]
        for name, values in (entry.get("only", {}) | entry.get("plot_only", {})).items():
            table = table[table[name].isin(values)]
        names = entry.get("names") or [next(iter(entry.get("columns", facts["columns"])))]
        title, mark = series[0], any(series[0].startswith(start) for start in ("over", "seconds_a_token_over"))
    alone = len(series) == 1
    rows = []
    for _, row in table.iterrows():
        bars = []
        for name, colour in zip(series, SERIES, strict=False):
            value, low, high = (row.get(name + end) for end in ("", "_low", "_high"))
            if pd.isna(value):
                continue
            if pd.isna(low):
                low = high = None
            look = shade(row) if alone else colour
            told = number(value) + (f" [{number(low)}, {number(high)}]" if alone and low is not None else "")
            bars.append(Bar("" if alone else heading(name), value, low, high, look, told))
        if bars:
            rows.append((", ".join(word(str(row[name])) for name in names if pd.notna(row[name])), bars))
    title = entry.get("plot_title", heading(title))
    return chart(title[0].upper() + title[1:], rows, 1.0 if mark else None)


def shade(row: pd.Series) -> str:
    """Return the colour of a bar: its drafter's; other engines are grey, plain decoding is darker."""
    names = [str(row[name]).split(",")[0] for name in ("name", *NAMING) if name in row]
    if row.get("engine", "draftree") != "draftree" or any(name.startswith(("hf-", "HF ")) for name in names):
        return "t"
    return next((colour_of(name) for name in names if drafter_of(name)), "p")


def picture(name: str, entry: dict[str, Any], place: Path) -> list[str]:
    """Write the plot of a table, and return the lines that show it on the page `place`; none without a plot."""
    if "plot" not in entry:
        return []
    text, file = plot(entry), PLOTS / f"{name}.svg"
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        file.parent.mkdir(exist_ok=True)
        write_text(file, text)
    title = re.search("<title>(.*?)</title>", text)
    assert title is not None
    return ["", f"![{title[1]}]({Path(os.path.relpath(file, place.parent)).as_posix()})"]


def differing(results: Sequence[Mapping[str, Any]]) -> str:
    """Return in words how many answers differ from those of the first engine's plain decoding."""
    rows = [row for facts in results for row in facts["rows"] if "differing" in row]
    differ, answers = (sum(row[name] for row in rows) for name in ("differing", "answers"))
    return "no answer differs" if not differ else f"{differ} of {answers} answers differ from plain decoding's"


def tables(text: str, place: Path) -> str:
    """Return the text of the page `place` with new tables between its result markers.

    Raises:
        ValueError: an unknown block.
    """
    for name in re.findall(r"<!-- results:([\w-]+) -->", text):
        begin, end = f"<!-- results:{name} -->", f"<!-- /results:{name} -->"
        if name not in SHOWN["table"] or text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{begin} needs a table in benchmarks/results/shown.toml, and one {end}.")
        entry = SHOWN["table"][name]
        if "files" in entry:
            head, *table = side_by_side(entry, RESULTS)
        else:
            facts = read(RESULTS / entry["file"])
            head, *table = block_of(facts, entry)
            head = f"{head} {facts['about']['device']}, {facts['about']['dtype']}."
        block = "\n".join([head, *picture(name, entry, place), *table])
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{block}\n\n{end}{rest.split(end)[1]}"
    return text


def manual(text: str) -> str:
    """Return the manual's page with a new list of experiments; the tables and figures of a paper share a line."""
    begin, end = "<!-- experiments -->", "<!-- /experiments -->"
    names: dict[str, list[str]] = {}
    for name, experiment in experiments().items():
        paper = experiment.source.partition(",")[0]
        says = f"The tables and figures of {paper}." if re.search(r"-(table|figure)\d+$", name) else experiment.says
        names.setdefault(says, []).append(f"`{name}`")
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
            write_text(place, tables(place.read_text(encoding="utf-8"), place))
        write_text(MANUAL, manual(MANUAL.read_text(encoding="utf-8")))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
