"""Stores that outlive their caches: who gets them, and that they go where memory runs out."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from tape import passes
from zoo import build

from draftree.engine import generate
from draftree.runner import CudaGraphRunner, HookedRunner, Runner, inspect_model
from draftree.runner.kv.cache import SlotCache
from draftree.runner.kv.pool import StorePool


def test_stores_that_come_back_while_others_are_lent() -> None:
    """A cache may go in the middle of `lend`: what it brings back takes nothing from what is being lent."""
    pool = StorePool()

    def stores(slots: int) -> tuple[list[Any], list[Any], dict[Any, Any]]:
        return [torch.zeros(slots, 1, 256, 2)], [torch.zeros(slots, 1, 256, 2)], {}

    expected, late = stores(2), stores(3)
    coming = [late]
    pool._take_back(*stores(1))
    pool._take_back(*expected)

    class Late(SlotCache):
        @property  # type: ignore[override]
        def capacity(self) -> int:
            if coming:
                pool._take_back(*coming.pop())
            return self._capacity

        @capacity.setter
        def capacity(self, columns: int) -> None:
            self._capacity = columns

    cache = pool.lend(1, 2, 200, Late)
    assert cache.stores_and_notes[0] is expected[0]
    assert not any(held[0] is expected[0] for held in pool._held)
    assert any(held[0] is late[0] for held in pool._held)


class Memory:
    """Memory for stores that has an end: `most` bytes; None for no end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: dict[int, int] = {}
        self.most: int | None = None
        new_zeros = torch.Tensor.new_zeros
        gc.collect()
        gc.freeze()  # what other tests left would be looked through again and again

        def limited(like: torch.Tensor, *shape: Any, **options: Any) -> torch.Tensor:
            made = new_zeros(like, *shape, **options)
            if made.dim() == 4:  # a store
                if self._ends_with(made.nbytes):
                    raise torch.OutOfMemoryError(f"{made.nbytes} bytes more do not fit beside {self.used}")
                self.held[id(made)] = made.nbytes
                weakref.finalize(made, self.held.pop, id(made), None)
            return made

        monkeypatch.setattr(torch.Tensor, "new_zeros", limited)

    def _ends_with(self, size: int) -> bool:
        """Whether so many bytes more are too many; garbage is looked for only where they are."""
        if self.most is None or sum(self.held.values()) + size <= self.most:
            return False
        return self.used + size > self.most

    @property
    def used(self) -> int:
        gc.collect()
        return sum(self.held.values())


def ask(runner: Runner, rows: int) -> list[list[int]]:
    ids = torch.randint(5, 90, (rows, 20), generator=torch.Generator().manual_seed(rows))
    return generate(runner.target.model, ids, max_new_tokens=3, runner=runner, eos_token_id=None).sequences.tolist()


@pytest.mark.parametrize("other", [False, True], ids=["its own", "another model's"])
def test_kept_stores_make_room(monkeypatch: pytest.MonkeyPatch, other: bool) -> None:
    """A cache that would fit alone finds memory, whoever keeps stores for later, and the answer is the same."""
    memory = Memory(monkeypatch)
    model, twin = (copy.deepcopy(build("llama")) for _ in range(2))
    keeping = CudaGraphRunner(inspect_model(model))
    asking = HookedRunner(inspect_model(twin)) if other else keeping
    expected = ask(asking, 3)
    passes(keeping).pool.give_back()
    assert memory.used == 0
    ask(keeping, 1)
    kept = memory.used
    assert kept > 0
    memory.most = 3 * kept
    assert ask(asking, 3) == expected
    memory.most = 2 * kept
    with pytest.raises(torch.OutOfMemoryError):
        ask(asking, 4)


def test_kept_stores_make_room_for_a_cache_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old stores and new ones lie side by side while a cache grows; kept ones do not have to."""
    memory = Memory(monkeypatch)
    model = copy.deepcopy(build("llama"))
    runner = CudaGraphRunner(inspect_model(model))
    ask(runner, 3)
    kept = memory.used
    cache = runner.new_cache(1)
    layers = runner.target.layers
    for number in range(len(layers)):
        cache.stores(number, 2, (16, 16), torch.zeros(1, dtype=torch.float32, device="cpu"))
    own = memory.used - kept
    assert own > 0
    memory.most = 3 * own
    cache.open(0, 1, 300)
    assert cache.capacity == 512
    assert memory.used == 2 * own
