"""The slot cache against a slow obvious model: a list of row numbers per slot and layer.

Every row gets a number of its own, which its keys and values hold, so the cache itself shows which rows lie where.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from draftree.runner.kv import cache as cache_module
from draftree.runner.kv.cache import SlotCache
from draftree.runner.plan import Segment

LAYERS, SLOTS, HEADS = 3, 4, 2
KEY_DIM, VALUE_DIM = 3, 2  # different, as in latent attention


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "BLOCK", 4)  # so that a few rows make the cache grow


def _states(numbers: list[list[int]], dim: int) -> torch.Tensor:
    """[count, HEADS, rows, dim], each row filled with its number (and the head's, as a fraction)."""
    rows = torch.tensor(numbers, dtype=torch.float64)[:, None, :, None]
    return (rows + torch.arange(HEADS, dtype=torch.float64)[:, None, None] / 4).expand(-1, -1, -1, dim).clone()


class SlotCacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.written = 0
        self.texts: list[list[list[int]]] = [[[] for _ in range(SLOTS)] for _ in range(LAYERS)]  # [layer][slot]

    @initialize(prefix=st.integers(0, 3), capacity=st.integers(1, 6))
    def make(self, prefix: int, capacity: int) -> None:
        self.prefix = [[-1 - p - 10 * layer for p in range(prefix)] for layer in range(LAYERS)]
        given = [(_states([row], KEY_DIM)[0], _states([row], VALUE_DIM)[0]) for row in self.prefix] if prefix else None
        self.cache = SlotCache(LAYERS, SLOTS, capacity, given)

    def _fresh(self, count: int, rows: int) -> list[list[int]]:
        first = self.written
        self.written += count * rows
        return [[first + b * rows + i for i in range(rows)] for b in range(count)]

    def _write(self, layer: int, first: int, numbers: list[list[int]]) -> None:
        keys, values = self.cache.update(_states(numbers, KEY_DIM), _states(numbers, VALUE_DIM), layer)
        for b, written in enumerate(numbers):
            known = self.prefix[layer] + self.texts[layer][first + b] + written
            assert torch.equal(keys[b, :, : len(known)], _states([known], KEY_DIM)[0])
            assert torch.equal(values[b, :, : len(known)], _states([known], VALUE_DIM)[0])
        rows = len(numbers[0])
        assert keys.shape[2] == self.cache.get_seq_length() + rows == self.cache.get_mask_sizes(rows)[0]

    @rule(data=st.data())
    def one_pass(self, data: st.DataObject) -> None:
        """Write rows, drop and append some on the way, then keep some rows or none."""
        first = data.draw(st.integers(0, SLOTS - 1))
        count = data.draw(st.integers(1, SLOTS - first))
        width, appended = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 2))
        cut = data.draw(st.integers(1, LAYERS))  # LAYERS: no surgery
        self.cache.open(first, count, width + appended)
        rows: list[list[int]] = [list(range(width))] * count
        segments = [_segment(0, None)]
        available = [set(range(width)) for _ in range(count)]
        if cut < LAYERS:
            kept = [sorted(data.draw(st.sets(st.integers(0, width - 1)))) for _ in range(count)]
            longest = max(len(k) for k in kept) or 1
            rows = [k + [-1] * (longest - len(k)) + list(range(width, width + appended)) for k in kept]
            segments.append(_segment(cut, torch.tensor(rows)))
            available = [set(k) for k in kept]
        numbers: list[list[list[int]]] = []
        for layer in range(LAYERS):
            numbers.append(self._fresh(count, width if layer < cut else len(rows[0])))
            self._write(layer, first, numbers[-1])
        if not data.draw(st.booleans()):
            return
        chosen = [data.draw(st.permutations(sorted(a))) for a in available]
        chosen = [c[: data.draw(st.integers(0, len(c)))] for c in chosen]
        self.cache.commit(chosen, segments)
        for layer in range(LAYERS):
            for b in range(count):
                place = {row: i for i, row in enumerate(range(width) if layer < cut else rows[b])}
                self.texts[layer][first + b] += [numbers[layer][b][place[row]] for row in chosen[b]]

    @rule(pair=st.tuples(*[st.integers(0, SLOTS - 1)] * 2))
    def move(self, pair: tuple[int, int]) -> None:
        source, target = pair
        self.cache.move(source, target)
        for texts in self.texts:
            texts[target] = list(texts[source])

    @rule(slot=st.integers(0, SLOTS - 1))
    def clear(self, slot: int) -> None:
        self.cache.clear(slot)
        for texts in self.texts:
            texts[slot] = []

    @invariant()
    def lengths_agree(self) -> None:
        if hasattr(self, "cache"):
            assert self.cache.lengths == [len(text) for text in self.texts[0]]


def _segment(start: int, rows: Any) -> Segment:
    empty = torch.empty(0)
    return Segment(start, rows, empty, empty)


class TestSlotCache(SlotCacheMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=100, stateful_step_count=10, deadline=None, derandomize=True)


def test_growing_loses_nothing_of_requests_that_pass_one_after_another() -> None:
    cache = SlotCache(1, 2, 4)
    first, second = [[0, 1, 2, 3]], [list(range(4, 13))]
    cache.open(0, 1, 4)
    cache.update(_states(first, KEY_DIM), _states(first, VALUE_DIM), 0)
    cache.open(1, 1, 9)  # grows, and nothing of the first has been committed
    cache.update(_states(second, KEY_DIM), _states(second, VALUE_DIM), 0)
    keys = cache.keys[0]
    assert keys is not None
    assert torch.equal(keys[:1, :, :4], _states(first, KEY_DIM))
    assert torch.equal(keys[1:, :, :9], _states(second, KEY_DIM))
