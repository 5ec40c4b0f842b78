"""A decoder layer of a recorded pass on a GPU, in the kernels of `kernels` and, in 16 bits, of `products`."""

from __future__ import annotations

import torch
from torch import Tensor

from draftree.runner.cuda_graphs.kernels import add_norm, gated, rotate_and_store
from draftree.runner.cuda_graphs.products import Linear, gated_product, product, product_in_parts
from draftree.runner.eager.layer import Angles, TensorHead, TensorLayer
from draftree.runner.eager.parts import Norm, StockProduct


class KernelLayer(TensorLayer):
    """The same layer, on the same weights; its rows' keys and values go to `FixedSlots`.

    Args:
        layer: in tensor operations.
        next_norm: first norm of the next layer, which the last kernel of this one computes; None for none.
    """

    def __init__(self, layer: TensorLayer, next_norm: Norm | None) -> None:
        vars(self).update(vars(layer))
        self._next_norm = next_norm

    def enter(self, x: Tensor, angles: Angles, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `TensorLayer.enter`; keys and values are a band of all slots."""
        kv, groups, dim = self.parts.heads
        slots, norm = angles.cache, self.parts.norms[0]
        normed = _norm(norm, x) if slots.normed is None else slots.normed
        outputs = _outputs(self._qkv, normed, slots.by_torch)
        widths = [kv * groups * dim, kv * dim, kv * dim]
        query, key, value = outputs if len(outputs) == 3 else outputs[0].split(widths, -1)
        if self.parts.head_norms is not None:
            query_norm, key_norm = self.parts.head_norms
            query = _norm(query_norm, query if self.parts.wide else query.unflatten(-1, (-1, dim))).flatten(2)
            key = _norm(key_norm, key if self.parts.wide else key.unflatten(-1, (-1, dim))).flatten(2)
        rotation = angles.cosine, angles.sine, angles.rotation.partner
        query = rotate_and_store(query, key, value, *rotation, slots.slots, slots.starts, slots.stores(index), groups)
        return query, *slots.band(index)

    def leave(self, x: Tensor, mixed: Tensor, angles: Angles) -> Tensor:
        """See `TensorLayer.leave`; the attention's result may also be [B, n, kv * groups * dim]."""
        slots = angles.cache
        behind_attention, behind_mlp = self.parts.behind
        before_mlp = self.parts.norms[1]
        if mixed.dim() == 4:
            mixed = self.parts.heads.side_by_side(mixed)
        more = _output_in_parts(self._output, mixed, behind_attention, slots.by_torch)
        x, entering = _add_norm(x, more, before_mlp)
        more = _output_in_parts(self._down, self._gated(entering, slots.by_torch), behind_mlp, slots.by_torch)
        x, slots.normed = _add_norm(x, more, self._next_norm)
        return x

    def _gated(self, x: Tensor, by_torch: bool) -> Tensor:
        """Return the input of the MLP's last linear: the activation of the gate, times the other half."""
        linears = _linears(self._gate_up, x, by_torch)
        if linears is None:
            outputs = self._gate_up.outputs(x)
            gate, up = outputs if len(outputs) == 2 else outputs[0].chunk(2, -1)
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
        (logits,) = _outputs(self._head, _norm(self._norm, x), by_torch=False)
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)


def _linears(stock: StockProduct, x: Tensor, by_torch: bool) -> list[Linear] | None:
    """Return the linears that `products` multiplies with x; None where torch does.

    They are contiguous, of the type of x, which has 16 bits, and all have a bias or none has.
    """
    linears = stock.linears()
    alike = len({bias is None for _, bias in linears}) == 1
    fit = all(weight.is_contiguous() and weight.dtype == x.dtype for weight, _ in linears)
    return linears if x.dtype != torch.float32 and alike and fit and not by_torch else None


def _outputs(stock: StockProduct, x: Tensor, by_torch: bool) -> list[Tensor]:
    linears = _linears(stock, x, by_torch)
    return stock.outputs(x) if linears is None else [product(x, linears)]


def _output_in_parts(stock: StockProduct, x: Tensor, norm: Norm | None, by_torch: bool) -> Tensor:
    """Return the summands [P, ..., d] that one linear, and a norm behind it, add to the hidden states."""
    linears = _linears(stock, x, by_torch)
    if linears is None or norm is not None:
        return _norm(norm, _outputs(stock, x, by_torch)[0])[None]
    return product_in_parts(x, linears[0])


def _norm(norm: Norm | None, x: Tensor) -> Tensor:
    return _add_norm(x, None, norm)[1]


def _add_norm(x: Tensor, more: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """Return x + more [P, ..., d], and the norm of that."""
    if norm is None and more is None:
        return x, x
    return add_norm(x, more, None if norm is None else norm.weight, 0.0 if norm is None else norm.epsilon)
