"""`draftree bench propd`: every experiment on few prompts, figures held to what they are made of, refusals."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from draftree.bench import propd_cost, propd_models, propd_regret
from draftree.bench.propd import EXPERIMENTS, run_experiment
from draftree.bench.propd_cost import gpu_curve
from draftree.bench.propd_setup import ProPDSettings
from draftree.cli import app
from draftree.prompts import embedded_prompts

TINY = ProPDSettings(1, 10, 6, sizes=(1, 4), top_k=(1, 50), batch=(1, 2), warm_per_set=1)
DRAFTERS = {"regret": ["medusa"], "step-cost": ["lookahead"], "merge": ["lookahead", "hidden-transfer"]}


@pytest.fixture
def prompts(monkeypatch):
    """Two sets, and no long beginnings that are left out."""
    for module, name in ((propd_models, "BURN_IN"), (propd_cost, "WARM"), (propd_regret, "SETTLED")):
        monkeypatch.setattr(module, name, 2)
    monkeypatch.setattr(propd_cost, "SECONDS", 0.01)
    return [p for p in embedded_prompts() if p.set in ("e2e", "wikisql")]


@pytest.mark.parametrize("experiment", list(EXPERIMENTS))
def test_every_experiment(experiment, prompts, tmp_path):
    drafters = DRAFTERS.get(experiment, ["lookahead", "medusa"])
    findings, about = run_experiment(experiment, prompts, TINY, drafters=drafters)
    assert findings.more.get("differing", 0) == 0
    assert findings.rows
    assert about["prompts"] == 2
    json.dumps(findings.rows)
    from matplotlib.figure import Figure

    figure = Figure()
    findings.draw(figure)
    assert figure.axes
    check = globals().get(f"check_{experiment.replace('-', '_')}")
    if check is not None:
        check(findings.rows)


def check_pruning(rows):
    """More leaves the fewer tokens are allowed, and trees that lose guesses are walked no further."""
    for drafter in ("lookahead", "medusa"):
        whole, one, fifty = (r for r in rows if r["drafter"] == drafter)
        assert whole["pruned"] == 0 < fifty["pruned"] < one["pruned"] < 1
        assert one["length_ratio"] <= fifty["length_ratio"] <= 1.0 + 1e-9


def check_batch(rows):
    assert {r["way"] for r in rows} == {
        "plain",
        "n=1",
        "n=4",
        "static",
        "static, pruned",
        "dynamic",
        "dynamic, pruned",
    }
    assert {r["batch"] for r in rows} == {1, 2}
    for row in rows:
        if row["way"] == "plain":
            assert row["speed"][0] == 1.0
            assert row["guesses_a_step"] == 0
        assert (row["pruned"] > 0) <= ("pruned" in row["way"])


def check_calibration(rows):
    for row in rows:
        assert row["acceptance_length"][0] >= 1
        assert all(0.3 < row[model][0] < 3 for model in propd_models.MODELS)


def check_merge(rows):
    assert [r["nodes"] for r in rows] == [4, 8, 16]
    assert all(set(r["by_set"]) == {"e2e", "wikisql"} for r in rows)


def check_worst_case(rows):
    assert {(r["drafter"], r["batch"]) for r in rows} == {
        (name, batch) for name in ("trie of random tokens", "untrained heads") for batch in (1, 2)
    }


def check_step_cost(rows):
    sizes = [r["guesses"] for r in rows if r.get("drafter") and r["curve"] == "GPU"]
    assert sizes[0] >= sizes[-1]


def test_the_gpu_curve_is_flat_until_products_take_longer_than_reading():
    curve = gpu_curve()
    assert curve.of(1) == curve.of(64) == pytest.approx(2 * 6.7e9 / 3.35e12)
    assert curve.of(1024) / curve.of(512) == pytest.approx(2.0)


def test_judged_trees_are_counted_as_they_came(prompts):
    """Steps and tokens behind the first ones, of every answer but its last step."""
    findings, _ = run_experiment("calibration", prompts, TINY, drafters=["medusa"])
    four, six = findings.rows
    assert (four["nodes"], six["nodes"]) == (4, 6)
    assert np.isfinite([four[m][0] for m in propd_models.MODELS]).all()


def test_the_command_writes_its_files(tmp_path, prompts):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": p.text, "set": "some"}) + "\n" for p in prompts[:2]))
    arguments = ["bench", "propd", "pruning", "--prompts", str(file), "--per-set", "1", "--max-new-tokens", "8"]
    arguments += ["--nodes", "4", "--top-k", "2", "--drafter", "medusa", "--warm-per-set", "0", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "Answers that differ from the plain engine's: 0" in done.output
    written = json.loads((tmp_path / "bench-propd-pruning.json").read_text())
    assert {"commit", "device", "dtype", "threads", "command"} <= written["rows"][0].keys()
    assert (tmp_path / "bench-propd-pruning.png").stat().st_size > 10_000


def test_the_list():
    done = CliRunner().invoke(app, ["bench", "propd", "--list"])
    assert all(name in done.output for name in EXPERIMENTS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["regrett"], "Did you mean 'regret'?"),
        ([], "Name an experiment"),
        (["merge", "--drafter", "medussa"], "Did you mean 'medusa'?"),
        (["merge", "--drafter", "medusa", "--drafter", "medusa"], "named twice"),
        (["merge", "--drafter", "medusa"], "two drafters or more"),
        (["pruning", "--early-head", "nowhere"], "nowhere"),
        (["batch", "--params", "1M"], "too few"),
    ],
)
def test_refusals(arguments, words, tmp_path):
    done = CliRunner().invoke(app, ["bench", "propd", *arguments, "--out", str(tmp_path)])
    assert done.exit_code != 0
    text = " ".join(str(done.exception or done.output).split())
    assert words in text or words in " ".join(done.output.split())
