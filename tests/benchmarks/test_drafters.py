"""Experiments on trained drafters: figures held to stock passes of the model and to real decoding runs."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from in_model_driver import randomised, read_by_head

import draftree
from benchmarks.drafters import best_path, draft_accuracy, kinds, pseudo_cosine
from benchmarks.harness import Setup
from benchmarks.harness.inputs import Subject
from benchmarks.harness.trees import Case, with_depth, with_tree
from benchmarks.harness.truth import RANKS, hits_of
from draftree.drafting import BiTA, HiddenTransfer
from draftree.engine import generate
from draftree.prompts import embedded_prompts
from draftree.pruning.early import EarlyHead
from draftree.shaping import Fixed
from draftree.tree.static import efficient

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


def test_gains_are_told_by_the_kind_of_text(demo):
    setup = setup_of(demo, kinds.EXPERIMENT, drafters=("lookahead-cold", "lookahead", "draft-model"), per_set=3)
    *_, table = kinds.run(setup)
    assert table.attrs["differing"] == 0
    names = ["lookahead-cold", "lookahead", "draft-model"]
    expected = [
        (kind, name) for kind in ("SQL and shell", "sentences from data", "maths in words", "all") for name in names
    ]
    assert list(zip(table["kind"], table["drafter"], strict=True)) == expected
    assert list(table["prompts"]) == [3] * 9 + [9] * 3
    assert list(table["over_plain_low"].isna()) == [True] * 9 + [False] * 3, "three prompts have no interval"
    assert (table["over_plain_low"][9:] <= table["over_plain"][9:]).all()
    assert (table["over_plain"][9:] <= table["over_plain_high"][9:]).all()
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


def test_a_tree_or_a_depth_is_changed_on_the_same_weights(demo):
    bita = BiTA.fresh(demo.model)
    for groups in (None, 1):
        case = Case("efficient-5", tuple(efficient(5, bita.depth)), 15, groups)
        made = with_tree(bita, case)
        assert made.weights is bita.weights
        assert made.settings["groups"] == groups
        assert len(case.choices) == case.nodes == made.max_nodes
    assert with_depth(bita, 2).depth == 2
    with pytest.raises(ValueError, match="depth is 9"):
        with_depth(bita, 9)
