"""Weights in panels of sixteen outputs, as the compiled products read them, and a linear that holds its own so.

A decoding step multiplies a handful of rows. In panels one pass over the weights feeds them all
(`native/products.h`), and a stock linear's layout would have to be read against the grain. So runners make a copy in
panels; or the model's linears themselves are put into panels, once, and there is no second copy
(`draftree.runner.cpu.packing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftree.native import load_library
from draftree.native.addresses import address, optional_address
from draftree.native.structures import Matrix
from draftree.runner.weights.checksum import place_of

LANES = 16  # outputs of a panel
KINDS = {torch.float32: 0, torch.bfloat16: 1}  # of weights, by their type (`products.h`)
MUCH = 100_000_000  # bytes of weights, copies of which people want to know of


def to_panels(weight: Tensor) -> Tensor:
    """Weights in panels, with zeros behind the last output.

    Args:
        weight: [outputs, inputs] in float32, or in bfloat16 with an even number of inputs.

    Returns:
        [panels, inputs, LANES]; in bfloat16 [panels, inputs / 2, LANES, 2], a pair of inputs in four bytes.
    """
    outputs, inputs = weight.shape
    panels, pair = -(-outputs // LANES), 2 if weight.dtype == torch.bfloat16 else 1
    padded = F.pad(weight, (0, 0, 0, panels * LANES - outputs)) if outputs % LANES else weight
    made = weight.new_empty(panels, inputs // pair, LANES, pair)
    made.copy_(padded.view(panels, LANES, inputs // pair, pair).transpose(1, 2))
    return made if pair > 1 else made.squeeze(3)


def from_panels(panels: Tensor, outputs: int) -> Tensor:
    """[outputs, inputs], a copy."""
    return panels.transpose(1, 2).reshape(-1, inputs_of(panels))[:outputs].contiguous()


def inputs_of(panels: Tensor) -> int:
    """How many inputs weights in panels have."""
    return panels.shape[1] * (panels.shape[3] if panels.dim() == 4 else 1)


def readable(panels: Tensor) -> bool:
    """Whether compiled functions read them: not where a packed model was moved, or cast to another type."""
    return panels.is_cpu and (panels.dtype, panels.dim()) in ((torch.float32, 3), (torch.bfloat16, 4))


def matrix_of(panels: Tensor, bias: Tensor | None, outputs: int) -> Matrix:
    """What C reads of readable panels, and of a bias [outputs] in float32."""
    at, of_bias = address(panels, panels.dtype), optional_address(bias, torch.float32)
    return Matrix(at, of_bias, inputs_of(panels), outputs, KINDS[panels.dtype])


class Packed:
    """Linears on the same input as one matrix in panels; `described` is what C reads.

    Linears that hold panels of one piece of memory, one behind the other, are read where they are; others are copied.

    Attributes:
        in_place: places of the panels that are read where they are.
    """

    def __init__(self, linears: Sequence[Any]) -> None:
        held = [m.panels if isinstance(m, PackedLinear | Stretch) else None for m in linears]
        whole = all(p is not None and readable(p) for p in held)
        panels = joined([p for p in held if p is not None]) if whole else None
        self.in_place = {place_of(p) for p in held if p is not None} if panels is not None else set()
        if panels is None:
            panels = to_panels(side_by_side(linears))
        self._panels = panels
        self._bias = None if linears[0].bias is None else torch.cat([m.bias.detach() for m in linears]).float()
        self.described = matrix_of(panels, self._bias, sum(m.out_features for m in linears))


class Stretch(NamedTuple):
    """Outputs [first, last) of a linear, as one of its own.

    Attributes:
        linear: stock or packed.
        first, last: which outputs.
    """

    linear: Any
    first: int
    last: int

    @property
    def out_features(self) -> int:
        """How many outputs."""
        return self.last - self.first

    @property
    def weight(self) -> Tensor:
        """[outputs, inputs]."""
        weight: Tensor = self.linear.weight[self.first : self.last]
        return weight

    @property
    def bias(self) -> Tensor | None:
        """[outputs], or None."""
        return None if self.linear.bias is None else self.linear.bias[self.first : self.last]

    @property
    def panels(self) -> Tensor | None:
        """Those of a packed linear, where both ends are those of panels."""
        if not isinstance(self.linear, PackedLinear) or self.first % LANES or self.last % LANES:
            return None
        return self.linear.panels[self.first // LANES : self.last // LANES]


def side_by_side(linears: Sequence[Any]) -> Tensor:
    """Weights [outputs of all, inputs]; a single linear's own, as a copy would leave a hole in the heap."""
    weights = [m.weight.detach() for m in linears]
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def linear_bytes(target: Any) -> int:
    """Bytes that a copy of the stock linears of a target's layers and head takes."""
    modules = [m for layer in target.layers for m in layer.modules()] + [target.model.get_output_embeddings()]
    return sum(m.weight.nbytes for m in modules if type(m) is nn.Linear)


def pairs_fit(target: Any) -> bool:
    """Whether all linears of a target's layers have an even number of inputs, as panels in bfloat16 need."""
    modules = [m for layer in target.layers for m in layer.modules()] + [target.model.get_output_embeddings()]
    return all(m.in_features % 2 == 0 for m in modules if isinstance(m, nn.Linear | PackedLinear))


def packed(model: nn.Module) -> bool:
    """Whether linears of a model lie in panels."""
    return any(isinstance(module, PackedLinear) for module in model.modules())


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Contiguous tensors as one along their first dimension, without a copy; None where they do not lie so."""
    first = parts[0]
    end = first.data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += part.nbytes
    rows = sum(part.shape[0] for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


class PackedLinear(nn.Module):
    """A linear whose weight lies in panels, and nowhere else.

    It multiplies as `nn.Linear` does and saves and loads the same tensors; `weight` is a copy, made at each look. What
    needs gradients of the weight needs `unpack_weights` first.

    Attributes:
        panels: see `to_panels`; no parameter, as it is not the model's own layout.
        bias: parameter [out_features], or None.
    """

    panels: Tensor

    def __init__(self, panels: Tensor, outputs: int, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs_of(panels), outputs
        self.register_buffer("panels", panels, persistent=False)
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], a copy."""
        return from_panels(self.panels, self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        library = load_library()
        plain = x.dtype == self.panels.dtype and x.is_cpu and readable(self.panels)
        if library is None or not plain or (x.requires_grad and torch.is_grad_enabled()):
            return F.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, self.in_features).float().contiguous()
        out = rows.new_empty(rows.shape[0], self.out_features)
        bias = None if self.bias is None else self.bias.float()
        at, to = address(rows, torch.float32), address(out, torch.float32)
        matrix = matrix_of(self.panels, bias, self.out_features)
        library.layer_product(matrix, at, len(rows), torch.get_num_threads(), 0, to)
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """See `nn.Linear`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing: Any,
        unexpected: Any,
        errors: Any,
    ) -> None:
        name = prefix + "weight"
        rest = {key: value for key, value in state_dict.items() if key != name}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing, unexpected, errors)
        if name not in state_dict:
            missing.append(name)
        elif state_dict[name].shape != (self.out_features, self.in_features):
            errors.append(
                f"{name} has shape {list(state_dict[name].shape)}, not {[self.out_features, self.in_features]}"
            )
        else:
            with torch.no_grad():
                self.panels.copy_(to_panels(state_dict[name].to(self.panels)))
