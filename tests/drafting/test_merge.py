"""Merged trees: budgets, sources and probabilities of the union; what agreement is worth; whose fault an error is."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafters_for_tests import InModel, Raising, RandomTree, Watching
from few import crossed
from generate_driver import NEW, hf, left_pad, prompts, references_of, same
from in_model_driver import make, recorded
from tree_paths import from_arrays, path_of
from zoo import build

from draftree.drafting import (
    BiTA,
    Drafter,
    GrammarDrafter,
    HiddenTransfer,
    Lookahead,
    Medusa,
    Merge,
    PromptLookup,
    RequestState,
)
from draftree.drafting.base import StepPlan
from draftree.drafting.merge import join
from draftree.engine import Engine, SamplingParams, generate
from draftree.engine.generate import GenerateOutput
from draftree.pruning import EarlyHead, EarlyPruning
from draftree.runner.step_cost import StepCost
from draftree.shaping import DynamicTree, Fixed
from draftree.tree import TokenTree

Paths = Sequence[Sequence[int]]


def context(number: int, tokens: list[int]) -> RequestState:
    return RequestState(number, tokens, 3, 1000)


def tree(paths: Paths, steps: Sequence[Sequence[float]], root: int = 9) -> TokenTree:
    """A tree of paths with a probability for each of their tokens."""
    return TokenTree.from_paths(root, paths, [[math.log(p) for p in path] for path in steps], source=4)


def nodes(tree: TokenTree, b: int = 0) -> dict[tuple[int, ...], tuple[float, int]]:
    """Probability and source by path."""
    rows = (tree.logp[b].exp().tolist(), tree.source[b].tolist())
    return {tuple(path_of(tree, b, n)[1:]): (rows[0][n], rows[1][n]) for n in range(1, tree.sizes[b])}


# ------------------------------------------------------------------------------- who may be merged


def test_what_is_no_list_of_drafters() -> None:
    trie = Lookahead()
    with pytest.raises(ValueError, match="Merge has no drafter"):
        Merge([])
    with pytest.raises(ValueError, match="same drafter object twice"):
        Merge([trie, PromptLookup(), trie])
    with pytest.raises(ValueError, match="same drafter object twice"):
        Merge([trie, Merge([trie, PromptLookup()])])
    with pytest.raises(TypeError, match="put it into a list"):
        Merge(trie)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'medusa' is no drafter"):
        Merge([trie, "medusa"])  # type: ignore[list-item]


def test_merges_in_merges_are_one() -> None:
    a, b, c = Lookahead(), PromptLookup(), Lookahead(8)
    merged = Merge([a, Merge([b, Merge([c])])])
    assert merged.drafters == (a, b, c)
    assert merged.names == ("lookahead", "prompt-lookup", "lookahead-2")
    assert merged.max_nodes == 64 + 10 + 8
    assert [merged.source_name(mask) for mask in (1, 4, 7)] == [
        "lookahead",
        "lookahead-2",
        "lookahead+prompt-lookup+lookahead-2",
    ]
    assert (a.source, b.source, c.source) == (1, 1, 1)


def test_it_costs_what_its_drafters_cost() -> None:
    transfer = HiddenTransfer.fresh(build("llama"))
    assert not Merge([Lookahead(), PromptLookup()]).capabilities.prepares
    merged = Merge([Lookahead(), transfer])
    assert merged.capabilities.prepares
    assert merged.capabilities.unprepared, "the trie drafts also where nothing was prepared"
    for attach_to in (None, 1, 3):
        assert merged.rows(8, 2, attach_to) == transfer.rows(8, 2, attach_to) > 8


def test_two_drafters_inside_the_model_are_refused() -> None:
    model = build("llama")
    with pytest.raises(ValueError, match="bita and medusa both draft inside the model"):
        Merge([BiTA.fresh(model), Lookahead(), Medusa.fresh(model)])


def test_a_drafter_of_another_model_is_refused() -> None:
    merged = Merge([Lookahead(), Medusa.fresh(build("gpt2"))])
    with pytest.raises(ValueError, match="This medusa drafter was made for a model with") as raised:
        Engine(build("llama"), drafter=merged)
    assert raised.value.__notes__ == ["Raised by the drafter 'medusa' in draftree.Merge."]


def test_rows_may_leave_inside_the_pass() -> None:
    """`InModel` drops a row of its own between two layers."""
    model, ids = build("llama"), torch.tensor(prompts((9,)))
    expected = hf(model, ids)
    references = references_of(prompts((9,)), expected)
    out = generate(model, ids, drafter=Merge([InModel(references), Lookahead()]), shape=Fixed(8), max_new_tokens=NEW)
    same(out.sequences, expected)
    assert out.stats.total.accepted > 0


# ------------------------------------------------------------------------------- the union


def union(trees: Sequence[TokenTree], budgets: Sequence[int], discounts: Sequence[float] | None = None) -> TokenTree:
    marked = [replace(tree, source=(tree.depth > 0).long() << i) for i, tree in enumerate(trees)]
    return join(marked, discounts or [1.0] * len(trees), budgets)


def test_the_union_by_probability() -> None:
    one = tree([[1, 2], [3]], [[0.8, 0.5], [0.1]])
    two = tree([[1, 4], [5]], [[0.5, 0.5], [0.3]])
    merged = union([one, two], [64], [1.0, 0.5])
    found = nodes(merged)
    assert {path: source for path, (_, source) in found.items()} == {(1,): 3, (1, 2): 1, (1, 4): 2, (3,): 1, (5,): 2}
    both = 1 - (1 - 0.8) * (1 - 0.25)  # as if they knew different things
    expected = {(1,): both, (1, 2): 0.5 * both, (1, 4): 0.25 * both, (3,): 0.1, (5,): 0.15}
    assert {path: probability for path, (probability, _) in found.items()} == pytest.approx(expected, rel=1e-5)
    best_first = merged.logp[0].tolist()
    assert best_first == sorted(best_first, reverse=True)


def roots(*tokens: int) -> TokenTree:
    return TokenTree.roots(torch.tensor(tokens))


def random_tree(rng: random.Random, size: int) -> TokenTree:
    """Siblings may share a token, as a trie's separate branches do."""
    parents = [rng.randrange(-1, i) for i in range(size)]
    logp: list[float] = []
    for parent in parents:
        logp.append((logp[parent] if parent >= 0 else 0.0) - rng.random())
    return from_arrays([rng.randrange(4) for _ in parents], parents, logp, root=9)


