"""The results page is what the result files say, every one of them names where it was made, and a run's file is kept
as it is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import report
from benchmarks.harness.command import run
from benchmarks.harness.experiment import find


def test_the_page_is_made_of_the_files_and_short():
    text = report.PAGE.read_text(encoding="utf-8")
    assert text == report.page(), "make results"
    assert text.count("\n") <= 230
    for entry in report.SHOWN["page"]:
        about = report.read(report.RESULTS / entry["file"])["about"]
        assert about["commit"] in text
        assert about["device"].startswith(report.USUAL) or f"threads. {about['device']}." in text


def test_every_result_is_a_runs_file_and_says_where_it_was_made():
    paths = list(report.RESULTS.glob("*.json"))
    assert paths
    for path in paths:
        facts = report.read(path)
        assert {"experiment", "source", "says", "complete", "about", "columns", "rows", "remarks", "tables"} <= set(
            facts
        )
        assert all(row["commit"] == facts["about"]["commit"] for row in facts["rows"]), path.name


def test_every_shown_column_is_there():
    for entry in [*report.SHOWN["page"], *report.SHOWN["table"].values()]:
        if "files" in entry:
            continue
        facts = report.read(report.RESULTS / entry["file"])
        assert set(entry.get("columns", facts["columns"])) <= {name for row in facts["rows"] for name in row}


def test_rows_that_not_all_results_have_and_answers_that_differ(tmp_path):
    about = {
        "command": "draftree bench run peers",
        "commit": "c",
        "device": "d",
        "threads": 1,
        "dtype": "float32",
        "model": "m",
    }
    keep = {"experiment": "peers", "source": "", "says": "", "complete": True, "remarks": [], "tables": {}}
    for name, engines, differ in (("large", ["a"], 0), ("small", ["a", "b"], 2)):
        rows = [
            {"engine": one, "x": 1.0, "x_low": 0.5, "x_high": 2.0, "differing": differ, "answers": 4, **about}
            for one in engines
        ]
        facts = keep | {"about": about, "columns": ["engine", "x"], "rows": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(facts))
    entry = {"files": {"L": "large.json", "S": "small.json"}, "by": "engine", "value": "x", "text": "Said: DIFFERING."}
    said, _, names, _, *lines = report.side_by_side(entry, tmp_path)
    assert said.startswith("Said: 4 of 12 answers differ from plain decoding's.")
    assert names == "| engine | L | S |"
    assert [line.split("|")[1:3] for line in lines] == [[" a ", " 1.00 [0.50, 2.00] "], [" b ", "  "]]


def test_every_table_has_the_plot_of_its_file_and_words_for_names():
    page = report.PAGE.read_text(encoding="utf-8")
    for name, entry in [(Path(e["file"]).stem, e) for e in report.SHOWN["page"]] + [*report.SHOWN["table"].items()]:
        file = report.PLOTS / f"{name}.svg"
        drawn = report.plot(entry)
        assert file.read_text(encoding="utf-8") == drawn, "make results"
        assert len(drawn) < 12_000
        ElementTree.fromstring(drawn)
        if entry in report.SHOWN["page"]:
            assert f"](pictures/results/{name}.svg)" in page
    shown = re.sub(r"`[^`]*`", "", page)
    assert not re.search("hugging_face|llama_cpp|peak gb|over hf|lookahead-cold|hidden-transfer", shown)
    drawn = report.plot(next(e for e in report.SHOWN["page"] if e["file"] == "peers-400m.json"))
    facts = report.read(report.RESULTS / "peers-400m.json")
    assert drawn.count("<rect") == 1 + len(facts["rows"])
    widths = [float(found) for found in re.findall(r'<rect (?:class="[pt]"|fill="\S+") .*?width="([\d.]+)"', drawn)]
    values = [row["tokens_a_second"] for row in facts["rows"]]
    scale = widths[0] / values[0]
    assert widths == pytest.approx([value * scale for value in values], abs=0.6), "as long as the values are large"


def test_one_figure_of_several_results_side_by_side():
    entry = report.SHOWN["table"]["gain"]
    head, _, names, _, *lines = report.side_by_side(entry, report.RESULTS)
    assert names == "| drafter | 400M | 60M | 4M |"
    for place, file in enumerate(entry["files"].values(), 2):
        facts = report.read(report.RESULTS / file)
        assert facts["about"]["command"] in head
        for row in facts["rows"]:
            line = next(line for line in lines if line.startswith(f"| {report.word(row['drafter'])} |"))
            low, high = row["over_plain_low"], row["over_plain_high"]
            assert line.split("|")[place].strip() == f"{row['over_plain']:.2f} [{low:.2f}, {high:.2f}]"


def test_one_figure_by_two_things_of_several_results(tmp_path):
    for size, gain in (("60M", 1.5), ("400M", 2.0)):
        rows = [
            {"kind": kind, "drafter": drafter, "gain": gain + extra, "gain_low": 0.0, "gain_high": 9.0}
            for kind, extra in (("code", 0.2), ("maths", 0.0))
            for drafter in ("cold", "warm")
        ]
        about = {"device": "A", "threads": 2, "dtype": "float32", "command": f"run {size}", "commit": "c", "model": "m"}
        facts = {"about": about, "rows": rows, "complete": True}
        (tmp_path / f"{size}.json").write_text(json.dumps(facts))
    entry = {"files": {"60M": "60M.json", "400M": "400M.json"}, "by": "kind", "value": "gain", "text": "Gains."}
    lines = report.side_by_side(entry | {"across": "drafter"}, tmp_path)
    assert lines == [
        "Gains. A, 2 threads, float32; `run 60M` at c, `run 400M` at c.",
        "",
        "| kind | cold, 60M | warm, 60M | cold, 400M | warm, 400M |",
        "|---|---|---|---|---|",
        "| code | 1.70 | 1.70 | 2.20 | 2.20 |",
        "| maths | 1.50 | 1.50 | 2.00 | 2.00 |",
    ]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ("no json", "is no result file: name one that draftree bench has written"),
        ({"rows": []}, "is no result file"),
        ({"about": {}, "rows": [{}], "complete": False}, "is not complete: a run that was stopped is no result"),
        ({"about": {"command": "make"}, "rows": [{}], "complete": True}, r"x\.json does not say its commit, device"),
    ],
)
def test_what_is_no_result_is_refused(facts, words, tmp_path):
    file = tmp_path / "x.json"
    file.write_text(facts if isinstance(facts, str) else json.dumps(facts))
    for refusing in (report.read, lambda path: report.keep(str(path), tmp_path)):
        with pytest.raises(ValueError, match=words):
            refusing(file)


def test_a_runs_file_is_kept_as_it_is_and_shown(tmp_path):
    tiny = {"rows": (1, 2), "context": (16,), "batch": (1,), "rounds": 1}
    data = run(find("premise"), tiny).write(tmp_path)[0]
    facts = json.loads(data.read_text())
    facts["about"]["commit"] = facts["about"]["commit"] or "a clone has one"
    data.write_text(json.dumps(facts))
    for argument, name in ((str(data), "premise"), (f"premise-small={data}", "premise-small")):
        kept = report.keep(argument, tmp_path)
        assert kept == tmp_path / f"{name}.json"
        assert kept.read_bytes() == data.read_bytes()
    lines = report.block_of(report.read(kept), {"columns": ["method", "ms"], "only": {"rows": [2]}})
    assert lines[0].startswith(f"{facts['remarks'][0]} `draftree")
    assert lines[2] == "| method | ms |"
    assert len(lines) == 6, "draftree and Hugging Face"
