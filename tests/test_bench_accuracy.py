"""`draftree bench accuracy`: figures held to stock passes of the model and to real runs; files that parse; refusals."""

import json

import numpy as np
import pytest
import torch
from in_model_driver import randomised, read_by_head
from typer.testing import CliRunner

import draftree
from draftree.bench.accuracy import EXPERIMENTS, load_subjects, named_folders, run_experiment
from draftree.bench.analysis_compare import relate
from draftree.bench.analysis_guesses import hits_of
from draftree.bench.analysis_setup import RANKS, AccuracySettings, Sampled, Setup, Subject
from draftree.bench.analysis_trees import KINDS, cases_of, with_depth, with_tree
from draftree.bench.measure import Task
from draftree.cli import app
from draftree.drafting import BiTA, HiddenTransfer, Medusa
from draftree.drafting.folder import base_of
from draftree.models import encode_prompt
from draftree.progress import Watcher
from draftree.prompts import Prompt, embedded_prompts, take_per_set
from draftree.pruning.early_head import EarlyHead

NEW = 12


def setup_of(demo, subjects, count=3):
    prompts = [p for p in embedded_prompts() if p.set in ("e2e", "wikisql", "gsm8k") and not p.warm]
    tasks = [Task(p, encode_prompt(demo.tokenizer, p.text)) for p in take_per_set(prompts, 1)[:count]]
    settings = AccuracySettings(max_new_tokens=NEW, budgets=(4, 8), slots=2)
    return Setup(demo.model, [Subject(*s) for s in subjects], tasks, [tasks[0].ids], settings, Watcher())


def answers(demo, setup):
    """Stock greedy answers, prompt included."""
    for task in setup.tasks:
        ids = torch.tensor([task.ids])
        out = demo.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        yield task.ids, out[0].tolist()


def ranks_by_hand(logits, truth):
    """[RANKS] of 0 and 1: which of the best guesses is the truth."""
    return (logits.topk(RANKS).indices == truth).long().numpy()


@torch.no_grad()
def test_hits_of_heads_are_those_of_stock_passes(demo):
    medusa = draftree.demo_drafter("medusa", demo.model)
    setup = setup_of(demo, [("medusa", medusa)])
    found = hits_of(setup, medusa, [task.ids for task in setup.tasks])
    assert found.places == (2, 3, 4, 5)
    right, cases = np.zeros_like(found.right), np.zeros_like(found.cases)
    for t, (prompt, text) in enumerate(answers(demo, setup)):
        logits = medusa.weights(read_by_head(demo.model, text), demo.model.get_output_embeddings())
        for newest in range(len(prompt) - 1, len(text)):
            for d, place in enumerate(found.places):
                if newest + place < len(text):
                    cases[t, d] += 1
                    right[t, d] += ranks_by_hand(logits[d, newest], text[newest + place])
    assert (found.cases == cases).all()
    assert (found.right == right).all()
    assert 0 < found.right.sum() < found.cases.sum() * RANKS
    assert found.by_rank[0][0] == pytest.approx(right[:, 0, 0].sum() / cases[:, 0].sum())
    rows = EXPERIMENTS["draft-accuracy"].run(setup).rows
    third = next(row for row in rows if (row["place"], row["top"]) == (4, 2))
    assert third["accuracy"]["value"] == pytest.approx(right[:, 2, :2].sum() / cases[:, 2].sum())
    sets = [task.prompt.set for task in setup.tasks]
    assert third["by_set"] == pytest.approx({s: right[t, 2, :2].sum() / cases[t, 2] for t, s in enumerate(sets)})