def test_any_union_is_a_tree_within_its_budgets() -> None:
    rng = random.Random(3)
    for _ in range(60):
        batch = rng.randrange(1, 4)
        trees = [
            TokenTree.stack([random_tree(rng, rng.choice([0, 1, 5, 20])) for _ in range(batch)])
            for _ in range(rng.randrange(1, 4))
        ]
        budgets = [rng.choice([0, 1, 3, 100]) for _ in range(batch)]
        merged = union(trees, budgets)
        for b, budget in enumerate(budgets):
            size = merged.sizes[b]
            paths = set().union(*(nodes(tree, b) for tree in trees))
            assert size == 1 + min(budget, len(paths))
            parents, logp = merged.parents[b].tolist(), merged.logp[b].tolist()
            assert all(0 <= parents[n] < n for n in range(1, size))
            assert all(logp[n] <= logp[n - 1] for n in range(1, size))
            assert parents[size:] == [-1] * (merged.width - size)
            assert logp[size:] == [-math.inf] * (merged.width - size)
            found = nodes(merged, b)
            assert len(found) == size - 1  # no path is there twice
            for path, (_, source) in found.items():
                knows = [path in nodes(tree, b) for tree in trees]
                assert source == sum(1 << i for i, known in enumerate(knows) if known)


# ------------------------------------------------------------------------------- in the engine


def run(drafter: Drafter, name: str, *, runner: str = "auto", size: int = 8, **options: Any) -> GenerateOutput:
    ids, mask = left_pad(prompts())
    options = {"max_new_tokens": NEW} | options
    return generate(build(name), ids, mask, drafter=drafter, shape=Fixed(size), runner=runner, **options)


def early_pruning(layer: int) -> EarlyPruning:
    """Many draft tokens go, and the rows attached to them, before decoder layer `layer`."""
    torch.manual_seed(5)
    head = EarlyHead.fresh(build("llama"), layer=layer)
    with torch.no_grad():
        for weight in head.weights.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return EarlyPruning(head, top_k=30, always=True)


@pytest.mark.parametrize(
    ("kind", "way"),
    crossed(
        ["medusa", "hidden-transfer-one-layer", "bita-full"],
        [("cpu", None), ("hooked", 2), ("cpu", 1)],
    ),
)
def test_the_drafter_inside_the_model_drafts_as_alone(kind: str, way: tuple[str, int | None]) -> None:
    """Its candidates are equal in a merge and alone, also where early pruning drops rows inside the pass."""
    runner, pruned_at = way
    model = build("llama")
    merged = make(kind, model)
    seen = recorded(merged)
    pruner = None if pruned_at is None else early_pruning(pruned_at)
    total = run(Merge([RandomTree({}, seed=1), merged]), "llama", runner=runner, pruner=pruner).stats.total
    assert (total.pruned > 0) == (pruner is not None)
    own = make(kind, model)
    alone = recorded(own)
    run(own, "llama", runner=runner, size=own.max_nodes)
    known = {tuple(s.tokens): s for s in alone if s.logp.isfinite().all()}
    shared = [(s, known[tuple(s.tokens)]) for s in seen if tuple(s.tokens) in known and s.logp.isfinite().all()]
    assert len(shared) > 10
    for here, there in shared:
        assert torch.allclose(here.logp, there.logp, atol=2e-4)


