"""The harness: intervals held against scipy's own, measurement in turns, tables, and recorded steps put before
models."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from devtools import browsing, needs_chromium
from matplotlib.figure import Figure
from scipy.stats import bootstrap

import draftree
from benchmarks.drafters import bild, bild_ways
from benchmarks.harness import PLAIN, Setup, Share, Task, Way, measure, table_of
from benchmarks.harness.acceptance_models import MODELS, judge, tree_of
from benchmarks.harness.experiment import read
from benchmarks.harness.inputs import Subject, Texts
from benchmarks.harness.measure import differing, length, of, per_token, size, whole
from benchmarks.harness.report import Report
from benchmarks.harness.tables import markdown, shown
from benchmarks.shapes import calibration
from draftree.bench.methods import Answer
from draftree.checkpoints import Placement
from draftree.drafting import PromptLookup
from draftree.engine import Recorder
from draftree.models import encode_prompt
from draftree.prompts import Prompt
from draftree.shaping import Fixed

OVER, UNDER = np.array([1, 5, 2, 8, 4, 7, 3]), np.array([2, 5, 4, 10, 9, 8, 6])


def test_a_share_is_the_sum_over_the_sum_with_scipys_interval():
    share = Share(OVER, UNDER, 1.0)
    assert share.value == pytest.approx(1 + 30 / 44)

    def statistic(over, under, axis=-1):
        return 1 + over.sum(axis) / under.sum(axis)

    theirs = bootstrap(
        (OVER, UNDER), statistic, paired=True, vectorized=True, method="percentile", n_resamples=2000, rng=0
    )
    assert share.interval == pytest.approx(tuple(theirs.confidence_interval))


def test_a_ratio_resamples_both_sides_by_the_same_prompts():
    double = Share(2 * OVER, UNDER) / Share(OVER, UNDER)
    assert (double.value, *double.interval) == pytest.approx((2, 2, 2)), "prompts cancel out"


def test_few_prompts_have_no_interval_and_a_resample_without_a_case_counts_for_nothing():
    assert np.isnan(Share(OVER[:6], UNDER[:6]).interval).all()
    assert Share([0, *[3] * 6], [0, *[4] * 6]).interval == pytest.approx((0.75, 0.75))
    assert np.isnan(Share([0, 0], [0, 0]).value)


@pytest.fixture(scope="module")
def tasks(demo):
    texts = ("List all files.", "Rename a file, rename a file, rename a file.", "Count the words.")
    return [
        Task(Prompt(str(i), "ab"[i % 2], text), encode_prompt(demo.tokenizer, text)) for i, text in enumerate(texts)
    ]


def setup_of(demo, new, tasks):
    """A setup on the demo model that answers `tasks` with `new` tokens at most."""
    setup = Setup({"max_new_tokens": new})
    vars(setup).update(subject=Subject(*demo), encoded=Texts(tasks, []))
    return setup


def test_ways_answer_in_turns_and_give_what_the_model_gives(demo, tasks):
    asked = []

    def ask(prompts):
        asked.append(len(prompts))
        return [Answer([1, 2], 0.5) for _ in prompts]

    ways = [Way(PLAIN), Way("lookup", PromptLookup(), Fixed(3)), Way("theirs", ask=ask)]
    runs = measure(setup_of(demo, 12, tasks), ways, rounds=2)
    assert asked == [1] * 6
    assert list(runs["way"].unique()) == [PLAIN, "lookup", "theirs"]
    assert len(runs) == 3 * 3 * 2
    assert differing(runs, "lookup") == 0
    assert differing(runs, "theirs") == 6
    plain, lookup, theirs = (of(runs, way.name) for way in ways)
    assert (plain["rows"] == plain["passes"]).all(), "one row a step"
    assert lookup["rows"].sum() == lookup["passes"].sum() + lookup["drafted"].sum()
    assert (length(plain).value, size(plain)) == (1.0, 0.0)
    assert length(lookup).value == 1 + lookup["accepted"].sum() / lookup["steps"].sum() >= 1
    emitted = [run["tokens"].sum() + run["prompt_tokens"].sum() for run in (plain, lookup)]
    assert emitted[0] == emitted[1]
    assert per_token(theirs).value == pytest.approx(0.25)
    spent = plain["seconds"].sum() + plain["prompt_seconds"].sum() + plain["left_seconds"].sum()
    assert whole(plain).value == pytest.approx(spent / emitted[0])
    assert len(of(runs, PLAIN, "b")) == 1


def test_batches_are_clocked_while_they_are_full(demo, tasks):
    ways = [Way(PLAIN), Way("lookup", PromptLookup(), Fixed(3))]
    runs = measure(setup_of(demo, 10, tasks), ways, batch=2, stop=False)
    assert len(runs) == 2, "a third prompt does not fill a batch"
    for row in runs.itertuples():
        assert row.prompt_tokens + row.tokens + row.left_tokens == 20
    with pytest.raises(ValueError, match="do not fill a batch of 4"):
        measure(setup_of(demo, 4, tasks), [Way(PLAIN)], batch=4)


def recorded():
    """Two steps of a request behind its prompt's: 2 of 3 draft tokens right, then 0 of 1; and the last, cut off."""

    class Made(Recorder):
        def records(self):
            yield {"kind": "request", "request": 7, "prompt": [5, 6]}
            steps = [
                ([6], [-1], [0.0], [10], [None]),
                ([10, 11, 12, 13], [-1, 0, 1, 0], [0.0, -0.1, -0.2, -3.0], [11, 12, 20], [1, 2, None]),
                ([20, 21], [-1, 0], [0.0, -0.5], [30], [None]),
                ([30, 31], [-1, 0], [0.0, -0.5], [31], [1]),
            ]
            for tokens, parents, logp, emitted, accepted in steps:
                member = {"request": 7, "tokens": tokens, "parents": parents, "logp": logp, "emitted": emitted}
                yield {"kind": "step", "members": [member | {"accepted": accepted, "drafted": len(tokens) - 1}]}

    return Made()