@torch.no_grad()
def test_hits_of_an_early_head_begin_with_the_next_token(demo):
    head = randomised(EarlyHead.fresh(demo.model, layer=6, places=3), 0.02)
    setup = setup_of(demo, [("head", head)])
    found = hits_of(setup, head, [task.ids for task in setup.tasks])
    assert found.places == (1, 2, 3)
    right = np.zeros((3, RANKS), np.int64)
    for prompt, text in answers(demo, setup):
        states = demo.model(torch.tensor([text]), output_hidden_states=True).hidden_states[6][0]
        for d, logits in enumerate(head.weights.ahead(states, demo.model.get_output_embeddings())):
            for newest in range(len(prompt) - 1, len(text) - 1 - d):
                right[d] += ranks_by_hand(logits[newest], text[newest + 1 + d])
    assert (found.right.sum(0) == right).all()
    assert right[0, 0] > 0
    table = EXPERIMENTS["draft-accuracy"].run(setup)
    assert [(row["place"], row["top"]) for row in table.rows] == [(n, k) for n in (1, 2, 3) for k in range(1, 11)]
    tops = right.cumsum(1) / found.cases.sum(0)[:, None]
    assert [row["accuracy"]["value"] for row in table.rows] == pytest.approx(tops.reshape(-1).tolist())
    assert table.tables[0].row_count == 3


@torch.no_grad()
def test_pseudo_states_are_compared_with_the_states_that_came(demo):
    drafter = HiddenTransfer.fresh(demo.model, transfer_layers=[3, 6])  # the identity: a pseudo state begins as a copy
    setup = setup_of(demo, [("ht", drafter)])
    rows = EXPERIMENTS["pseudo-cosine"].run(setup).rows
    assert [(row["step"], row["layer"]) for row in rows] == [(1, n) for n in range(3, 9)] + [
        (2, n) for n in range(6, 9)
    ]
    layers = []
    handle = demo.model.model.layers[-1].register_forward_hook(lambda _, __, out: layers.append(out))
    own = {(row["step"], row["layer"]): [] for row in rows}
    for prompt, text in answers(demo, setup):
        states = list(demo.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states)
        states[8] = layers[-1][0] if isinstance(layers[-1], tuple) else layers[-1]  # before the last norm
        for i, layer in own:
            state = states[layer].reshape(len(text) - 1, -1)[len(prompt) - 1 :]
            own[i, layer] += torch.cosine_similarity(state[:-i], state[i:], -1).tolist()
    handle.remove()
    for row in rows:
        expected = own[row["step"], row["layer"]]
        assert row["own_state"]["value"] == pytest.approx(np.mean(expected), abs=1e-4), row
        assert row["cases"] == len(expected)
        begins = row["layer"] == drafter.transfer_layers[row["step"] - 1]
        assert (row["cosine"]["value"] == pytest.approx(row["own_state"]["value"], abs=1e-4)) == begins, row


def test_acceptance_is_that_of_decoding_runs(demo):
    medusa = draftree.demo_drafter("medusa", demo.model)
    bita = randomised(BiTA.fresh(demo.model), 0.02)
    setup = setup_of(demo, [("medusa", medusa), ("bita", bita)])
    found = EXPERIMENTS["acceptance"].run(setup)
    rows = {(row["drafter"], row["tree"]): row for row in found.rows}
    assert {row["kind"] for row in found.rows} == set(KINDS)
    assert ("medusa", "straightforward") not in rows, "Medusa has no groups"
    assert all(row["differing_prompts"] == 0 and row["nodes"] <= 8 for row in found.rows)
    for name, drafter, tree in (("medusa", medusa, "efficient-2"), ("bita", bita, "chain")):
        accepted = steps = 0
        settings = drafter.settings | {"tree": tree}
        other = type(drafter)(drafter.shapes(), **settings)
        other.weights = drafter.weights
        for task in setup.tasks:
            ids = torch.tensor([task.ids])
            total = draftree.generate(demo.model, ids, drafter=other, max_new_tokens=NEW).stats.total
            accepted, steps = accepted + total.accepted, steps + total.steps
        row = rows[name, tree]
        assert row["acceptance_length"]["value"] == pytest.approx(1 + accepted / steps)
    assert rows["medusa", "efficient-2"]["acceptance_length"]["value"] > 1
    assert rows["medusa", "chain"]["rows_a_step"] <= 5
    assert 4 < rows["bita", "chain"]["rows_a_step"] <= 16
    told = {(r["relation"], r["nodes"], r["above"]["drafter"]) for r in found.more["relations"]}
    assert ("over Medusa", 4, "bita") in told
    assert ("efficient over straightforward", 8, "bita") in told
    assert ("efficient over best full", 8, "medusa") in told
    for r in found.more["relations"]:
        sides = [rows[r[side]["drafter"], r[side]["tree"]] for side in ("above", "below")]
        values = [side["acceptance_length"]["value"] for side in sides]
        assert r["ratio"]["value"] == pytest.approx(values[0] / values[1])
        assert max(side["nodes"] for side in sides) <= r["nodes"]


