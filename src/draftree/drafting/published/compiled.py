"""The layers of EAGLE-3's heads in C, in the place of `EagleHead.forward` on a CPU.

The texts of a drafter have a slot each in one cache. A pass goes over the slots from the first to the last of its
requests; those between them that have no rows are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from draftree.drafting.published.layers import Span
from draftree.native import load_library
from draftree.runner.cpu.layers import CompiledAngles, CompiledLayer, CompiledStack
from draftree.runner.eager.parts import Heads, Norm, Parts
from draftree.runner.eager.runner import Angles
from draftree.runner.kv.cache import BLOCK, SlotCache
from draftree.runner.plan import Segment
from draftree.runner.positions import Rotation


class Slot:
    """Where a text's keys and values are; free for others once nothing refers to it."""

    def __init__(self, owner: CompiledLayers, number: int) -> None:
        self.owner, self.number = owner, number

    def copied(self, end: int) -> Slot:
        """Return a slot with a copy of the first `end` rows."""
        made = self.owner.slot()
        self.owner.cache.move(self.number, made.number, end)
        return made


class CompiledLayers:
    """A head's layers in C; see `EagleHead.forward`.

    Args:
        library: the compiled functions.
        head: on a CPU, in float32 or with linears in 8 bits.
    """

    def __init__(self, library: Any, head: Any) -> None:
        self._head, count = head, len(head.layers)
        heads = [_parts(layer) for layer in head.layers]
        dim = heads[0].heads.dim
        self._rotation = Rotation(dim, dim, False, torch.device("cpu"))
        layers = [CompiledLayer(parts, None, self._rotation, torch.float32) for parts in heads]
        self._stack = CompiledStack(library, layers, torch.float32)
        self.cache = SlotCache(count, 1)
        self._slots: WeakSet[Slot] = WeakSet()
        self._angles = torch.empty(2, 0, dim, dtype=torch.float32, device="cpu")  # cosines and sines by position

    def slot(self) -> Slot:
        """Return an empty slot."""
        taken = {slot.number for slot in self._slots}
        number = next(n for n in range(len(taken) + 1) if n not in taken)
        if number >= self.cache.slots:
            self.cache.widen(2 * self.cache.slots)
        made = Slot(self, number)
        self._slots.add(made)
        return made

    def __call__(self, embeddings: Tensor, features: Tensor, positions: Tensor, spans: Sequence[Span]) -> Tensor:
        """See `EagleHead.forward`."""
        order = sorted(range(len(spans)), key=lambda i: spans[i].states.number)
        spans, counts = [spans[i] for i in order], [span.count for span in spans]
        if len(spans) > 1:
            embeddings, features, positions = (
                torch.cat([part.split(counts)[i] for i in order]) for part in (embeddings, features, positions)
            )
        x, entry = self._head.layers[0].enter(embeddings, features)
        x = x.clone()[None]
        self._stack.run(0, len(self._stack.layers), x, self._described(spans, positions, entry))
        if len(spans) == 1:
            return x[0]
        made = dict(zip(order, x[0].split([span.count for span in spans]), strict=True))
        return torch.cat([made[i] for i in range(len(order))])

    def _described(self, spans: Sequence[Span], positions: Tensor, entry: Tensor) -> CompiledAngles:
        """Describe a pass over the rows of `spans`, which stand in the order of their slots."""
        first, end = spans[0].states.number, spans[-1].states.number + 1
        rows, back = max(span.count for span in spans), max(span.drafts for span in spans)
        visible = np.ones((end - first, rows, back + rows), dtype=bool)
        places, known = np.zeros((end - first, rows), dtype=np.int64), positions.numpy()
        sizes, begin = [0] * (end - first), 0
        for number in range(first, end):
            self.cache.clear(number)
        for span in spans:
            number, count = span.states.number - first, span.count
            sizes[number], self.cache.lengths[first + number] = count, span.start
            places[number, :count] = known[begin : begin + count]
            if span.sees is not None:
                sees = span.sees.numpy()[:, -(span.drafts + count) :]
                visible[number, :count, back - span.drafts : back + count] = sees
            begin += count
        self.cache.open(first, end - first, rows)
        cosine, sine = self._turns(positions, int(places.max()) + 1)
        segment = Segment(0, None, torch.from_numpy(places), torch.from_numpy(visible))
        return CompiledAngles(
            Angles(cosine, sine, self.cache, self._rotation), segment, self._stack, sizes, entry.contiguous()
        )

    def _turns(self, positions: Tensor, longest: int) -> Tensor:
        """Return cosines and sines of positions [R], all below `longest`, [2, 1, R, 1, dim]."""
        if longest > self._angles.shape[1]:
            known = torch.arange(-(-longest // BLOCK) * BLOCK, device="cpu")
            like = torch.empty(1, dtype=torch.float32, device="cpu")
            cosine, sine = self._head.rope(like, known[None])
            self._angles = torch.stack(self._rotation.spread(cosine[0], sine[0]))
        return self._angles.index_select(1, positions)[:, None, :, None]


def compiled(head: Any) -> CompiledLayers | None:
    """Return a head's layers in C; None where this machine, or C, has none of the kind."""
    library = load_library()
    fits = head.norm.weight.is_cpu and head.layout.config.hidden_act == "silu"
    return None if library is None or not fits else CompiledLayers(library, head)


def _parts(layer: Any) -> Parts:
    attention, mlp = layer.self_attn, layer.mlp
    kv = attention.k_proj.out_features // attention.dim
    heads = Heads(kv, attention.q_proj.out_features // attention.dim // kv, attention.dim)
    norms: list[nn.Module | None] = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    own = None if norms[0] is None else (Norm.of(norms[0]), Norm.of(norms[1]))
    before = None if layer.first else Norm.of(layer.input_layernorm)
    return Parts(
        heads,
        attention.scaling,
        None,
        (before, Norm.of(layer.post_attention_layernorm)),
        (None, None),
        own,
        False,
        "silu",
        [attention.q_proj, attention.k_proj, attention.v_proj],
        attention.o_proj,
        [mlp.gate_proj, mlp.up_proj],
        mlp.down_proj,
    )
