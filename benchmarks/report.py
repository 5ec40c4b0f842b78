"""Makes docs/results.md and the tables of the README from benchmarks/results/*.json: `make results`.

A result file holds a table (`columns`, `rows`; X_low and X_high are the interval of X), a `title` and `text` for the
page, its place there (`order`; null keeps it off the page), and under `about` the commit, command, device, threads,
dtype and model that it was made with. In the README a table stands between `<!-- results:NAME -->` and
`<!-- /results:NAME -->`, NAME being one of `BLOCKS`. `python -m benchmarks.report FILE` makes such a file of one that
`draftree bench run` wrote.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.harness.tables import markdown

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "results.md"
README = Path(__file__).parents[1] / "README.md"
BLOCKS: dict[str, tuple[str, list[str]]] = {  # of the README, by name: the file, and its columns if not all
    "400m": ("inflate-400m.json", []),
    "400m-answers": ("gate-400m.json", ["drafter", "over plain", "over best static", "acceptance length"]),
    "embedded": ("quick.json", ["method", "tokens/s", "over HF generate", "acceptance length"]),
}
RENAMED = {"loop host": "cpu runner", "hooked host": "hooked runner"}  # what older files call the runners
ABOUT = ("commit", "command", "device", "threads", "dtype", "model")
HEAD = """# Results

This page is made by `make results` from the files in `benchmarks/results/`, which hold every row with its interval.
Each table names the commit that it was made at and the command as it was then;
[Experiments](developer/experiments.md) tells the present names. Acceptance length is 1 + accepted / steps; in
brackets are 95 % bootstrap intervals over prompts. All is measured on one 2-core AMD EPYC machine in float32, unless
a table says otherwise on the embedded 4M model, or on one inflated from it: an inflated model has the cost of its
size and the small one's text ([how](developer/experiments.md#inflated-models)).
"""


def read(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The results that the page shows, in its order.

    Raises:
        ValueError: a file that does not say where it was made.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        facts = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for name in ABOUT if not facts.get("about", {}).get(name)]
        if missing:
            raise ValueError(f"{path.name} does not tell its {', '.join(missing)}: a result without them is no result.")
        found.append(facts)
    return sorted((facts for facts in found if facts["order"] is not None), key=lambda facts: facts["order"])


def page(results: list[dict[str, Any]]) -> str:
    """The page's text."""
    lines = [HEAD]
    for facts in results:
        lines += [f"## {facts['title']}", "", *block_of(facts, facts["columns"]), ""]
    return "\n".join(lines)


def block_of(facts: dict[str, Any], columns: list[str]) -> list[str]:
    """Lines of a result: what it shows and how it was made, and its table."""
    table = pd.DataFrame(facts["rows"])
    for name, value in facts.get("only", {}).items():
        table = table[table[name] == value]
    about = facts["about"]
    made = f"`{about['command']}` at {about['commit']}; {about['model']}, {about['threads']} threads."
    made = made.replace("1 threads", "1 thread")
    return [f"{facts['text']} {made}", "", *markdown(table, columns)]


def readme(text: str, folder: Path = RESULTS) -> str:
    """The README with every table between result markers made anew.

    Raises:
        ValueError: a block without its end, or one that `BLOCKS` does not know.
    """
    for name in re.findall(r"<!-- results:([\w-]+) -->", text):
        begin, end = f"<!-- results:{name} -->", f"<!-- /results:{name} -->"
        if name not in BLOCKS or text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"README.md: {begin} needs a name of BLOCKS in benchmarks/report.py, and one {end}.")
        file, columns = BLOCKS[name]
        facts = json.loads((folder / file).read_text(encoding="utf-8"))
        head, *table = block_of(facts, columns or facts["columns"])
        block = "\n".join([f"{head} {facts['about']['device']}, {facts['about']['dtype']}.", *table])
        for old, new in RENAMED.items():
            block = block.replace(old, new)
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{block}\n\n{end}{rest.split(end)[1]}"
    return text


def kept(path: Path) -> dict[str, Any]:
    """What of a file that `draftree bench run` wrote is kept as a result; off the page until it is given a place."""
    facts = json.loads(path.read_text(encoding="utf-8"))
    rows = [{name: value for name, value in row.items() if name not in ABOUT} for row in facts["rows"]]
    about = {name: facts["about"][name] for name in ABOUT}
    return {
        "order": None,
        "title": facts["experiment"],
        "text": "",
        "about": about,
        "columns": facts["columns"],
        "rows": rows,
    }


def main(arguments: list[str]) -> None:
    """Keep the results named, and write the page and the README's tables."""
    for name in arguments:
        facts = kept(Path(name))
        target = RESULTS / f"{facts['title']}.json"
        target.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(read()), encoding="utf-8")
    README.write_text(readme(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