def test_prompt_tokens_are_compared_with_masks_alone(demo):
    made = {
        "deep": BiTA.fresh(demo.model, masks=2, prompts=2),
        "shallow": BiTA.fresh(demo.model, masks=2, prompts=2, deep=False),
        "none": BiTA.fresh(demo.model, masks=2, prompts=0),
        "none of 3": BiTA.fresh(demo.model, masks=3, prompts=0),
    }
    setup = setup_of(demo, made.items(), 1)
    findings = EXPERIMENTS["prompt-tokens"].run(setup)
    assert [(row["swept"], row["drafter"]) for row in findings.rows[:2]] == [([0, 0], "none"), ([0, 0, 0], "none of 3")]
    assert [len(row["accuracy"]) for row in findings.rows] == [2, 3, 2, 2]
    assert [m["tree"] for m in findings.rows[0]["acceptance"]] == ["best-first-4", "best-first-8"]
    from draftree.bench.analysis_acceptance import measure_trees

    relations = relate(measure_trees(setup, ("chain",))[0], (4,))
    assert [(r.what, r.above.subject.name, r.below.subject.name) for r in relations] == [
        ("deep prompts over masks only", "deep", "none"),
        ("shallow prompts over masks only", "shallow", "none"),
    ]


def test_trees_are_the_largest_within_the_budget(demo):
    bita = BiTA.fresh(demo.model)
    shares = [[0.5, 0.2, 0.1], [0.4, 0.1, 0.1], [0.3, 0.1, 0.1]]
    cases = cases_of(bita, KINDS, (8, 16, 32), shares)
    labels = [case.label for case in cases]
    assert len(labels) == len(set(labels))
    assert labels[:2] == ["straightforward", "chain"]
    assert {"full-2, depth 2", "full-3, depth 2", "full-5, depth 2", "full-2, depth 3"} <= set(labels)
    sizes = {case.label: case.nodes for case in cases}
    assert sizes["efficient-5"] == sizes["efficient-code-6"] == 15
    assert sizes["choices-16"] == sizes["best-first-16"] == 16
    for case in cases:
        made = with_tree(bita, case)
        assert made.weights is bita.weights
        assert made.settings["groups"] == (1 if case.kind == "straightforward" else None)
        assert case.choices is None or len(case.choices) == case.nodes == made.max_nodes
    assert with_depth(bita, 2).depth == 2
    assert with_depth(bita, 9).depth == 3
    assert not cases_of(bita, ("chain",), (2,), None)


def test_intervals_resample_both_sides_by_the_same_prompts():
    over, under = np.array([1, 5, 2, 8]), np.array([2, 5, 4, 10])
    share = Sampled.share(over, under)
    assert share.value == pytest.approx(16 / 21)
    assert share.estimate.low < share.value < share.estimate.high
    same = (Sampled.share(2 * over, under) / share).estimate
    assert (same.value, same.low, same.high) == pytest.approx((2, 2, 2)), "prompts cancel out"
    assert Sampled.share(over[:1], under[:1], plus=1).estimate.low is None
    gap = Sampled.share(np.array([0, 3]), np.array([0, 4])).estimate
    assert gap.low == gap.high == pytest.approx(0.75), "resamples without a case count for nothing"


