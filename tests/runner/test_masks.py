"""Masks against their definition, one KV position at a time."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.runner.kv.cache import SlotCache
from draftree.runner.plan import Segment
from draftree.runner.positions import LayerKind, PassMasks

KINDS = (
    LayerKind(),
    LayerKind("sliding_attention", window=1),
    LayerKind("sliding_attention", window=4),
    LayerKind("chunked_attention", chunk=3),
    LayerKind("sliding_attention", window=500),
)


def _sees(kind: LayerKind, query: int, key: int) -> bool:
    if kind.window is not None:
        return query - key < kind.window
    return kind.chunk is None or query // kind.chunk == key // kind.chunk


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_masks_say_who_sees_whom(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    first, rows, prefix = (
        data.draw(st.integers(0, 1)),
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(0, 2)),
    )
    batch = len(lengths)
    seed = data.draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    visible = torch.rand(batch, rows, rows, generator=generator) < 0.5
    visible |= torch.eye(rows, dtype=torch.bool)
    ahead = torch.randint(0, 6, (batch, rows), generator=generator)
    positions = torch.tensor(lengths)[:, None] + ahead
    sighted = torch.rand(batch, rows, generator=generator) < 0.5
    kind = data.draw(st.sampled_from(KINDS))

    cache = SlotCache(1, first + batch, prefix=[(torch.zeros(1, prefix, 2),) * 2] if prefix else None)
    cache.lengths[first:] = lengths
    segment = Segment(0, None, positions, visible, sighted if prefix else None)
    masks = PassMasks(segment, cache, first, torch.float32)
    places = prefix + max(lengths) + rows
    boolean, additive = masks.boolean(kind), masks.additive(kind)
    assert additive is not None
    assert boolean.shape == (batch, rows, places)
    assert additive.shape == (batch, 1, rows, places)
    for b, length in enumerate(lengths):
        for i in range(rows):
            query = int(positions[b, i])
            for place in range(places):
                at = place - prefix
                if at < 0:
                    expected = bool(sighted[b, i])
                elif at < length:
                    expected = _sees(kind, query, at)
                elif at < length + rows:
                    j = at - length
                    expected = bool(visible[b, i, j]) and _sees(kind, query, int(positions[b, j]))
                else:
                    expected = False  # left over from a longer slot's pass
                assert boolean[b, i, place] == expected
                assert additive[b, 0, i, place] == (0.0 if expected else torch.finfo(torch.float32).min)


def test_one_plain_row_goes_unmasked_only_where_that_is_right() -> None:
    segment = Segment(0, None, torch.tensor([[200]]), torch.ones(1, 1, 1, dtype=torch.bool))
    cache = SlotCache(1, 1)
    cache.lengths = [200]

    def mask(kind: LayerKind) -> torch.Tensor | None:
        return PassMasks(segment, cache, 0, torch.float32, plain_row=True).additive(kind)

    assert mask(LayerKind()) is None
    assert mask(LayerKind("sliding_attention", window=8)) is not None
    assert mask(LayerKind("sliding_attention", window=4096)) is None
