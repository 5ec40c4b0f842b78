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
from draftree.runner.weights.checksum import span_of

LANES = 16  # outputs of a panel
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # of weights, by their type (`products.h`)
IN_WORD = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}  # weights in four bytes
MUCH = 100_000_000  # bytes of weights, copies of which people want to know of


def to_panels(weight: Tensor, some: int | None = None) -> Tensor:
    """Weights in panels, with zeros behind the last output.

    Args:
        weight: [outputs, inputs] in float32, bfloat16 or int8; inputs that fill whole words of four bytes.
        some: inputs that lie together; by default those of a word.

    Returns:
        [panels, inputs, LANES]; else [panels, inputs / n, LANES, n], the n weights of an output that take four bytes.
    """
    outputs, inputs = weight.shape
    panels, some = -(-outputs // LANES), some or IN_WORD[weight.dtype]
    padded = F.pad(weight, (0, 0, 0, panels * LANES - outputs)) if outputs % LANES else weight
    made = weight.new_empty(panels, inputs // some, LANES, some)
    made.copy_(padded.view(panels, LANES, inputs // some, some).transpose(1, 2))
    return made if some > 1 else made.squeeze(3)


def from_panels(panels: Tensor, outputs: int) -> Tensor:
    """[outputs, inputs], a copy."""
    return panels.transpose(1, 2).reshape(-1, inputs_of(panels))[:outputs].contiguous()


def inputs_of(panels: Tensor) -> int:
    """How many inputs weights in panels have."""
    return panels.shape[1] * (panels.shape[3] if panels.dim() == 4 else 1)


def readable(panels: Tensor) -> bool:
    """Whether compiled functions read them: not where a packed model was moved, or cast to another type."""
    return panels.is_cpu and (panels.dtype, panels.dim()) in ((torch.float32, 3), (torch.bfloat16, 4))


def matrix_of(
    panels: Tensor, bias: Tensor | None, outputs: int, dtype: torch.dtype, scales: Tensor | None = None
) -> Matrix:
    """What C reads.

    Args:
        panels: contiguous.
        bias: [outputs] in float32, or None.
        outputs: how many.
        dtype: of results, to which they are rounded.
        scales: [outputs] in float32, of weights of 8 bits.
    """
    at = address(panels, panels.dtype), *(optional_address(t, torch.float32) for t in (bias, scales))
    return Matrix(*at, inputs_of(panels), outputs, KINDS[panels.dtype], dtype == torch.bfloat16)


def eight_bits(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Of a weight that torchao keeps in 8 bits, as `Int8WeightOnlyConfig` does.

    Returns:
        whole numbers int8 [outputs, inputs] and the scale of each output, [outputs] in the type of results; None for
        any other tensor, those of torchao that are not multiplied so included.
    """
    kind: Any = type(weight)
    if kind.__name__ != "Int8Tensor" or not kind.__module__.startswith("torchao.") or weight.dim() != 2:
        return None
    held: Any = weight
    more = (getattr(held, name, None) for name in ("act_quant_kwargs", "act_pre_scale"))
    if any(part is not None for part in more) or held.block_size[-1] < weight.shape[1]:
        return None
    zero = getattr(held, "zero_point", None)
    if held.scale.numel() not in (1, len(weight)) or (zero is not None and bool(zero.any())):
        return None
    return held.qdata, held.scale.to(weight.dtype).flatten().expand(len(weight))


def has_eight_bits(model: nn.Module) -> bool:
    """Whether linears of a model have such weights."""
    return any(type(m) is nn.Linear and eight_bits(m.weight) is not None for m in model.modules())


def weight_bytes(weight: Tensor) -> int:
    """Bytes that a weight takes."""
    found = eight_bits(weight)
    return weight.nbytes if found is None else sum(part.nbytes for part in found)


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
        lying = [m.linear.panels if isinstance(m, Stretch) else m.panels for m in linears] if panels is not None else []
        self.in_place = {span_of(p) for p in lying}
        self._scales = None
        dtype = linears[0].weight.dtype if panels is None else panels.dtype
        if panels is None:
            found = [eight_bits(m.weight) for m in linears]
            small = [parts for parts in found if parts is not None]
            if small:
                self._scales = torch.cat([scales for _, scales in small]).float()
            panels = to_panels(torch.cat([values for values, _ in small]) if small else side_by_side(linears))
        self._panels = panels
        self._bias = None if linears[0].bias is None else torch.cat([m.bias.detach() for m in linears]).float()
        outputs = sum(m.out_features for m in linears)
        self.described = matrix_of(panels, self._bias, outputs, dtype, self._scales)


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
    def in_features(self) -> int:
        """How many inputs."""
        return int(self.linear.in_features)

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
    return sum(weight_bytes(m.weight) for m in modules if type(m) is nn.Linear)


def misfit(groups: Sequence[Sequence[Any]]) -> str | None:
    """Why linears cannot be laid in panels, in words; None where they can.

    Args:
        groups: linears that read the same input, each group one matrix.
    """
    for linears in groups:
        kinds = {_type_of(m) for m in linears}
        if len(kinds) > 1:
            return "of linears that read the same input some have weights of 8 bits and some have not"
        if linears[0].in_features % IN_WORD.get(kinds.pop(), 1):
            return "weights are read four bytes at a time, and a linear of this model has no whole number of them"
    return None


def _type_of(linear: Any) -> torch.dtype:
    """Of the weights of a linear; those of a packed one are not copied for it."""
    linear = linear.linear if isinstance(linear, Stretch) else linear
    if isinstance(linear, PackedLinear):
        return linear.panels.dtype
    return torch.int8 if eight_bits(linear.weight) else linear.weight.dtype


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
        scratch = torch.empty_like(rows)
        at, by, to = (address(t, torch.float32) for t in (rows, scratch, out))
        matrix = matrix_of(self.panels, bias, self.out_features, x.dtype)
        library.layer_product(matrix, at, len(rows), torch.get_num_threads(), 0, by, to)
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
                some = self.panels.shape[3] if self.panels.dim() == 4 else 1  # of the type that they were packed in
                self.panels.copy_(to_panels(state_dict[name].to(self.panels), some))
