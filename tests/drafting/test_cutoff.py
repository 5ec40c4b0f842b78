"""What a drafter learns from how its trees were cut."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from tree_paths import from_arrays

from draftree.drafting import RequestState
from draftree.drafting.draft_model import Cutoff
from draftree.tree import TokenTree

CHANCES = [0.8, 0.5, 0.3, 0.2, 0.1, 0.05]


def chain(chances: list[float], source: int = 1) -> TokenTree:
    logp = [math.log(chance) for chance in chances]
    return from_arrays([7] * len(chances), range(-1, len(chances) - 1), logp, root=5, source=source)


def step(request: RequestState, trees: TokenTree) -> Any:
    return SimpleNamespace(requests=[request], trees=trees)


def test_it_finds_where_trees_are_cut() -> None:
    cutoff, request = Cutoff(), RequestState(0, [5], 1, 50)
    assert cutoff.probability == 0
    for _ in range(60):
        cutoff.drafted([request], chain(CHANCES))
        cutoff.verified(step(request, chain(CHANCES[:3])), 1)
    assert 0.19 < cutoff.probability < 0.3
    for _ in range(60):  # rows have become cheaper
        cutoff.drafted([request], chain(CHANCES))
        cutoff.verified(step(request, chain(CHANCES)), 1)
    assert cutoff.probability == pytest.approx(0.05, abs=0.01)


def test_others_draft_tokens_do_not_count() -> None:
    cutoff, request = Cutoff(), RequestState(0, [5], 1, 50)
    for _ in range(60):
        cutoff.drafted([request], chain(CHANCES))
        cutoff.verified(step(request, chain(CHANCES, source=2)), 1)
    assert cutoff.probability == pytest.approx(0.8, abs=0.01)  # none of its own was verified


def test_a_step_without_a_draft_of_its_own_tells_nothing() -> None:
    cutoff, request = Cutoff(), RequestState(0, [5], 1, 50)
    cutoff.verified(step(request, chain(CHANCES)), 1)
    cutoff.drafted([request], chain(CHANCES))
    cutoff.end(request)
    cutoff.verified(step(request, chain([])), 1)
    assert cutoff.probability == 0