@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if name != "mask-tokens"])
def test_every_experiment_writes_its_files(experiment, tmp_path):
    pytest.importorskip("matplotlib")
    prompts = tmp_path / "prompts.jsonl"
    rows = [p for p in embedded_prompts() if p.set == "tldr_shell"]
    chosen = [p for p in rows if not p.warm][:2] + [p for p in rows if p.warm][:1]
    lines = [{"prompt": p.text, "set": p.set, "split": "warm" if p.warm else "test"} for p in chosen]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    few = ["--max-new-tokens", "6", "--nodes", "4", "--tree", "best-first", "--tree", "choices", "--threads", "1"]
    out = tmp_path / "made" / "here"
    done = CliRunner().invoke(
        app, ["bench", "accuracy", experiment, *few, "--prompts", str(prompts), "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    written = out / f"bench-accuracy-{experiment}"
    result = json.loads(written.with_suffix(".json").read_text())
    assert result["about"]["prompts"] == 2
    assert set(result["about"]["drafters"]) == set(EXPERIMENTS[experiment].methods)
    assert result["about"]["drafters"]["early-head" if experiment == "draft-accuracy" else result["rows"][0]["drafter"]]
    for row in result["rows"]:
        for fact in ("commit", "device", "dtype", "threads", "command", "drafter"):
            assert fact in row
    assert str(tmp_path) not in json.dumps(result), "no machine paths in a result file"
    assert written.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_depth_that_is_given_holds_for_all_drafters(demo):
    subjects = load_subjects(
        {"m": named_folders(["medusa"], "acceptance", None)["medusa"]}, "acceptance", demo.model, 2
    )
    assert subjects[0].trained.depth == 2
    assert hits_of(setup_of(demo, []), subjects[0].trained, [[1, 5, 9]]).places == (2, 3)


def test_list_tells_every_experiment():
    told = CliRunner().invoke(app, ["bench", "accuracy", "--list"])
    assert told.exit_code == 0
    assert all(name in told.output for name in EXPERIMENTS)


@pytest.fixture
def folder(demo, tmp_path):
    drafter = Medusa.fresh(demo.model)
    drafter.base = base_of(demo.model)
    drafter.save_pretrained(tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Name an experiment"),
        (["acceptence"], "Did you mean 'acceptance'"),
        (["acceptance", "--tree", "efficent"], "Did you mean 'efficient'"),
        (["acceptance", "--drafter", "x=./nowhere"], "Drafter 'x': There is no drafter folder './nowhere'"),
        (["acceptance", "--drafter", "=x"], "give name=folder"),
        (["acceptance", "--model", "./elsewhere"], "acceptance has no drafter to look at"),
        (["pseudo-cosine", "--drafter", "m={}"], "takes drafters of hidden-transfer, and 'm' holds medusa"),
        (["acceptance", "--drafter", "m={}", "--drafter", "m={}"], "Two drafters are called 'm'"),
        (["acceptance", "--drafter", "m={}", "--nodes", "2", "--tree", "chain"], "No tree of 'm' fits 2 guesses"),
        (["draft-accuracy", "--drafter", "{}", "--max-new-tokens", "5000"], "context"),
    ],
)
def test_bad_input_is_one_sentence(arguments, says, folder, tmp_path):
    given = [argument.format(folder) for argument in arguments]
    done = CliRunner().invoke(app, ["bench", "accuracy", *given, "--out", str(tmp_path)])
    assert isinstance(done.exception, ValueError)
    assert says in str(done.exception)
    assert "\n" not in str(done.exception)


def test_what_cannot_be_measured_is_refused(demo, folder):
    subjects = load_subjects({"m": str(folder)}, "acceptance", demo.model)
    with pytest.raises(ValueError, match="no prompts besides the measured ones"):
        run_experiment(
            "acceptance",
            demo.model,
            demo.tokenizer,
            subjects,
            [Prompt("a", "s", "Hello")],
            AccuracySettings(per_set=1, max_new_tokens=4, trees=("choices",)),
        )
    other = draftree.demo_model()[0]
    with torch.no_grad():
        other.get_input_embeddings().weight += 1
    with pytest.raises(ValueError, match=r"Drafter 'm': .*other weights"):
        load_subjects({"m": str(folder)}, "acceptance", other)
