"""`draftree bench accuracy wall-clock`: what a step holds and brings is that of decoding; ratios are of one run."""

from dataclasses import replace

import pytest
import torch
from test_bench_accuracy import NEW, setup_of

import draftree
from draftree.bench.accuracy import EXPERIMENTS, inflated
from draftree.bench.analysis_acceptance import WithTree
from draftree.bench.analysis_clock import HF, SIZED
from draftree.bench.analysis_setup import Subject
from draftree.shaping import Fixed, Shape

SMALL = (1, 2)


@pytest.fixture(scope="module")
def clocked(demo):
    subjects = [(name, draftree.demo_drafter(name, demo.model)) for name in ("hidden-transfer", "medusa")]
    setup = setup_of(demo, subjects, count=2)
    setup = replace(setup, settings=replace(setup.settings, budgets=SMALL))
    return setup, EXPERIMENTS["wall-clock"].run(setup)


def by_way(findings):
    return {(row["drafter"], row["tree"], row["groups"]): row for row in findings.rows}


def test_every_small_tree_is_there_with_and_without_rows_below_the_root(clocked):
    _, findings = clocked
    ways = set(by_way(findings))
    ht, medusa = (
        {(name, SIZED, None)} | {(name, f"best-first-{n}", g) for n in SMALL for g in groups}
        for name, groups in (("hidden-transfer", (None, 1)), ("medusa", (None,)))
    )
    assert ways == ht | medusa


def test_lengths_and_rows_are_those_of_decoding_runs(demo, clocked):
    setup, findings = clocked
    rows = by_way(findings)
    assert findings.more["plain"]["rows_a_step"] == 1
    for name, groups in (("medusa", None), ("hidden-transfer", 1)):
        drafter = draftree.demo_drafter(name, demo.model)
        if groups:
            drafter = type(drafter)(drafter.shapes(), **drafter.settings | {"groups": groups})
            drafter.weights = draftree.demo_drafter(name, demo.model).weights
        accepted = steps = 0
        for task in setup.tasks:
            ids = torch.tensor([task.ids])
            out = draftree.generate(demo.model, ids, drafter=drafter, shape=Fixed(2), max_new_tokens=NEW)
            accepted, steps = accepted + out.stats.total.accepted, steps + out.stats.total.steps
        row = rows[name, "best-first-2", groups]
        assert row["differing_prompts"] == []
        assert row["stats"]["acceptance_length"] == pytest.approx(1 + accepted / steps)
        assert 2 < row["rows_a_step"] <= drafter.rows(3) < 6
    for n in SMALL:  # with the root's rows alone a step holds less
        assert (
            rows["hidden-transfer", f"best-first-{n}", 1]["rows_a_step"]
            < (rows["hidden-transfer", f"best-first-{n}", None]["rows_a_step"])
        )


def test_ratios_are_of_the_same_run(clocked):
    _, findings = clocked
    plain, hf = findings.more["plain"], findings.more[HF]
    for row in findings.rows:
        speed = row["tokens"] / row["seconds"]
        assert row["tokens_per_second"]["value"] == pytest.approx(speed)
        for other, name in ((plain, "plain"), (hf, HF)):
            assert row["speed_over"][name]["value"] == pytest.approx(speed * other["seconds"] / other["tokens"])
        assert row["step_over_plain"] == pytest.approx(row["seconds_a_step"] / plain["seconds_a_step"])
        assert set(row["by_set"]) == {task.prompt.set for task in clocked[0].tasks}


class Resting(Shape):
    """Never asks for anything."""

    def budgets(self, requests, most):
        for request in requests:
            request.resting = True
        return [0] * len(requests)


def test_a_drafter_that_rests_attaches_no_rows(demo):
    drafter = draftree.demo_drafter("hidden-transfer", demo.model)
    drafter.shape = Resting()
    answer = WithTree("x", demo.model, NEW, lambda: drafter).answer([1, 5, 9, 300])
    assert answer.rows == answer.passes > 0


def test_inflated_drafters_are_walked_as_far_as_those_of_the_small_model(demo):
    small = draftree.demo_drafter("hidden-transfer", demo.model)
    large, (subject,) = inflated(demo.model, [Subject("ht", small)], "20M")
    assert subject.name == "ht"
    ids = torch.tensor([demo.tokenizer("The", add_special_tokens=False).input_ids])
    runs = [
        draftree.generate(model, ids, drafter=drafter, shape=Fixed(2), max_new_tokens=24)
        for model, drafter in ((demo.model, small), (large, subject.trained))
    ]
    assert torch.equal(runs[0].sequences, runs[1].sequences)
    assert runs[0].stats.total.steps == runs[1].stats.total.steps < 24
