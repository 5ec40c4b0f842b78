"""Experiments on trained drafters: figures held to stock passes of the model and to real decoding runs."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from in_model_driver import randomised, read_by_head

import draftree
from benchmarks.drafters import acceptance, best_path, draft_accuracy, kinds, pseudo_cosine, wall_clock
from benchmarks.harness import Setup
from benchmarks.harness.trees import KINDS, cases_of, with_depth, with_tree
from benchmarks.harness.truth import RANKS, hits_of
from draftree.bench.inputs import Subject
from draftree.drafting import BiTA, HiddenTransfer
from draftree.engine import generate
from draftree.prompts import embedded_prompts
from draftree.pruning.early_head import EarlyHead
from draftree.shaping import Fixed

NEW = 12


def setup_of(demo, experiment, made=(), **options):
    """A setup on three prompts whose drafters are `made`, by name."""
    prompts = [p for p in embedded_prompts() if p.set in ("e2e", "wikisql", "gsm8k")]
    facts = experiment.options | {"per_set": 1, "max_new_tokens": NEW, "warm_per_set": 1} | options
    setup = Setup(facts, prompts=prompts)
    vars(setup)["subject"] = Subject(*demo)
    if made:
        vars(setup)["named"] = {name: name for name in made}
        setup.trained = made.__getitem__
    return setup


def answers(demo, setup):
    """Stock greedy answers, prompt included."""
    for task in setup.tasks:
        ids = torch.tensor([task.ids])
        out = demo.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        yield task.ids, out[0].tolist()


def ranks_by_hand(logits, truth):
    """[RANKS] of 0 and 1: which of the best tokens is the truth."""
    return (logits.topk(RANKS).indices == truth).long().numpy()


@torch.no_grad()
def test_hits_of_heads_are_those_of_stock_passes(demo):
    medusa = draftree.demo_drafter("medusa", demo.model)
    setup = setup_of(demo, draft_accuracy.EXPERIMENT, {"medusa": medusa})
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
    *_, table = draft_accuracy.run(setup)
    third = table[(table["place"] == 4) & (table["top"] == 2)].iloc[0]
    assert third["accuracy"] == pytest.approx(right[:, 2, :2].sum() / cases[:, 2].sum())
    sets = [task.prompt.set for task in setup.tasks]
    assert third["by_set"] == pytest.approx({s: right[t, 2, :2].sum() / cases[t, 2] for t, s in enumerate(sets)})


@torch.no_grad()
def test_hits_of_an_early_head_begin_with_the_next_token(demo):
    head = randomised(EarlyHead.fresh(demo.model, layer=6, places=3), 0.02)
    setup = setup_of(demo, draft_accuracy.EXPERIMENT, {"head": head})
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


@torch.no_grad()
def test_pseudo_states_are_compared_with_the_states_that_came(demo):
    drafter = HiddenTransfer.fresh(demo.model, transfer_layers=[3, 6])  # the identity: a pseudo state begins as a copy
    setup = setup_of(demo, pseudo_cosine.EXPERIMENT, {"ht": drafter})
    *_, table = pseudo_cosine.run(setup)
    rows = table.to_dict("records")
    assert [(r["step"], r["layer"]) for r in rows] == [(1, n) for n in range(3, 9)] + [(2, n) for n in range(6, 9)]
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
        assert row["own"] == pytest.approx(np.mean(expected), abs=1e-4), row
        assert row["cases"] == len(expected)
        begins = row["layer"] == drafter.transfer_layers[row["step"] - 1]
        assert (row["pseudo"] == pytest.approx(row["own"], abs=1e-4)) == begins, row


def decoded(demo, setup, drafter, **options):
    """1 + accepted / steps of real runs, prompts' passes left out."""
    accepted = steps = 0
    for task in setup.tasks:
        ids = torch.tensor([task.ids])
        total = draftree.generate(demo.model, ids, drafter=drafter, max_new_tokens=NEW, **options).stats.total
        accepted, steps = accepted + total.accepted, steps + total.steps - 1
    return 1 + accepted / steps


def test_acceptance_is_that_of_decoding_runs(demo):
    made = {"medusa": draftree.demo_drafter("medusa", demo.model), "bita": randomised(BiTA.fresh(demo.model), 0.02)}
    setup = setup_of(demo, acceptance.EXPERIMENT, made, nodes=(4, 8))
    *_, table = acceptance.run(setup)
    assert set(table["kind"]) == set(KINDS)
    assert table.attrs["differing"] == 0
    rows = {(row["drafter"], row["tree"]): row for row in table.to_dict("records")}
    assert ("medusa", "straightforward") not in rows, "Medusa has no groups"
    assert (table["nodes"] <= 8).all()
    for name, tree in (("medusa", "efficient-2"), ("bita", "chain")):
        other = type(made[name])(made[name].shapes(), **made[name].settings | {"tree": tree})
        other.weights = made[name].weights
        assert rows[name, tree]["acceptance_length"] == pytest.approx(decoded(demo, setup, other))
    assert rows["medusa", "efficient-2"]["acceptance_length"] > 1
    assert rows["medusa", "chain"]["rows_a_step"] <= 5
    assert 4 < rows["bita", "chain"]["rows_a_step"] <= 16
    (relations,) = table.attrs["tables"].values()
    facts = {(r["ratio"], r["nodes"], r["above"].partition(",")[0]) for r in relations.to_dict("records")}
    assert ("over Medusa", 4, "bita") in facts
    assert ("efficient over straightforward", 8, "bita") in facts
    assert ("efficient over best full", 8, "medusa") in facts
    for r in relations.to_dict("records"):
        sides = [rows[tuple(r[side].split(", ", 1))] for side in ("above", "below")]
        assert r["times"] == pytest.approx(sides[0]["acceptance_length"] / sides[1]["acceptance_length"])
        assert max(side["nodes"] for side in sides) <= r["nodes"]


