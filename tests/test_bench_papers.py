"""`draftree bench list` and `run`: every entry runs or says what it needs, and its figures are the paper's own."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from draftree.bench.papers import lookahead, runs
from draftree.bench.papers.claims import Claim
from draftree.bench.papers.registry import EXPERIMENTS, run_experiment
from draftree.bench.papers.runs import Asked
from draftree.cli import app
from draftree.prompts import embedded_prompts

ROOT = Path(__file__).parent.parent
SETS = ("e2e", "gsm8k", "mbpp", "scitldr")
# One of each way of running, in full; the others differ in settings alone.
RUN = (
    "lookahead-table3",
    "lookahead-table12",
    "lookahead-figure7",
    "bita-table2",
    "hidden-transfer-figure4",
    "propd-table2",
)


@pytest.fixture
def prompts() -> list[Any]:
    """One measured and two other prompts of four sets."""
    seen: Counter[tuple[str, bool]] = Counter()
    chosen = []
    for prompt in embedded_prompts():
        seen[prompt.set, prompt.warm] += 1
        if prompt.set in SETS and seen[prompt.set, prompt.warm] <= 1 + prompt.warm:
            chosen.append(prompt)
    return chosen


def test_the_list_names_them_all_and_the_manual_too():
    done = CliRunner().invoke(app, ["bench", "list"])
    assert done.exit_code == 0, done.output
    page = (ROOT / "docs" / "benchmark.md").read_text(encoding="utf-8")
    for name, entry in EXPERIMENTS.items():
        assert re.search(rf"^ *{name} ", done.output, re.M), name
        assert f"`{name}`" in page, f"docs/benchmark.md does not tell of {name}"
        paper, _, item = name.rpartition("-")
        said = re.sub(r"[^a-z0-9]", "", entry.item.lower())
        assert said in (item, "section52"), name
        assert paper.startswith(entry.paper.lower().replace(" ", "-")), name


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_claims_name_model_and_device_and_are_whole(name):
    claim = EXPERIMENTS[name].claim
    assert claim.model
    assert claim.device
    assert claim.rows or claim.words, "figures, or what the text says of a plot"
    for row in claim.rows:
        assert len(row) == len(claim.columns)


def test_cells_of_claims_are_looked_up_by_their_headings():
    claim = Claim("a model", "a GPU", "speed", ("way", "7B"), (("ours", "2.0"),))
    assert claim.cell("ours", "7B") == "2.0"
    assert claim.cell("theirs", "7B") == ""
    with pytest.raises(ValueError, match="not in tuple"):
        claim.cell("ours", "70B")


@pytest.mark.parametrize("name", RUN)
def test_experiments_run_and_tell_whose_figures_are_whose(name, tmp_path, prompts, monkeypatch):
    monkeypatch.setattr(lookahead, "WARM", (0, 2))
    monkeypatch.setattr(runs, "THRESHOLDS", ((0.6, 3.0),))
    monkeypatch.setattr(runs, "WINDOWS", (4,))
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": p.text, "set": p.set, "split": "warm" if p.warm else "test"} for p in prompts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["bench", "run", name, "--prompts", str(file), "--max-new-tokens", "10", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    entry = EXPERIMENTS[name]
    said = " ".join(done.output.split())
    assert f"THE PAPER'S FIGURES ({entry.title})" in said
    assert entry.claim.model in said
    assert "OUR FIGURES: embedded chat-4m" in said
    written = json.loads((tmp_path / f"bench-run-{name}.json").read_text())
    assert written["about"]["paper"]["figures"]["device"] == entry.claim.device
    assert {"commit", "device", "dtype", "threads", "command"} <= written["rows"][0].keys()
    assert written.get("differing", 0) == 0
    assert (tmp_path / f"bench-run-{name}.png").stat().st_size > 5_000
    assert str(tmp_path) not in json.dumps(written), "no machine paths in a result file"


def test_the_switches_of_table_3_reach_the_trie(prompts):
    """Each condition decodes otherwise than the whole: prompt, output, pruning, eliminating."""
    asked = Asked(prompts, max_new_tokens=24, warm_per_set=2)
    findings, about = run_experiment("lookahead-table3", asked)
    rows = {row["way"]: row for row in findings.rows}
    whole = rows["Lookahead"]
    assert whole["over"][0] == 1.0
    for name in ("without prompt", "without output", "without pruning"):
        assert rows[name]["guesses_a_step"] != whole["guesses_a_step"], name
    assert rows["without output"]["acceptance_length"][0] < whole["acceptance_length"][0]
    assert rows["plain"]["acceptance_length"][0] == 1.0
    assert findings.more["differing"] == 0
    assert about["asked"] == {"max_new_tokens": 24, "warm_per_set": 2}


def test_the_worst_case_accepts_nothing(prompts):
    findings, _ = run_experiment("lookahead-worst-case", Asked(prompts, max_new_tokens=10, warm_per_set=1))
    assert all(row["acceptance_length"][0] == 1.0 for row in findings.rows)
    assert findings.rows[1]["guesses_a_step"] > 0


def test_sweeps_take_drafters_and_tell_no_folders(tmp_path, prompts):
    folder = ROOT / "src" / "draftree" / "data" / "drafters" / "hidden-transfer"
    asked = Asked(prompts, max_new_tokens=8, drafters=(f"masked={folder}", f"open={folder}"))
    findings, about = run_experiment("hidden-transfer-figure7", asked)
    assert {row["drafter"] for row in findings.rows} == {"masked", "open"}
    assert about["asked"]["drafters"] == ["masked", "open"]


def test_an_early_exit_is_the_large_models_own_first_layers(tmp_path, demo, prompts, monkeypatch):
    monkeypatch.setattr(runs, "THRESHOLDS", ((0.6, 3.0),))
    monkeypatch.setattr(runs, "WINDOWS", (4,))
    asked = Asked(prompts, max_new_tokens=8)
    findings, _ = run_experiment("bild-figure6", asked)
    assert any("first 4 layers, not trained for it" in row["way"] for row in findings.rows)
    demo.model.save_pretrained(tmp_path)
    demo.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no early exit"):
        runs.exit_pair([str(tmp_path)])
    (tmp_path / "recipe.json").write_text('{"exit_layer": 3}')
    large, _, smalls = runs.exit_pair([str(tmp_path)])
    small = smalls["first 3 layers"]
    assert len(small.model.layers) == 3
    assert small.model.layers[2].mlp.up_proj.weight is large.model.layers[2].mlp.up_proj.weight


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lookahead-tabel3"], "Did you mean 'lookahead-table3'?"),
        ([], "draftree bench list tells what each is"),
        (["bita-table3"], "draftree train bita --prompts 0"),
        (["hidden-transfer-figure5", "--drafter", "hidden-transfer"], "name each by --drafter"),
        (["lookahead-table2", "--drafter", "medusa"], "leave --drafter out"),
        (["bita-table4", "--params", "60M"], "leave --params out"),
        (["bita-table4", "--warm-per-set", "2"], "leave --warm-per-set out"),
        (["bild-table1", "--nodes", "8"], "has turns of its own: leave --nodes out"),
        (["bild-table1", "--drafter", "medusa"], "leave --drafter out"),
        (["bild-figure6", "--drafter", "a", "--drafter", "b"], "has one model"),
        (["bild-figure6", "--drafter", "./nowhere"], "no model folder './nowhere'"),
        (["lookahead-figure4", "--nodes", "8"], "leave --nodes out"),
        (["lookahead-figure5", "--nodes", "8"], "leave --nodes out"),
        (["lookahead-table5", "--nodes", "8"], "leave --nodes out"),
        (["lookahead-table5", "--params", "60M"], "leave --params out"),
        (["lookahead-table5", "--warm-per-set", "4"], "leave --warm-per-set out"),
        (["bita-table2", "--warm-per-set", "4"], "leave --warm-per-set out"),
        (["hidden-transfer-figure3", "--nodes", "4"], "leave --nodes out"),
        (["propd-table1", "--warm-per-set", "4"], "has no trie to warm: leave --warm-per-set out"),
    ],
)
def test_refusals(arguments, words, tmp_path):
    done = CliRunner().invoke(app, ["bench", "run", *arguments, "--out", str(tmp_path)])
    assert done.exit_code != 0
    assert words in str(done.exception)
