"""Running ahead in one call, against passes of one row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_host_growing import prompts
from torch import Tensor
from zoo import build

from draftree.host import HookedHost, Host, LoopHost, inspect_model
from draftree.host.cache import SlotCache
from draftree.host.plan import Plan

ONE = torch.ones(1, 1, 1, dtype=torch.bool)
GIVEN = [[5], [7, 9, 4], [3, 3]]


def step(host: Host, cache: SlotCache, slot: int, token: int) -> Tensor:
    """Log-probabilities [V] behind one more token."""
    result = host.run(Plan(torch.tensor([[token]]), torch.tensor([[cache.lengths[slot]]]), ONE), cache, slot)
    cache.commit([[0]], result.segments)
    return result.logits[0, 0].log_softmax(-1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "glm", "olmo2"])
@pytest.mark.parametrize("slots", [(0, 3), (1, 1)], ids=["ragged", "alone"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_as_pass_after_pass(family: str, slots: tuple[int, int], threads: int) -> None:
    host = LoopHost(inspect_model(build(family)))
    first, batch = slots
    cache, plain = host.new_cache(3), host.new_cache(3)
    prompts(host, cache)
    prompts(host, plain)
    lengths = list(cache.lengths)
    given = GIVEN[first : first + batch]
    torch.set_num_threads(threads)
    try:
        course = host.run_ahead(cache, first, cache.lengths[first : first + batch], given, 6, 4, -1e9)
    finally:
        torch.set_num_threads(1)
    assert course is not None
    assert np.shape(course.tokens) == np.shape(course.logp) == (batch, 6, 4)
    assert cache.lengths == lengths  # nothing is kept yet
    for b in range(batch):
        token = 0
        for s in range(6):
            token = given[b][s] if s < len(given[b]) else token
            best = step(host, plain, first + b, token).topk(4)
            assert course.tokens[b][s] == best.indices.tolist()
            torch.testing.assert_close(torch.tensor(course.logp[b][s]), best.values, rtol=0, atol=2e-5)
            token = int(best.indices[0])
        cache.keep(first + b, lengths[first + b], list(range(6)))
    again = [step(host, c, first, 11) for c in (cache, plain)]
    torch.testing.assert_close(again[0], again[1], rtol=0, atol=2e-5)


def test_where_it_stops() -> None:
    host = LoopHost(inspect_model(build("llama")))
    cache = host.new_cache(3)
    prompts(host, cache)

    def made(**options: object) -> int:
        arguments = {"least": -1e9} | options
        course = host.run_ahead(cache, 0, cache.lengths, GIVEN, 6, 2, **arguments)  # type: ignore[arg-type]
        assert course is not None
        return len(course.tokens[0])

    whole = host.run_ahead(cache, 0, cache.lengths, GIVEN, 6, 2, -1e9)
    assert whole is not None
    top, logp, paths = np.array(whole.tokens)[:, :, 0], np.array(whole.logp)[:, :, 0], np.zeros(3)
    assert made() == 6
    assert made(least=1.0) == 3  # what is given is read
    for s in range(6):
        free = s + 1 >= np.array([1, 3, 2])
        paths += np.where(free, logp[:, s], 0)
        if s == 3:
            assert made(least=float(paths.max()) - 1e-4) > 4
            assert made(least=float(paths.max()) + 1e-4) <= 4
    # The first two requests go on behind the third one's end; alone it does not.
    end = int(top[2, 1])
    assert made(ends=[end], taking_part=[False, False, True]) == 2
    assert made(ends=[96, end], taking_part=[False, False, True]) == 2
    assert made(ends=[end]) > 2
    assert made(taking_part=[False, False, True]) == 6


def test_hosts_that_cannot() -> None:
    """Windows in reach, angles that depend on the length, and any model behind its own forward: passes do it."""
    for host in (
        LoopHost(inspect_model(build("mistral-window"))),
        LoopHost(inspect_model(build("llama-dynamic"))),
        HookedHost(inspect_model(build("llama"))),
    ):
        cache = host.new_cache(3)
        prompts(host, cache)
        assert host.run_ahead(cache, 0, cache.lengths, GIVEN, 6, 2, 0.0) is None
