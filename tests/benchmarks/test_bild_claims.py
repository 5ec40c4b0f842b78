"""BiLD's claims: qualities at equal speed, by rows; times on the same prompts, whatever the lengths of the texts."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from benchmarks.drafters.bild_claims import (
    ALIGNED,
    UNALIGNED,
    QualityRatio,
    at_equal_speed,
    best_points,
    claimed,
    claimed_of_operations,
)
from benchmarks.drafters.bild_ways import BILD, NO_ROLLBACK, PLAIN, SAMPLED, Pair, ways_of
from benchmarks.drafters.operations import Operations
from draftree.training.quality import row_statistics


def curve(*rows: tuple[str, float, float]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["way", "times_plain", "quality"])


def test_curves_are_compared_at_equal_speed():
    below = curve(("a", 1.0, 50), ("beaten", 0.9, 40), ("b", 1.5, 30), ("too fast", 3.0, 10))
    above = curve(("A", 1.2, 60), ("B", 1.6, 35), ("slow", 0.5, 99))
    assert at_equal_speed(above, below) == [("B", "b"), ("A", "a")]


def test_a_ratio_of_qualities_is_that_of_all_rows():
    texts, known = ["a b c d e", "f g h i j"], ["a b c d x", "f g y i j"]
    above, below = (row_statistics("rouge-l", given, known) for given in (known, texts))
    found = QualityRatio("rouge-l", [above], [below]).columns("times")
    assert found["times"] == pytest.approx(1 / 0.8)
    assert found["times_low"] == pytest.approx(found["times_high"])  # both rows are alike
    alone = QualityRatio("rouge-l", [above[:1]], [below[:1]]).columns("times")
    assert np.isnan(alone["times_low"])


def table_and_runs() -> tuple[pd.DataFrame, pd.DataFrame, Pair]:
    """A grid of two points a pair; texts of the aligned pair are half as long, and take half the time."""
    pair = Pair(None, {UNALIGNED: None, ALIGNED: None})
    ways = ways_of([UNALIGNED, ALIGNED], [(0.3, 1.0), (0.3, 3.0)], [4], ablations=True)
    rows, runs = [], []
    for way in ways:
        seconds = {PLAIN: 4.0, SAMPLED: 3.0}.get(way.group, 2.0 if way.pair == UNALIGNED else 1.0)
        quality = {NO_ROLLBACK: 20.0, BILD: 40.0 - (way.rollback or 0)}.get(way.group, 38.0)
        facts = {"way": way.name, "group": way.group, "pair": way.pair, "quality": quality}
        rows.append(facts | {"fallback": way.fallback, "rollback": way.rollback, "times_plain": 4.0 / seconds})
        rows[-1] |= dict.fromkeys(("times_plain_low", "times_plain_high", "times_hf", "large_calls_a_token"), 1.0)
        runs += [
            {"way": way.name, "group": i, "seconds": seconds, "tokens": 10 * seconds, "steps": 1, "rollbacks": 0}
            for i in range(3)
        ]
    return pd.DataFrame(rows), pd.DataFrame(runs), pair


def test_speeds_are_times_of_the_same_prompts():
    table, runs, pair = table_and_runs()
    best = best_points(table, list(pair.smalls))
    scores = {row.way: np.array([[row.quality / 100, 1.0]] * 3) for row in table.itertuples()}
    found = claimed(table, best, pair, runs, scores, "rouge-l").set_index("claim")
    assert found.loc["bild-no-loss", "times"] == pytest.approx(4)
    assert found.loc["bild-unaligned", "times"] == pytest.approx(2)
    assert found.loc["bild-aligned-speed", "times"] == pytest.approx(2)
    assert found.loc["bild-sampling", "times"] == pytest.approx(1.5)
    assert UNALIGNED in found.loc["bild-sampling", "below"], "both sides draft with the same small model"
    assert found.loc["bild-no-rollback", "times"] == pytest.approx(39 / 20)
    assert found.loc["bild-rollback-quality", "times"] == pytest.approx(39 / 37)
    assert found.loc["bild-rollback-speed", "times"] == pytest.approx(1)
    early = claimed(table, best, pair._replace(exits=True), runs, scores, "rouge-l")
    assert "bild-early-exit" in set(early["claim"])
    assert "bild-no-loss" not in set(early["claim"])


def test_operations_are_compared_prompt_by_prompt():
    counted = {PLAIN: [Operations(10, 100), Operations(20, 200)], "BiLD": [Operations(12, 50), Operations(24, 100)]}
    found = claimed_of_operations(counted, "BiLD").set_index("claim")["times"]
    assert found.to_dict() == pytest.approx({"bild-moved": 2, "bild-operations": 1.2, "bild-intensity": 2.4})
