"""A decoder layer of a recorded pass on a GPU, in the kernels of `kernels` and, in 16 bits, of `products`."""

from __future__ import annotations

import torch
from torch import Tensor

from draftree.runner.cuda_graphs.kernels import add_norm, gated, turn_and_keep
from draftree.runner.cuda_graphs.products import Linear, gated_product, product, product_in_parts
from draftree.runner.eager.layer import Angles, TensorHead, TensorLayer
from draftree.runner.eager.parts import Norm
from draftree.runner.eager.product import StockProduct
from draftree.runner.layout.skip import Omitted


class KernelLayer(TensorLayer):
    """The same layer, on the same weights; its rows' keys and values go to `FixedSlots`.

    Args:
        layer: in tensor operations.
        following: the norm that reads what this layer gives, which is then taken while it is at hand; None for none.
    """

    def __init__(self, layer: TensorLayer, following: Norm | None) -> None:
        vars(self).update(vars(layer))
        self._following = following

    def enter(self, x: Tensor, angles: Angles, index: int) -> tuple[Tensor, Tensor, Tensor]:
        kv, groups, dim = self.parts.heads
        slots = angles.cache
        before = self.parts.norms[0]
        entering = slots.normed(before, x)
        given = _columns(self._qkv, _norm(before, x) if entering is None else entering, slots.many)
        query, key, value = given if len(given) == 3 else given[0].split([kv * groups * dim, kv * dim, kv * dim], -1)
        if self.parts.head_norms is not None:
            width = query.shape[-1] if self.parts.wide else dim
            of_query, of_key = self.parts.head_norms
            query = _norm(of_query, query.unflatten(-1, (-1, width))).flatten(2)
            key = _norm(of_key, key.unflatten(-1, (-1, key.shape[-1] if self.parts.wide else dim))).flatten(2)
        turned = angles.cosine, angles.sine, angles.rotation.partner
        query = turn_and_keep(query, key, value, *turned, slots.starts, slots.stores(index), groups)
        return query, *slots.band(index)

    def leave(self, x: Tensor, mixed: Tensor | None, angles: Angles) -> Tensor:
        """See `TensorLayer.leave`; the attention's result may also be [B, n, kv * groups * dim]."""
        omits_mlp, many = Omitted.MLP in self.omitted, angles.cache.many
        behind_attention, behind_mlp = self.parts.behind
        before_mlp = self.parts.norms[1]
        if mixed is None:
            entering = _norm(before_mlp, x)
        else:
            if mixed.dim() == 4:
                batch, n, _ = x.shape
                kv, groups, dim = self.parts.heads
                mixed = mixed.view(batch, kv, groups, n, dim).permute(0, 3, 1, 2, 4).reshape(batch, n, -1)
            more = _behind(self._output, mixed, behind_attention, many)
            x, entering = _add(x, more, None if omits_mlp else before_mlp)
        if omits_mlp:
            return x
        more = _behind(self._down, self._gated(entering, many), behind_mlp, many)
        x, ahead = _add(x, more, self._following)
        angles.cache.ahead = x, self._following, ahead
        return x

    def _gated(self, x: Tensor, many: bool) -> Tensor:
        """What the MLP's last linear reads."""
        linears = _linears(self._gate_up, x, many)
        if linears is None:
            given = self._gate_up.each(x)
            gate, up = given if len(given) == 2 else given[0].chunk(2, -1)
            return gated(gate, up, self.parts.activation)
        if len(linears) == 1:
            weight, bias = linears[0]
            biases = (None, None) if bias is None else bias.chunk(2)
            linears = list(zip(weight.chunk(2), biases, strict=True))
        gate_linear, up_linear = linears
        return gated_product(x, gate_linear, up_linear, self.parts.activation)


class KernelHead(TensorHead):
    """The same head, by the kernels."""

    def __init__(self, head: TensorHead) -> None:
        vars(self).update(vars(head))

    def __call__(self, x: Tensor) -> Tensor:
        (logits,) = _columns(self._head, _norm(self._norm, x), many=False)
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)


def _linears(of: StockProduct, x: Tensor, many: bool) -> list[Linear] | None:
    """The linears, if `products` multiplies them: in 16 bits, where rows of weights lie one behind the other."""
    linears = of.linears()
    alike = len({bias is None for _, bias in linears}) == 1
    fit = all(weight.is_contiguous() and weight.dtype == x.dtype for weight, _ in linears)
    return linears if x.dtype != torch.float32 and alike and fit and not many else None


def _columns(of: StockProduct, x: Tensor, many: bool) -> list[Tensor]:
    """What linears give: each its own, or all of them side by side."""
    linears = _linears(of, x, many)
    return of.each(x) if linears is None else [product(x, linears)]


def _behind(of: StockProduct, x: Tensor, norm: Norm | None, many: bool) -> Tensor:
    """What one linear, and a norm behind it, add to the states: parts [P, ..., d] to be added up."""
    linears = _linears(of, x, many)
    if linears is None or norm is not None:
        return _norm(norm, _columns(of, x, many)[0])[None]
    return product_in_parts(x, linears[0])


def _norm(norm: Norm | None, x: Tensor) -> Tensor:
    return _add(x, None, norm)[1]


def _add(x: Tensor, more: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """x + more [P, ..., d], and that behind the norm."""
    if norm is None and more is None:
        return x, x
    return add_norm(x, more, None if norm is None else norm.weight, 0.0 if norm is None else norm.epsilon)