def test_statistics_name_all_that_drafted_a_token() -> None:
    ids, mask = left_pad(prompts())
    long = 60  # what drafters are worth is learned from the text
    expected = generate(build("llama"), ids, mask, max_new_tokens=long).sequences
    references = references_of(prompts(), expected)
    merged = Merge([RandomTree(references, seed=1), RandomTree(references, seed=2)])
    out = run(merged, "llama", size=16, max_new_tokens=long)
    same(out.sequences, expected)
    total = out.stats.total
    assert set(total.accepted_by_source) == {"random", "random-2", "random+random-2"}
    assert sum(total.accepted_by_source.values()) == total.accepted
    assert out.stats.acceptance_length > max(
        run(RandomTree(references, seed=seed), "llama", size=16, max_new_tokens=long).stats.acceptance_length
        for seed in (1, 2)
    )


def test_each_drafter_is_shown_which_draft_tokens_are_its_own() -> None:
    model = build("llama")
    ids = torch.tensor([[5, 0, 7, 5, 0]])
    text = hf(model, ids, do_sample=False)[0, 5:].tolist()
    drafters = [Watching({(5, 0, 7, 5, 0): text}, seed=seed) for seed in (1, 2, 3)]
    generate(model, ids, torch.ones_like(ids), drafter=Merge(drafters), shape=Fixed(12), max_new_tokens=NEW)
    for drafter in drafters:
        assert drafter.shown
        assert all(own == offered for own, offered in drafter.shown)
    assert len({frozenset(drafter.shown[0][0]) for drafter in drafters}) > 1


def test_a_merge_rests_where_nothing_pays() -> None:
    """Where rows cost what tokens bring, `DynamicTree` asks no one, and no rows are attached."""
    model = build("llama")
    steep = StepCost((1, 2, 64), (1.0, 2.0, 64.0))
    merged = Merge([Lookahead(), make("hidden-transfer", model)])
    attached = []
    plan = merged.plan

    def watching(step: StepPlan) -> object:
        attached.append(plan(step))
        return attached[-1]

    merged.plan = watching  # type: ignore[assignment,method-assign]
    out = generate(model, torch.tensor(prompts((9,))), drafter=merged, shape=DynamicTree(cost=steep), max_new_tokens=80)
    assert out.stats.total.drafted < 5
    assert sum(attachment is not None for attachment in attached) < 30


@pytest.mark.parametrize("stage", ["begin", "plan", "draft", "observe", "end"])
def test_a_drafter_that_raises_is_named(stage: str) -> None:
    rows = prompts()
    trie, raising, other = Lookahead(), Raising({}, stage, 2), RandomTree({}, seed=1)
    engine = Engine(build("llama"), drafter=Merge([trie, raising, other]), shape=Fixed(8), slots=2)
    made = [engine.add(row, SamplingParams(max_new_tokens=8)) for row in rows]
    try:
        engine.run()
    except ArithmeticError:
        engine.run()  # those that waited
    errors = [request.error for request in made if request.error is not None]
    assert errors
    for error in errors:
        assert isinstance(error, ArithmeticError)
        assert "Raised by the drafter 'raising' in draftree.Merge." in error.__notes__
    assert not other.live
    assert trie.trie.live_requests == 0


# ------------------------------------------------------------------------------- forced tokens


def test_one_drafter_beside_forced_tokens_is_as_if_it_were_alone() -> None:
    """Requests without a grammar pay nothing for a server's drafter that knows grammars."""
    text = list(range(3, 40)) * 2
    for order in (lambda trie: [trie, GrammarDrafter()], lambda trie: [GrammarDrafter(), trie]):
        alone, beside = Lookahead(), Lookahead()
        merged = Merge(order(beside))
        for drafter in (alone, merged):
            drafter.begin(context(0, text))
        one, two = (drafter.draft([context(0, text)], [5]) for drafter in (alone, merged))
        assert one.sizes == two.sizes == (6,)
        assert list(nodes(one)) == list(nodes(two))
        assert torch.equal(one.logp, two.logp)
        assert {merged.source_name(int(mask)) for mask in two.source[0, 1:]} == {"lookahead"}


def test_a_chain_that_nobody_believes_in_has_a_probability_all_the_same() -> None:
    """128 draft tokens of next to no probability each: their product is smaller than any float."""
    chain = from_arrays(range(128), range(-1, 127), root=3)
    chain = replace(chain, logp=chain.depth * -50.0)
    joined = union([chain, TokenTree.from_paths(3, [[5]], [[-1.0]])], [128])
    assert joined.width == 129
    assert joined.logp.isfinite().all()
