"""What a comparison's report opens with: the fastest method over both baselines, and whether answers are equal."""

from dataclasses import replace

import pytest

from draftree.bench.case import Baselines, Result
from draftree.bench.case_report import case_report
from draftree.bench.equality import Difference
from draftree.bench.pictures import case_picture
from draftree.bench.samples import Answer, Sample, Task
from draftree.bench.summary import summarise
from draftree.bench.verdict import verdict
from draftree.engine import RequestStats
from draftree.prompts import Prompt

HF, PLAIN, WARM = "hf-generate", "draftree", "lookahead-warm"
EQUAL = "All answers are equal."
BEST = "The fastest method here is Lookahead, warm trie, with"
NONE = "No method here is faster than draftree's plain decoding beyond its interval: the best one,"


def case(speeds, prompts=4, uncompared=()):
    """A case whose methods answer every prompt at these speeds; a pair of them is for prompts in turn."""
    tasks = [Task(Prompt(f"p{i}", "set", "text"), [1]) for i in range(prompts)]
    samples = []
    for name, speed in speeds.items():
        pair = speed if isinstance(speed, tuple) else (speed, speed)
        samples += [Sample(name, i, 0, Answer([1] * 10, 10 / pair[i % 2])) for i in range(prompts)]
    rows = summarise(samples, tasks, (HF, PLAIN))
    settings = {"rounds": 1, "max_new_tokens": 10}
    about = {"model": "m", "dtype": "float32", "threads": 1, "device": "cpu", "case": "batch 1, greedy"}
    about |= {"settings": settings, "prompts": prompts, "sets": ["set"], "warm_prompts": 0}
    about |= dict.fromkeys(("commit", "command"), "x")
    baselines = Baselines(HF if HF in speeds else PLAIN, PLAIN, frozenset(uncompared))
    return Result(about, tuple(speeds), rows, {}, {}, baselines, samples, tasks)


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        (
            {HF: 100, PLAIN: 400, WARM: 600, "medusa": 500},
            f"{BEST} 1.50 [1.50, 1.50] times the speed of draftree's plain decoding and 6.00 [6.00, 6.00] times the "
            "speed of HF generate.",
        ),
        (
            {HF: 100, PLAIN: 400, "medusa": 380},
            f"{NONE} Medusa, has 0.95 [0.95, 0.95] times its speed, and plain decoding 4.00 [4.00, 4.00] times "
            "that of HF generate.",
        ),
        (
            {HF: 100, PLAIN: 400},
            f"{NONE} HF generate, has 0.25 [0.25, 0.25] times its speed.",
        ),
        (
            {HF: 100, WARM: 600},
            f"{BEST} 6.00 [6.00, 6.00] times the speed of HF generate; draftree's plain decoding was not measured.",
        ),
        (
            {PLAIN: 400, WARM: 600},
            f"{BEST} 1.50 [1.50, 1.50] times the speed of draftree's plain decoding.",
        ),
        ({PLAIN: 400, "draftree-hooked": 90}, "Only draftree's plain decoding was measured."),
    ],
)
def test_the_fastest_method_stands_over_both_baselines(speeds, said):
    assert verdict(case(speeds)) == f"{said} {EQUAL}"


def test_a_gain_inside_its_interval_is_none():
    found = case({HF: 100, PLAIN: 400, "medusa": (300, 700)}, prompts=6)
    over = found.rows["medusa"].over[PLAIN]
    assert over.low < 1 < over.value
    assert verdict(found).startswith("No method here is faster than draftree's plain decoding beyond its interval")
    alone = verdict(case({HF: 100, PLAIN: 400, "medusa": 700}, prompts=1))
    assert alone.startswith("No method here is faster than draftree's plain decoding for sure, as one prompt gives no")


def test_answers_that_differ_or_cannot_be_compared_are_said():
    speeds = {HF: 100, PLAIN: 400, WARM: 600}
    found = case(speeds)
    found.rows[WARM].differing.append((found.tasks[0], Difference(3, 1, 2, 0.1)))
    assert verdict(found).endswith(
        " Not all answers are equal: prompts whose answer is not that of HF generate are Lookahead, warm trie (1)."
    )
    assert verdict(case(speeds, uncompared=[HF])).endswith(" All answers that can be compared are equal.")
    assert verdict(case(speeds, uncompared=[HF, WARM])).endswith(" There are no answers of two methods to compare.")


def test_the_picture_shows_drafting_over_plain_decoding_and_not_over_hf_generate():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    found = case({HF: 100, PLAIN: 400, WARM: 600})
    stats = RequestStats(steps=5, drafted=10, accepted=5, emitted=10, accepted_by_depth=[5])
    found.rows[WARM] = replace(found.rows[WARM], stats=stats)
    case_picture(figure, found)
    axis = next(axis for axis in figure.axes if axis.get_title("left") == "Speed-up by task")
    assert axis.get_xlabel() == "times plain, fastest runner"
    (points,) = [line for line in axis.lines if line.get_label() == "Lookahead, warm trie"]
    assert list(points.get_xdata()) == pytest.approx([1.5])


def test_a_report_opens_with_it():
    found = case({HF: 100, PLAIN: 400, WARM: 600})
    report = case_report("quick", found)
    first, second, *_ = report.printed()
    assert str(first) == verdict(found)
    assert second.columns, "then comes the table"
    assert report.as_dict()["verdicts"] == [verdict(found)]