def test_models_judge_recorded_trees_before_their_text_is_known():
    steps = list(judge(recorded()))
    assert [(s.emitted, s.last, len(s.worth[MODELS[0]])) for s in steps] == [(3, False, 4), (1, False, 2), (1, True, 2)]
    own = steps[0].worth["the drafter's own"]
    assert own == pytest.approx([0, np.exp(-0.1), np.exp(-0.2), np.exp(-3.0)])
    assert steps[0].expected("the drafter's own") == pytest.approx(1 + own.sum())
    sums = calibration.summed(recorded(), 1, burn_in=1)
    assert (sums["real"][0], sums["steps"][0]) == (1, 1), (
        "the first step, and the last, which was cut off, do not count"
    )
    assert sums["the drafter's own"][0] == pytest.approx(1 + np.exp(-0.5))
    tree = tree_of(
        next(r for r in recorded().records() if r["kind"] == "step" and len(r["members"][0]["tokens"]) == 4)["members"][
            0
        ]
    )
    assert (tree.sizes, tree.depth.tolist()) == ((4,), [[0, 1, 2, 1]])


@needs_chromium
def test_a_report_page_is_no_wider_than_a_telephone(tmp_path):
    columns = tuple(f"a_column_with_a_long_name_{i}" for i in range(9))
    table = table_of([{"drafter": "medusa"} | dict.fromkeys(columns, 1.25)], remarks=["/a/long/path" * 20])
    about = {"commit": "x" * 60, "command": "draftree bench run " + "y" * 90, "model": "m", "dtype": "float32"}
    about |= {"threads": 1, "device": "cpu", "started": "now", "finished": "then"}
    experiment = dataclasses.replace(calibration.EXPERIMENT, columns=("drafter", *columns))
    path = tmp_path / "page.html"
    path.write_text(Report(experiment, table, about).page(""))
    with browsing(tmp_path) as page:
        page.open(path.as_uri(), 400)
        assert page.get("document.documentElement.scrollWidth <= innerWidth && innerWidth === 400")
        table_and_box = "const box = document.querySelector('.wide'); return [box.scrollWidth, box.clientWidth]"
        wide, shown_of_it = page.get(f"(() => {{ {table_and_box} }})()")
        assert wide > shown_of_it, "the table scrolls in its own box"
        assert page.get("document.querySelector('.swatch').style.backgroundColor") == "rgb(225, 45, 150)"
        assert page.console == []


