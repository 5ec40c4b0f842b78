"""BiLD's claims: qualities at equal speed, by rows; times on the same prompts, whatever the lengths of the texts."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from benchmarks.drafters.bild_claims import (
    ALIGNED,
    UNALIGNED,
    Curve,
    best_points,
    claimed,
    claimed_of_operations,
    curve_ratio,
    quality_ratio,
    reached,
)
from benchmarks.drafters.bild_ways import BILD, NO_ROLLBACK, PLAIN, SAMPLED, Pair, ways_of
from benchmarks.drafters.operations import Operations
from benchmarks.harness import quality as quality_module
from benchmarks.harness.quality import points, quality, row_statistics


def curve(*points: tuple[float, float]) -> Curve:
    """Points of (time, quality), each the same on nine rows and prompts."""
    scores = [np.array([[quality / 100, 1.0]] * 9) for _, quality in points]
    return Curve("rouge-l", scores, [np.full(9, time / 9) for time, _ in points])


def test_curves_are_read_off_at_the_times_of_the_other_ones_points():
    above = curve((1.0, 20.0), (2.0, 40.0), (3.0, 30.0), (4.0, 50.0))  # the third is beaten by the second
    below = curve((0.5, 10.0), (1.5, 20.0), (3.0, 40.0), (3.5, 35.0), (9.0, 48.0))
    assert reached(above, below) == (3, 4), "nothing of the first curve is as soon as the point at 0.5"
    found = curve_ratio(above, below).columns("times")
    assert found["times"] == pytest.approx((30 + 45 + 50) / (20 + 40 + 48))
    assert found["times_low"] == pytest.approx(found["times_high"]) == pytest.approx(found["times"])


def test_noise_in_time_and_quality_is_in_the_interval_of_a_curve():
    scores = np.array([[0.2, 1.0], [0.6, 1.0], [0.4, 1.0]] * 3)
    flat = curve((1.0, 40.0), (2.0, 60.0))
    by_rows = curve_ratio(*(Curve("rouge-l", [own], [np.full(9, 0.5)]) for own in (scores, flat.scores[0])))
    found = by_rows.columns("times")
    assert found["times_low"] < found["times"] < found["times_high"]
    uneven = Curve("rouge-l", [flat.scores[0]], [np.array([0.2, 0.4, 0.9] * 3) / 3])
    found = curve_ratio(flat, uneven).columns("times")
    assert found["times_low"] < found["times"] < found["times_high"]


def test_a_curve_that_is_nowhere_as_soon_is_not_compared():
    sides = curve((3.0, 20.0)), curve((1.0, 10.0), (2.0, 15.0))
    assert reached(*sides) == (0, 2)
    found = curve_ratio(*sides).columns("times")
    assert np.isnan(found["times"])
    assert found["times_low"] is found["times_high"] is None


def test_bleu_and_rouge_are_those_of_their_packages(monkeypatch):
    texts, known = ["the cat sat on the mat", "a dog"], ["the cat sat on a mat", "a dog runs"]
    from sacrebleu import corpus_bleu

    assert quality("bleu", texts, known) == pytest.approx(corpus_bleu(texts, [known]).score)
    assert points("bleu", row_statistics("bleu", texts, known)[[0, 0]].sum(0)) == pytest.approx(
        corpus_bleu([texts[0]] * 2, [[known[0]] * 2]).score
    )
    assert quality("bleu", known, known) == pytest.approx(100)
    assert quality("rouge-l", texts, known) == pytest.approx(100 * (10 / 12 + 4 / 5) / 2)
    with pytest.raises(ValueError, match="no metric 'blue'"):
        quality("blue", [], [])
    monkeypatch.setattr(quality_module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="ROUGE-L needs rouge-score: pip install"):
        quality("rouge-l", [], [])


def test_a_ratio_of_qualities_is_that_of_all_rows():
    texts, known = ["a b c d e", "f g h i j"], ["a b c d x", "f g y i j"]
    above, below = (np.tile(row_statistics("rouge-l", given, known), (4, 1)) for given in (known, texts))
    found = quality_ratio("rouge-l", [above], [below]).columns("times")
    assert found["times"] == pytest.approx(1 / 0.8)
    assert found["times_low"] == pytest.approx(found["times_high"])  # both rows are alike
    alone = quality_ratio("rouge-l", [above[:6]], [below[:6]]).columns("times")
    assert alone["times_low"] is None


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
