"""A decoder layer of a recorded pass on a GPU: the products are torch's, what lies between them is in `kernels`."""

from __future__ import annotations

from torch import Tensor

from draftree.runner.cuda_graphs.kernels import add_norm, gated, turn_and_keep
from draftree.runner.eager.layer import Angles, TensorLayer
from draftree.runner.eager.parts import Norm, normed
from draftree.runner.layout.skip import Omitted


class KernelLayer(TensorLayer):
    """The same layer, on the same weights; its rows' keys and values go to `FixedSlots`.

    Args:
        layer: in tensor operations.
    """

    def __init__(self, layer: TensorLayer) -> None:
        vars(self).update(vars(layer))

    def enter(self, x: Tensor, angles: Angles, index: int) -> tuple[Tensor, Tensor, Tensor]:
        kv, groups, dim = self.parts.heads
        given = self._qkv.each(_norm(self.parts.norms[0], x))
        query, key, value = _columns(given, [kv * groups * dim, kv * dim, kv * dim])
        if self.parts.head_norms is not None:
            width = query.shape[-1] if self.parts.wide else dim
            of_query, of_key = self.parts.head_norms
            query = _norm(of_query, query.unflatten(-1, (-1, width))).flatten(2)
            key = _norm(of_key, key.unflatten(-1, (-1, key.shape[-1] if self.parts.wide else dim))).flatten(2)
        slots = angles.cache
        turned = angles.cosine, angles.sine, angles.rotation.partner
        query = turn_and_keep(query, key, value, *turned, slots.starts, slots.stores(index), groups)
        return query, *slots.band(index)

    def leave(self, x: Tensor, mixed: Tensor | None, angles: Angles) -> Tensor:
        """See `TensorLayer.leave`; the attention's result may also be [B, n, kv * groups * dim]."""
        behind_attention, behind_mlp = self.parts.behind
        before_mlp, omits_mlp = self.parts.norms[1], Omitted.MLP in self.omitted
        if mixed is not None:
            if mixed.dim() == 4:
                batch, n, _ = x.shape
                kv, groups, dim = self.parts.heads
                mixed = mixed.view(batch, kv, groups, n, dim).permute(0, 3, 1, 2, 4).reshape(batch, n, -1)
            more = normed(behind_attention, self._output(mixed))
            if before_mlp is not None and not omits_mlp:
                x, entering = add_norm(x, more, before_mlp.weight, before_mlp.epsilon)
            else:
                x = entering = x + more
        else:
            entering = _norm(before_mlp, x)
        if omits_mlp:
            return x
        parts = self._gate_up.each(entering)
        gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
        return x + normed(behind_mlp, self._down(gated(gate, up, self.parts.activation)))


def _norm(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else add_norm(x, None, norm.weight, norm.epsilon)[1]


def _columns(parts: list[Tensor], widths: list[int]) -> list[Tensor]:
    """What linears gave side by side: each one's own, or columns of what one product gave for all."""
    return parts if len(parts) == len(widths) else list(parts[0].split(widths, -1))