def test_options_become_what_their_defaults_are():
    assert read("k", "1,2", (4,)) == (1, 2)
    assert read("k", [3], 4) == 3
    assert read("k", "0.5", 1.0) == 0.5
    assert read("k", "true", False) is True
    assert read("k", "a,b", ()) == ("a", "b")
    for bad, default in (("x", 4), ("maybe", True), ([1, 2], 4)):
        with pytest.raises(ValueError, match=r"^k "):
            read("k", bad, default)


def test_tables_show_intervals_and_whole_numbers():
    table = table_of([{"a": "x", "n": None, "v": 1.234, "v_low": 1.0, "v_high": 2.0}, {"a": "y", "n": 3, "v": 150.2}])
    cells = [["a", "n", "v"], ["x", "", "1.23 [1.00, 2.00]"], ["y", "3", "150"]]
    assert shown(table, "", ("a", "n", "v", "absent")).texts() == cells
    assert shown(table).texts() == cells
    assert markdown(shown(table, "", ("a",))) == ["| a |", "|---|", "| x |", "| y |"]
    assert isinstance(table, pd.DataFrame)


def test_bild_without_fallback_has_every_window_at_every_rollback() -> None:
    ways = bild_ways.ways_of(["small"], [(0.6, 1.0), (0.6, 2.0), (0.9, 2.0)], (3, 4, 9))
    turns = {(way.rollback, way.window) for way in ways if way.group == bild_ways.NO_FALLBACK}
    assert turns == {(rollback, window) for rollback in (1.0, 2.0) for window in (3, 4, 9)}


def test_rollback_thresholds_have_a_curve_each() -> None:
    rows = [{"way": bild_ways.PLAIN, "group": bild_ways.PLAIN, "pair": "", "quality": 40.0, "times_plain": 1.0}]
    for fallback, rollback in ((0.3, 1.0), (0.6, 1.0), (0.3, 5.0), (0.6, 5.0)):
        facts = {"way": f"{fallback}:{rollback}", "group": bild_ways.BILD, "pair": "small", "fallback": fallback}
        rows.append(facts | {"rollback": rollback, "quality": 40 - rollback, "times_plain": 1 + fallback})
    figure = Figure()
    bild.plot_by_rollback(figure, pd.DataFrame(rows))
    (axis,) = figure.axes
    assert [line.get_label() for line in axis.get_lines()[:2]] == ["BiLD, rollback 1", "BiLD, rollback 5"]
    assert list(axis.get_lines()[0].get_ydata()) == [39.0, 39.0]


def test_a_cell_may_hold_a_list_of_samples() -> None:
    table = table_of([{"rows": 1, "samples": [0.1, 0.2]}, {"rows": None, "samples": [0.3, 0.4]}])
    assert table["samples"].tolist() == [[0.1, 0.2], [0.3, 0.4]]
    assert table["rows"].dtype == "Int64"


@pytest.mark.parametrize("name", ["medusa", "draft-model"])
def test_the_packages_drafters_draft_for_its_model_in_bfloat16(name):
    """They belong to its weights as they are stored; rounded to bfloat16 they are others."""
    setup = Setup({}, placement=Placement(dtype="bfloat16"))
    ids = encode_prompt(setup.subject.tokenizer, "List three fruits.")
    drafter = setup.trained(name)
    out = draftree.generate(setup.model, torch.tensor([ids]), drafter=drafter, shape=Fixed(4), max_new_tokens=24)
    assert setup.model.dtype == torch.bfloat16
    assert out.stats.total.accepted > 0
