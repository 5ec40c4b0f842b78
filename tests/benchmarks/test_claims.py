"""The table of claims: verdicts by intervals, ratios by prompts, and a page that is made of the kept results."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from benchmarks import report
from benchmarks.harness.comparisons import CLAIMED, LENGTH, SPEED, Comparison, measured
from benchmarks.papers import claims
from benchmarks.papers.claims import CONFIRMED, OPPOSITE, TOO_FEW, UNDECIDED, PaperClaim
from draftree.bench.report import describe

ABOUT = {
    "command": "draftree bench run x",
    "commit": "c",
    "model": "m",
    "device": "d",
    "threads": 2,
    "dtype": "float32",
}


@pytest.mark.parametrize(
    ("low", "high", "least", "verdict"),
    [
        (1.01, 1.2, 1.0, CONFIRMED),
        (0.9, 1.2, 1.0, UNDECIDED),
        (0.9, 0.99, 1.0, OPPOSITE),
        (0.96, 0.99, 0.95, CONFIRMED),
        (0.9, 0.94, 0.95, OPPOSITE),
        (None, None, 1.0, TOO_FEW),
    ],
)
def test_a_verdict_goes_by_the_interval(low, high, least, verdict):
    claim = PaperClaim("P, Table 1", "A is above B.", "1.5", least, "It is so.", "So big.")
    assert claim.verdict(low, high) == verdict
    assert claim.reason(verdict) == {CONFIRMED: "So big.", OPPOSITE: "It is so."}.get(verdict, "")


def test_an_interval_below_one_is_opposite_whatever_the_file_says():
    """No claim can have a word of its own against its figure."""
    for claim in claims.paper_claims().values():
        assert claim.verdict(claim.least - 0.3, claim.least - 0.1) == OPPOSITE


def runs() -> pd.DataFrame:
    """Three ways on three prompts of ten tokens: b takes twice the time of a and c four times, with fewer steps."""
    rows = []
    for way, seconds, steps in (("a", 1.0, 5), ("b", 2.0, 4), ("c", 4.0, 2)):
        for group in range(3):
            row = {"way": way, "group": group, "seconds": seconds * (1 + group), "tokens": 10 * (1 + group)}
            row |= {"prompt_seconds": 0.0, "prompt_tokens": 0, "left_seconds": 0.0, "left_tokens": 0}
            rows.append(row | {"steps": steps * (1 + group), "accepted": (10 - steps) * (1 + group)})
    return pd.DataFrame(rows)


def test_the_best_of_several_others_is_compared_with():
    """By time b is the best of the others; by tokens a step c is."""
    both = [Comparison("x", "a", ("b", "c")), Comparison("y", "a", ("b", "c"), LENGTH)]
    speed, length = measured(both, runs()).to_dict("records")
    ratio = {"times": 2, "times_low": None, "times_high": None, "units": 3}
    assert speed == {"claim": "x", "above": "a", "below": "b", "of": SPEED} | ratio
    assert length["below"] == "c"
    assert length["times"] == pytest.approx(2 / 5)


def test_the_page_is_made_of_the_kept_results():
    text = claims.PAGE.read_text(encoding="utf-8")
    assert text == claims.page(report.RESULTS), "make results"
    for claim in claims.paper_claims().values():
        assert claim.text in text


@pytest.mark.parametrize(
    ("facts", "here", "says"),
    [
        ({"units": 7}, "1.20 [1.10, 1.30]", "| confirmed |"),
        ({"units": None}, "1.20 [1.10, 1.30]", "| confirmed |"),
        ({"units": 6}, "1.20", "| too few |"),
        ({"times": None, "times_low": None, "times_high": None}, "nowhere", "| too few |"),
    ],
)
def test_a_ratio_without_an_interval_is_not_confirmed(tmp_path, facts, here, says):
    row = {"claim": "bild-no-loss", "above": "BiLD", "below": "large alone", "of": SPEED}
    row |= {"times": 1.2, "times_low": 1.1, "times_high": 1.3} | facts
    held = {"about": ABOUT, "tables": {CLAIMED: [row]}}
    (tmp_path / "one.json").write_text(json.dumps(held), encoding="utf-8")
    (line,) = [line for line in claims.page(tmp_path).splitlines() if "| one.json |" in line]
    assert f"| {here} |" in line
    assert says in line


def test_a_claim_that_was_measured_twice_has_two_lines(tmp_path):
    for name, low in (("one", 1.1), ("two", 0.9)):
        row = {"claim": "bild-no-loss", "above": "BiLD", "below": "large alone", "of": SPEED}
        row |= {"times": 1.2, "times_low": low, "times_high": 1.3}
        facts = {"about": ABOUT, "tables": {CLAIMED: [row]}}
        (tmp_path / f"{name}.json").write_text(json.dumps(facts), encoding="utf-8")
    begin = "| BiLD, Table 1 | BiLD is faster than the large model alone, without loss."
    short, *lines = [line for line in claims.page(tmp_path).splitlines() if line.startswith(begin)]
    assert [CONFIRMED in line for line in lines] == [True, False]
    assert short.endswith("| 1.47 to 1.85 | 1.20 [1.10, 1.30] confirmed; 1.20 [0.90, 1.30] undecided |")
    assert "1 confirmed, 1 undecided, 0 opposite here" in claims.page(tmp_path)
    held = json.loads((tmp_path / "two.json").read_text(encoding="utf-8"))
    held["about"] |= {"model": "SmolLM2-135M-Instruct"}
    (tmp_path / "two.json").write_text(json.dumps(held), encoding="utf-8")
    short, first, _ = [line for line in claims.page(tmp_path).splitlines() if line.startswith(begin)]
    assert short.endswith("| 1.20 [0.90, 1.30] undecided | 1.20 [1.10, 1.30] confirmed |")
    assert "| two.json |" in first, "the real model leads"


def test_a_report_shows_the_papers_ratio_beside_ours():
    row = {"claim": "bild-no-loss", "above": "BiLD", "below": "large alone", "of": SPEED, "units": 6}
    (line,) = claims.in_words([row | {"times": 1.2, "times_low": 1.1, "times_high": 1.3}]).rows
    assert (line["theirs"], line["here"], line["verdict"]) == ("1.47 to 1.85", "1.20", TOO_FEW)
    assert line["claim"] == "BiLD, Table 1: BiLD is faster than the large model alone, without loss."


def test_kept_results_name_no_folders_of_a_machine():
    for path in report.RESULTS.glob("*.json"):
        command = json.loads(path.read_text(encoding="utf-8"))["about"]["command"]
        assert not [word for word in command.split() if word.rpartition("=")[2].startswith(("/", "~"))], path.name


def test_a_command_is_shown_without_folders_of_this_machine(monkeypatch):
    words = ["draftree", "--out=/a/b", "--set", "questions=/c/d.jsonl", "/e/f", "top_k=1,2", "m=~/g"]
    monkeypatch.setattr("sys.argv", words)
    assert describe(None, None)["command"] == "draftree --out=b --set questions=d.jsonl f top_k=1,2 m=g"


def test_a_claim_that_nobody_made_is_refused(tmp_path):
    facts = {"about": ABOUT, "tables": {CLAIMED: [{"claim": "nobody", "above": "a", "below": "b"}]}}
    (tmp_path / "one.json").write_text(json.dumps(facts), encoding="utf-8")
    with pytest.raises(ValueError, match=r"one.json measures 'nobody', which claims.toml does not have"):
        claims.page(tmp_path)