def test_prompts_are_set_against_masks_alone(demo):
    made = {
        "deep": BiTA.fresh(demo.model, masks=2, prompts=2),
        "shallow": BiTA.fresh(demo.model, masks=2, prompts=2, prompting="shallow"),
        "none": BiTA.fresh(demo.model, masks=2, prompts=0),
        "none of 3": BiTA.fresh(demo.model, masks=3, prompts=0),
    }
    setup = setup_of(demo, acceptance.EXPERIMENT, made, nodes=(4,), trees=("chain",))
    *_, table = acceptance.run(setup)
    (relations,) = table.attrs["tables"].values()
    assert [(r["ratio"], r["above"], r["below"]) for r in relations.to_dict("records")] == [
        ("deep prompts over masks only", "deep, chain", "none, chain"),
        ("shallow prompts over masks only", "shallow, chain", "none, chain"),
    ]


def test_gains_are_told_by_the_kind_of_text(demo):
    setup = setup_of(demo, kinds.EXPERIMENT, drafters=("lookahead-cold", "lookahead", "draft-model"), per_set=2)
    *_, table = kinds.run(setup)
    assert table.attrs["differing"] == 0
    names = ["lookahead-cold", "lookahead", "draft-model"]
    expected = [
        (kind, name) for kind in ("SQL and shell", "sentences from data", "maths in words", "all") for name in names
    ]
    assert list(zip(table["kind"], table["drafter"], strict=True)) == expected
    assert list(table["prompts"]) == [2] * 9 + [6] * 3
    assert (table["over_plain_low"] <= table["over_plain"]).all()
    assert (table["over_plain"] <= table["over_plain_high"]).all()
    assert table["acceptance_length"].max() > 1, "something was accepted"


@pytest.mark.parametrize("name", ["lookahead", "lookahead-cold", "draft-model", "hidden-transfer", "medusa"])
def test_a_best_path_is_one_branch_and_a_tree_is_not(demo, name):
    setup = setup_of(demo, best_path.EXPERIMENT, drafters=(name,))
    prompt = torch.tensor([setup.tasks[0].ids])
    texts = []
    for make in (best_path._path, best_path._tree):
        drafter, branching = make(setup, name), set()
        draft = drafter.draft

        def watched(requests, budgets, draft=draft, branching=branching):
            trees = draft(requests, budgets)
            above = trees.parents[0, : trees.sizes[0]].tolist()
            branching.add(len(above) > len(set(above)))
            return trees

        drafter.draft = watched
        texts.append(generate(demo.model, prompt, drafter=drafter, shape=Fixed(8), max_new_tokens=40).sequences)
        assert (True in branching) == (make is best_path._tree)
    assert torch.equal(*texts)


def test_a_drafter_without_one_branch_is_refused(demo):
    setup = setup_of(demo, best_path.EXPERIMENT, drafters=("jacobi",))
    with pytest.raises(ValueError, match="'jacobi' has no form that drafts one branch"):
        next(best_path.run(setup))


def test_a_set_of_the_user_is_a_kind():
    runs = pd.DataFrame(
        [
            {"way": way, "group": 0, "set": "mine", "ids": [[1]], "tokens": 4, "steps": 4, "accepted": 0}
            | {"seconds": seconds, "prompt_seconds": 0.0, "prompt_tokens": 0, "left_seconds": 0.0, "left_tokens": 0}
            for way, seconds in (("plain", 4.0), ("lookahead", 2.0))
        ]
    )
    table = kinds._summed_up(runs)
    assert [(row.kind, row.over_plain) for row in table.itertuples()] == [("mine", 2.0), ("all", 2.0)]


def test_every_set_of_the_package_has_a_kind():
    assert {one for sets in kinds.KINDS.values() for one in sets} == {prompt.set for prompt in embedded_prompts()}


def test_wall_clock_has_every_small_tree_with_and_without_rows_below_the_root(demo):
    made = {name: draftree.demo_drafter(name, demo.model) for name in ("hidden-transfer", "medusa")}
    setup = setup_of(demo, wall_clock.EXPERIMENT, made, nodes=(1, 2), rounds=1)
    *_, table = wall_clock.run(setup)
    rows = {(row["drafter"], row["nodes"], row["ahead"]): row for row in table.to_dict("records")}
    assert rows["plain", None, None]["rows"] == 1 if ("plain", None, None) in rows else table.iloc[0]["rows"] == 1
    for n in (1, 2):
        assert rows["hidden-transfer", n, "root"]["rows"] < rows["hidden-transfer", n, "all"]["rows"]
        assert ("medusa", n, "root") not in rows
    assert rows["medusa", 2, "all"]["tokens_a_step"] == pytest.approx(
        decoded(demo, setup, made["medusa"], shape=Fixed(2))
    )
    assert set(table["drafter"]) == {"plain", *made}
    assert table["differing"].sum() == 0
    plain = table.iloc[0]
    for row in table.to_dict("records"):
        assert row["over_plain"] == pytest.approx(row["tokens_a_second"] / plain["tokens_a_second"])
        assert row["plain_steps"] == pytest.approx(row["step_ms"] / plain["step_ms"])


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
    with pytest.raises(ValueError, match="depth is 9"):
        with_depth(bita, 9)
    assert not cases_of(bita, ("chain",), (2,), None)
