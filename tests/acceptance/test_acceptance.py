"""Acceptance against slow references: greedy paths, lazy paths, and the noise of torch.multinomial."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper
from tree_paths import children_of, from_arrays, path_of, scored_tree

from draftree.acceptance import AcceptedPath, PrefixChooser, lazy_walk
from draftree.engine import SamplingParams
from draftree.engine.passes import Acceptance, TreePass
from draftree.engine.request import Request
from draftree.runner.plan import Plan
from draftree.tree import TokenTree

VOCABULARY = 4  # small, so that random draft tokens are often accepted; id 0 is one of them


@st.composite
def tree_batches(draw: st.DrawFn) -> tuple[TokenTree, Tensor]:
    """Ragged random trees (equal siblings allowed) and logits for every node, alike behind the same text."""
    trees = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(0, 9))
        tokens = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=size, max_size=size))
        parents = [draw(st.integers(-1, n - 1)) for n in range(size)]
        trees.append(from_arrays(tokens, parents, root=draw(st.integers(0, VOCABULARY - 1))))
    tree = TokenTree.stack(trees)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    logits = torch.randn(tree.batch, tree.width, VOCABULARY, generator=generator)
    for b in range(tree.batch):
        first: dict[tuple[int, ...], int] = {}
        for node in range(tree.sizes[b]):
            logits[b, node] = logits[b, first.setdefault(tuple(path_of(tree, b, node)), node)]
    return tree, logits


def texts(tree: TokenTree, b: int, best: dict[int, int]) -> list[list[int]]:
    """Return every text that the best tokens along one branch can give, longest last."""
    found = []

    def follow(node: int, said: list[int]) -> None:
        token = best[node]
        after = [n for n in children_of(tree, b, node) if n in best and int(tree.tokens[b, n]) == token]
        if not after:
            found.append([*said, token])
        for child in after:
            follow(child, [*said, token])

    follow(0, [])
    return sorted(found, key=len)


def greedy_paths(tree: TokenTree, logits: Tensor, rows: Tensor | None = None) -> list[AcceptedPath]:
    """Return the accepted paths of greedy requests; `rows` [B, n] names the nodes that have logits."""
    requests = [Request([root], SamplingParams(99), device=tree.device) for root in tree.tokens[:, 0].tolist()]
    config: Any = SimpleNamespace(rule=None, drafter=None)
    result: Any = SimpleNamespace(logits=logits, rows=rows)
    turn = TreePass(Plan(tree.tokens, tree.depth, tree.ancestors), tree, [0] * tree.batch, 0)
    paths = Acceptance(config.rule, config.drafter).walk(requests, turn, result)
    assert [request.tokens for request in requests] == [path.tokens for path in paths]
    return paths


def check_path(tree: TokenTree, b: int, nodes: list[int]) -> None:
    assert nodes[0] == 0
    for parent, child in itertools.pairwise(nodes):
        assert path_of(tree, b, child)[:-1] == path_of(tree, b, parent)


def test_padding_never_matches_a_live_token_zero() -> None:
    tree = TokenTree.stack([from_arrays([1, 0], [-1, 0], root=9), TokenTree.roots(torch.tensor([9]))])
    for says, nodes in (([[0, 0, 0], [0, 0, 0]], [[0], [0]]), ([[1, 0, 0], [0, 0, 0]], [[0, 1, 2], [0]])):
        logits = torch.eye(4)[torch.tensor(says)]
        assert [path.nodes for path in greedy_paths(tree, logits)] == nodes


@settings(max_examples=300, deadline=None)
@given(tree_batches(), st.sampled_from([0.7, 1.0]), st.integers(0, 2**16))
def test_greedy_paths_are_the_longest(case: tuple[TokenTree, Tensor], share: float, seed: int) -> None:
    """Siblings may share a token. Pruning drops nodes with all below them, pads rows and adds foreign rows."""
    tree, logits = case
    generator = torch.Generator().manual_seed(seed)
    kept: list[list[int]] = []
    for b in range(tree.batch):
        alive = [0]
        for node in range(1, tree.sizes[b]):
            if int(tree.parents[b, node]) in alive and torch.rand((), generator=generator) < share:
                alive.append(node)
        kept.append(alive)
    rows, scored = None, logits
    if share < 1:
        width = max(len(alive) for alive in kept) + 2
        rows = torch.full((tree.batch, width), -1)
        scored = torch.full((tree.batch, width, VOCABULARY), -5.0)
        scored[..., 1] = 5.0  # The choice of padding rows.
        for b, alive in enumerate(kept):
            place = [0, *range(2, len(alive) + 1)]  # Row 1 is foreign.
            rows[b, place] = torch.tensor(alive)
            scored[b, place] = logits[b, alive]
    for b, path in enumerate(greedy_paths(tree, scored, rows)):
        best = {node: int(logits[b, node].argmax()) for node in kept[b]}
        expected = texts(tree, b, best)
        assert len(path.tokens) == len(expected[-1])
        assert path.tokens in expected
        check_path(tree, b, path.nodes)
        assert path.tokens == [best[node] for node in path.nodes]
        assert path.drafted_by == [*path.nodes[1:], None]


class Last(LogitsProcessor):
    """Makes scores depend on the prefix, and notes every call."""

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.prefixes.append(input_ids[0].tolist())
        scores = scores.clone()
        scores[:, int(input_ids[0, -1])] -= 1.5
        return scores


def make(seed: int | None, sample: bool, *processors: LogitsProcessor) -> PrefixChooser:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return PrefixChooser(torch.tensor([[3, 1]]), LogitsProcessorList(processors), generator, sample)


@settings(max_examples=150, deadline=None)
@given(tree_batches(), st.booleans(), st.integers(0, 2**16))
def test_lazy_walks_choose_once_a_token_at_the_true_prefix(
    case: tuple[TokenTree, Tensor], sample: bool, seed: int
) -> None:
    """With logits that depend on the text alone, a walk equals sampling token by token."""
    tree, table = case
    by_last = table[0, 0].repeat(VOCABULARY, 1).roll(1, 0) + torch.eye(VOCABULARY).roll(1, 0)
    for b in range(tree.batch):
        logits = by_last[tree.tokens[b]]
        notes, plain_notes = Last(), Last()
        chooser, plain = make(seed, sample, notes), make(seed, sample, plain_notes)
        choices = list(lazy_walk(scored_tree(tree, b, logits), chooser))
        last = int(tree.tokens[b, 0])
        said = []
        for _ in choices:
            token = plain.choose(by_last[last])
            assert token is not None
            plain.push(token)
            said.append(token)
            last = token
        assert [token for _, token, _ in choices] == said
        assert notes.prefixes == plain_notes.prefixes == [[3, 1, *said[:n]] for n in range(len(said))]
        reached = {tuple(path_of(tree, b, node)[1:]) for node in range(tree.sizes[b])}
        assert tuple(said[:-1]) in reached
        assert tuple(said) not in reached
        for node, token, after in choices:
            assert after is None or int(tree.tokens[b, after]) == token
            assert tuple(path_of(tree, b, node)[1:]) == tuple(said[: int(tree.depth[b, node])])


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_noise_is_that_of_multinomial(seed: int) -> None:
    """One draw a token from the seed's generator: what Hugging Face's sampling does, step for step."""
    processors = (TemperatureLogitsWarper(0.7), TopKLogitsWarper(30))
    chooser = make(seed, True, *processors)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(60, 50, generator=torch.Generator().manual_seed(1))
    for row in logits:
        scores = LogitsProcessorList(processors)(torch.tensor([[3]]), row[None].clone())
        expected = int(torch.multinomial(scores.softmax(-1), 1, generator=generator))
        assert chooser.choose(row) == expected
        chooser.push(expected)


@pytest.mark.parametrize("scores", [[-math.inf] * 4, [math.nan] * 4, [0.0, math.inf, 0.0, 0.0]])
def test_what_cannot_be_drawn_is_an_error_as_in_multinomial(scores: list[float]) -> None:
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        torch.multinomial(torch.tensor(scores).softmax(-1), 1)
    with pytest.raises(RuntimeError, match="No token has a probability that is a number: raise the temperature"):
        make(0, True).choose(torch.tensor(scores))
