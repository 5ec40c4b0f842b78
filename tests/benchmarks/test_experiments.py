"""Every experiment runs at a tiny size, its answers are plain decoding's, and its files parse; refusals are a
sentence."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from few import few
from typer.testing import CliRunner

import draftree
from benchmarks import report as results
from benchmarks.harness.command import listed, run
from benchmarks.harness.comparisons import CLAIMED
from benchmarks.harness.experiment import Experiment, experiments
from benchmarks.harness.setup import KNOWN
from benchmarks.inflate import inflate
from benchmarks.papers.claims import paper_claims
from benchmarks.papers.low_precision import SCORES
from benchmarks.shapes import gate, merge
from draftree.cli import app
from draftree.drafting.folder import demo_drafter
from draftree.models import encode_prompt
from draftree.prompts import embedded_prompts
from draftree.registry import names_in

ROOT = Path(__file__).parents[2]
FOLDERS = ROOT / "src" / "draftree" / "data" / "drafters"
EXPERIMENTS = experiments()
SETS = ("e2e", "wikisql")
# Of experiments that differ in their settings alone, one is run.
TWINS = {
    *("bild-figure4", "bild-figure5", "bild-figure8"),
    *("bita-table7", "bita-table8", "bita-table9", "bita-figure1", "bita-figure8"),
    "hidden-transfer-figure1",
    *(f"hidden-transfer-table{n}" for n in (2, 3, 4, 5)),
    *("lookahead-figure1", "lookahead-figure5", "lookahead-figure6"),
}
# These run with every `make test`, the others with `make test-all`: one of every kind of measuring.
ALWAYS = {
    *("bild-table1", "lookahead-table2", "propd-table1", "premise", "draft-accuracy", "gate"),
}
TINY: dict[str, Any] = {
    **{"per_set": 1, "max_new_tokens": 10, "warm_per_set": 1, "rounds": 1, "sizes": (1, 4), "top_k": (1, 50)},
    **{"burn_in": 2, "settled": 2, "windows": (4,), "limit": 2, "timed": 2, "examples": 1},
    **{"forms": 2, "schemas": 2, "answers": 1, "context": 16, "seen": (0, 1), "rows": (1, 4), "batch": (1, 2)},
    **{"early_layers": (1,), "layers": (4, 5), "swept": (1, 2)},
    **{"train_steps": 2, "train_questions": 40, "leave": (0.9,), "decay": (1.0,)},
    **{"minutes": 0.0, "device": "cpu", "dtype": "float32", "compiled": False, "stock": False},
    **{"engines": ("hugging_face", "draftree")},  # which run in this environment
}
BATCHED = {"lookahead-table2", "lookahead-table8", "bita-table2", "propd-table2", "pruning", "peers"}


def tiny(experiment: Experiment) -> dict[str, Any]:
    """Options that leave next to nothing to do."""
    facts = {name: TINY[name] for name in experiment.options if name in TINY}
    if "nodes" in experiment.options:
        facts["nodes"] = (2, 4) if isinstance(experiment.options["nodes"], tuple) else 6
    if experiment.name == "propd-figure7":
        facts["batch"] = (1,)  # the two prompts are of two kinds
    if experiment.name.startswith("bild"):
        facts |= {"thresholds": ("0.6:3",), "batch": 4} if "thresholds" in experiment.options else {"batch": 4}
    elif not isinstance(experiment.options.get("batch", ()), tuple):
        facts["batch"] = 1 + (experiment.name in BATCHED)
    if experiment.name == "gate":
        facts["drafters"] = ("hidden-transfer", "lookahead+draft-model")
    if experiment.options.get("drafters") == () and "train_steps" not in experiment.options:
        folder = FOLDERS / ("bita" if experiment.name.startswith("bita") else "hidden-transfer")
        facts["drafters"] = (f"one={folder}", f"other={folder}")
    return facts


@pytest.fixture(scope="module")
def prompts() -> list[Any]:
    """One measured prompt of two sets, and another for a trie."""
    seen: Counter[tuple[str, bool]] = Counter()
    chosen = []
    for prompt in embedded_prompts():
        seen[prompt.set, prompt.warm] += 1
        if prompt.set in SETS and seen[prompt.set, prompt.warm] <= 1:
            chosen.append(prompt)
    return chosen


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    """Enough rows to train on that some are kept for the dev rows; with references."""
    rows = [
        {"id": p.id, "prompt": p.text, "answer": "Yes, it is."} for p in embedded_prompts() if p.warm and p.set in SETS
    ]
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "name",
    few([name for name in EXPERIMENTS if name not in TWINS], ALWAYS),
)
def test_an_experiment_runs_and_leaves_its_files(name, prompts, questions, tmp_path):
    experiment = EXPERIMENTS[name]
    params = "20M" if name == "gpu" else None
    given = tiny(experiment) | ({"questions": str(questions)} if "questions" in experiment.options else {})
    report = run(experiment, given, prompts=prompts, params=params)
    table = report.table
    assert len(table)
    assert table.attrs.get("differing", 0) == 0
    known = [column for column in experiment.columns if column in table]
    missing = set(experiment.columns) - set(known)
    assert missing <= {
        "over_the_whole",
        "over_hf",
        "prompting",
        "operations",
        "moved",
        "intensity",
        "paper",
        "accuracy",
    }, missing
    data, picture, page = report.write(tmp_path)
    written = json.loads(data.read_text(), parse_constant=pytest.fail)
    assert {"commit", "device", "dtype", "threads", "command"} <= written["rows"][0].keys()
    assert written["about"]["options"].keys() == experiment.options.keys()
    assert written["complete"] is True
    assert written["columns"] == list(experiment.columns)
    assert written["says"] == experiment.says
    assert str(FOLDERS) not in json.dumps(written), "no machine paths in a result file"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "://" not in page.read_text(), "nothing is fetched; base64 has no colon"
    assert list(report.printed())
    claimed = table.attrs.get("tables", {}).get(CLAIMED)
    assert claimed is None or set(claimed["claim"]) <= set(paper_claims()), "claims.toml says what the paper has"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_claim_names_model_and_device_and_is_whole(name):
    claim = EXPERIMENTS[name].claim
    if claim is None:
        return
    assert claim.model
    assert claim.device
    assert claim.rows or claim.words, "figures, or what the text says of a plot"
    assert all(len(row) == len(claim.columns) for row in claim.rows)


def test_the_manual_tells_every_experiment():
    page = results.MANUAL.read_text(encoding="utf-8")
    assert page == results.manual(page), "make results"
    rows = re.findall(r"^\| (`.*?`) \|", page.split("<!-- experiments -->")[1], re.M)
    named = set(re.findall(r"`([\w-]+)`", " ".join(rows)))
    assert set(EXPERIMENTS) <= named
    assert {row["name"] for row in listed().rows} == set(EXPERIMENTS)


def test_any_model_can_be_measured(prompts, demo, tmp_path):
    """A model of another folder, with a drafter of its own; nothing is trained beside it."""
    demo.model.save_pretrained(tmp_path / "model")
    demo.tokenizer.save_pretrained(tmp_path / "model")
    given = tiny(EXPERIMENTS["draft-accuracy"]) | {"drafters": (f"m={FOLDERS / 'medusa'}",)}
    report = run(EXPERIMENTS["draft-accuracy"], given, model=str(tmp_path / "model"), prompts=prompts)
    assert report.about["model"] == "model"
    assert set(report.table["drafter"]) == {"m"}
    given = tiny(EXPERIMENTS["hidden-transfer-table1"]) | {"drafters": (f"ht={FOLDERS / 'hidden-transfer'}",)}
    table = run(EXPERIMENTS["hidden-transfer-table1"], given, model=str(tmp_path / "model"), prompts=prompts).table
    assert set(table["way"]) == {"plain", "ht, one tree", "ht, by cost"}
    assert set(table.attrs["tables"][CLAIMED]["claim"]) == {f"hidden-transfer-plain-{by}" for by in ("speed", "length")}


@pytest.mark.parametrize(
    ("name", "how"),
    [("hidden-transfer-table1", "--drafter hidden-transfer=FOLDER"), ("pruning", "--early-head FOLDER")],
)
def test_a_model_without_drafters_is_refused_with_the_option_that_names_one(name, how, prompts, tmp_path, demo):
    other = copy.deepcopy(demo.model)
    other.lm_head.weight.data[0, 0] += 1
    other.save_pretrained(tmp_path)
    demo.tokenizer.save_pretrained(tmp_path)
    given = tiny(EXPERIMENTS[name]) | ({"drafters": ("lookahead",)} if name == "pruning" else {})
    with pytest.raises(ValueError, match=how):
        run(EXPERIMENTS[name], given, model=str(tmp_path), prompts=prompts)


@pytest.mark.slow
def test_the_gate_measures_every_drafter_that_it_names(prompts):
    given = tiny(EXPERIMENTS["gate"]) | {"drafters": gate.DRAFTERS}
    table = run(EXPERIMENTS["gate"], given, prompts=prompts).table
    assert set(table["drafter"]) == set(gate.DRAFTERS)
    assert table.attrs["differing"] == 0


def test_the_gate_names_drafters_that_are_known():
    assert {part for name in gate.DRAFTERS for part in names_in(name)} <= set(KNOWN)


def merged(prompts: list[Any], **options: Any) -> list[float]:
    """Acceptance lengths of a merge at equal budgets; those of trees sized by cost depend on the clock."""
    given = tiny(EXPERIMENTS["merge"]) | {"drafters": ("medusa", "lookahead")}
    table = run(EXPERIMENTS["merge"], given, prompts=prompts, **options).table
    return table[table["nodes"] != merge.SIZED]["merged"].tolist()


@pytest.fixture(scope="module")
def accepted(prompts) -> list[float]:
    """Of the embedded model."""
    return merged(prompts)


def test_an_inflated_model_accepts_what_the_small_one_does(prompts, accepted):
    assert accepted == merged(prompts, params="20M")


def test_the_folder_of_an_inflated_model_takes_the_packages_drafters(prompts, accepted, demo, tmp_path):
    inflate(demo.model, params="20M").save_pretrained(tmp_path)
    demo.tokenizer.save_pretrained(tmp_path)
    assert merged(prompts, model=str(tmp_path)) == accepted
    with pytest.raises(ValueError, match="inflated already"):
        merged(prompts, model=str(tmp_path), params="30M")


@pytest.mark.slow
def test_a_table_of_a_papers_peers_on_a_model_of_ones_own(prompts, demo, tmp_path):
    """Without a small model its rows are left out, with a remark; with it they are there."""
    for name, model in (("model", demo.model), ("small", demo_drafter("draft-model", demo.model).model)):
        model.save_pretrained(tmp_path / name)
        demo.tokenizer.save_pretrained(tmp_path / name)
    demo_drafter("bita", demo.model).save_pretrained(tmp_path / "bita")
    given = tiny(EXPERIMENTS["bita-table2"]) | {"drafters": (str(tmp_path / "bita"),), "batch": 1}
    alone = run(EXPERIMENTS["bita-table2"], given, prompts=prompts, model=str(tmp_path / "model"))
    assert {"SelfSpeculative, 4 layers", "bita, efficient-5"} <= set(alone.table["way"])
    assert not any(way.startswith(("DraftModel", "HF assisted")) for way in alone.table["way"])
    assert sum("--set s" in remark for remark in alone.table.attrs["remarks"]) == 1
    given |= {"small": str(tmp_path / "small")}
    whole = run(EXPERIMENTS["bita-table2"], given, prompts=prompts, model=str(tmp_path / "model"))
    assert {"DraftModel, one chain (SpecDec)", "HF assisted"} <= set(whole.table["way"])
    assert not any("--set s" in remark for remark in whole.table.attrs["remarks"])


def test_right_answers_are_counted_in_16_bits(prompts, demo, tmp_path):
    prompt = encode_prompt(demo.tokenizer, prompts[0].text)
    said = draftree.generate(demo.model, torch.tensor([prompt]), max_new_tokens=10).sequences[0, len(prompt) :]
    right = demo.tokenizer.decode(said, skip_special_tokens=True)
    rows = [{"prompt": prompts[0].text, "answer": known} for known in (f"  {right.upper()}!", "something else")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    given = tiny(EXPERIMENTS["lookahead-table6"]) | {"data": str(path), "reference": "answer"}
    report = run(EXPERIMENTS["lookahead-table6"], given, prompts=prompts)
    table = report.table
    assert report.about["prompts"] == 2
    assert set(table["accuracy"]) == {0.5}
    claimed = table.attrs["tables"][CLAIMED].set_index("of")["times"]
    assert claimed["accuracy, bfloat16"] == 1
    assert [SCORES["number"](text) for text in ("It is 1,200.", "-3 or 4.5", "none")] == ["1200", "4.5", "none"]


def test_without_drafters_it_says_how_to_name_one(prompts):
    with pytest.raises(ValueError, match="There is no drafter to look at"):
        run(EXPERIMENTS["draft-accuracy"], tiny(EXPERIMENTS["draft-accuracy"]) | {"drafters": ()}, prompts=prompts)


def test_the_command_finds_the_checkout_and_writes(prompts, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": p.text, "set": p.set}) + "\n" for p in prompts))
    few = ["--max-new-tokens", "8", "--nodes", "4", "--drafter", "medusa", "--per-set", "1", "--set", "top_k=2,8"]
    done = CliRunner().invoke(app, ["bench", "run", "pruning", *few, "--prompts", str(file), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    assert "Answers that differ from plain decoding's: 0" in done.output
    assert {r["top_k"] for r in json.loads((tmp_path / "bench-run-pruning.json").read_text())["rows"]} == {None, 2, 8}
    few = [*few[:-2], "--batch", "1"]
    done = CliRunner().invoke(
        app, ["bench", "run", "propd-table1", *few, "--prompts", str(file), "--out", str(tmp_path)]
    )
    said = " ".join(done.output.split())
    assert "THE PAPER'S FIGURES (ProPD, Table 1)" in said
    assert said.index("1.95") < said.index("OUR FIGURES")


def test_prompts_that_fill_no_batch_are_refused(prompts):
    with pytest.raises(ValueError, match="2 prompts fill no batch of 8: give more prompts"):
        run(EXPERIMENTS["gate"], {"batch": 8, "per_set": 1, "drafters": ["prompt-lookup"]}, prompts=prompts)


def test_every_experiment_says_in_a_sentence_what_it_shows():
    for name, experiment in EXPERIMENTS.items():
        assert experiment.says.endswith("."), f"{name}: {experiment.says}"
        assert "partial" not in experiment.says, name


def test_the_list_tells_experiments_and_options():
    done = CliRunner().invoke(app, ["bench", "list"])
    assert all(re.search(rf"^ *{name} ", done.output, re.M) for name in EXPERIMENTS)
    assert "1,2,4,8,16,50" in CliRunner().invoke(app, ["bench", "list", "pruning"]).output
