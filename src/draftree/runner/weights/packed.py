"""Packed weights: groups of sixteen outputs, as the compiled products read them, and a linear that holds them.

A decoding step multiplies a handful of rows, and one pass over packed weights feeds them all (`native/products.h`).
Runners make a packed copy, or the model's own linears are packed once and there is no second copy
(`draftree.runner.cpu.runner`).

A step takes as long as reading its weights. Weights of a 16-bit checkpoint that was loaded in float32 are packed in 16
bits and multiplied as float32, which halves the bytes. Results are equal to the last bit, except for bfloat16 on
processors with AMX, which sums in another order (`native/amx.h`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftree.native import load_library
from draftree.native.structures import Matrix, address, beside, optional_address
from draftree.runner.weights.blocks import LANES as LANES
from draftree.runner.weights.blocks import PackedEmbedding, all_floats, blocks_matrix, eight_bit_blocks, pack_blocks
from draftree.runner.weights.stock import eight_bits, weight_bytes

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float16: 3}  # of weights, by type (`products.h`)
IN_WORD = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}  # weights of an output that lie together in four bytes
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # types of numbers that no cast changes
SOME = 256  # outputs compared at a time
MUCH = 100_000_000  # bytes of copied weights from which on the command line packs the model instead


def in_16_bits(weight: Tensor) -> Tensor:
    """Return float32 weights [outputs, inputs] in bfloat16 or float16, if one of these holds each exactly."""
    if weight.dtype != torch.float32 or weight.shape[1] % 2:
        return weight
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(part, part.to(dtype).float()) and part.isfinite().all() for part in weight.split(SOME)):
            return weight.to(dtype)
    return weight


def to_packed(weight: Tensor) -> Tensor:
    """Pack weights, with zeros behind the last output.

    Returns:
        [groups, inputs, LANES]; of types of which n lie together (`IN_WORD`), where inputs fill whole words,
        [groups, inputs / n, LANES, n].
    """
    outputs, inputs = weight.shape
    groups, some = -(-outputs // LANES), IN_WORD.get(weight.dtype, 1)
    some = 1 if inputs % some else some
    padded = F.pad(weight, (0, 0, 0, groups * LANES - outputs)) if outputs % LANES else weight
    made = weight.new_empty(groups, inputs // some, LANES, some)
    made.copy_(padded.view(groups, LANES, inputs // some, some).transpose(1, 2))
    return made if some > 1 else made.squeeze(3)


def from_packed(packed: Tensor, outputs: int) -> Tensor:
    """Unpack weights to [outputs, inputs], a copy."""
    return packed.transpose(1, 2).reshape(-1, inputs_of(packed))[:outputs].contiguous()


def inputs_of(packed: Tensor) -> int:
    """Return the number of inputs of packed weights."""
    return packed.shape[1] * (packed.shape[3] if packed.dim() == 4 else 1)


def matrix_of(
    packed: Tensor, bias: Tensor | None, outputs: int, dtype: torch.dtype, scales: Tensor | None = None
) -> Matrix:
    """Describe packed weights for C.

    Args:
        packed: contiguous; of 16 bits also where results are float32.
        bias: [outputs] in float32, or None.
        dtype: of results, to which they are rounded.
        scales: [outputs] in float32, of weights of 8 bits.
    """
    at = address(packed, packed.dtype), *(optional_address(t, torch.float32) for t in (bias, scales))
    return Matrix(*at, inputs_of(packed), outputs, KINDS[packed.dtype], dtype == torch.bfloat16, outputs)


def scratch_for(rows: int, inputs: int) -> Tensor:
    """Return memory in which compiled products lay rows of so many inputs: up to six bytes of each number."""
    return torch.empty(rows * inputs * 3 // 2, dtype=torch.float32, device="cpu")


def parameter_count(model: nn.Module) -> int:
    """Return how many weights a model has, packed and quantised ones included, and those of a tied head once."""
    held = [m for m in model.modules() if isinstance(m, PackedLinear | PackedEmbedding)]
    inside = {m.packed.data_ptr(): m for m in held}.values()
    sizes = [
        m.num_embeddings * m.embedding_dim if isinstance(m, PackedEmbedding) else m.in_features * m.out_features
        for m in inside
    ]
    for m in model.modules():  # Linears of other packages hold several weights in a number, or none as a parameter.
        inputs, outputs = getattr(m, "in_features", None), getattr(m, "out_features", None)
        if isinstance(inputs, int) and isinstance(outputs, int) and m not in held and not list(m.children()):
            sizes.append(max(0, inputs * outputs - sum(p.numel() for p in m.parameters(recurse=False) if p.dim() > 1)))
    return sum(p.numel() for p in model.parameters()) + sum(sizes)


class Packed:
    """Linears on the same input as one packed matrix.

    Packed linears of one piece of memory, one behind the other, are read where they are; others are copied.

    Attributes:
        nbytes: bytes that copies of weights take.
    """

    def __init__(self, linears: Sequence[Any]) -> None:
        if all(in_blocks(m) for m in linears):
            self._read_blocks(linears)
            return
        packed = joined([m.packed for m in linears]) if all(isinstance(m, PackedLinear) for m in linears) else None
        self._scales = None
        dtype = linears[0].weight.dtype if packed is None else linears[0].dtype
        outputs = sum(m.out_features for m in linears)
        self.nbytes = 0
        if packed is None:
            found = [eight_bits(m.weight) for m in linears]
            small = [parts for parts in found if parts is not None]
            if small:
                self._scales = torch.cat([scales for _, scales in small]).float()
            weight = torch.cat([values for values, _ in small]) if small else in_16_bits(side_by_side(linears))
            packed, self.nbytes = to_packed(weight), weight.nbytes
        self._bias = None if linears[0].bias is None else torch.cat([m.bias.detach() for m in linears]).float()
        self._held: Any = packed  # C has its address
        self.described = matrix_of(packed, self._bias, outputs, dtype, self._scales)

    def _read_blocks(self, linears: Sequence[Any]) -> None:
        """Read linears in blocks in place, one matrix beside the other."""
        self.nbytes = 0
        self._biases = [None if m.bias is None else m.bias.detach().float() for m in linears]
        parts = []
        for m, bias in zip(linears, self._biases, strict=True):
            at = optional_address(bias, torch.float32)
            parts.append(blocks_matrix(m.packed, m.form, m.in_features, m.out_features, at))
        self._held = parts, [m.packed for m in linears]  # C has their addresses
        self.described = beside(parts)


def in_eight_bits(linear: nn.Linear) -> PackedLinear:
    """Return a linear rounded to blocks of 8 bits, with results in float32; its inputs are a multiple of 32."""
    packed = pack_blocks(eight_bit_blocks(linear.weight), "Q8_0", linear.in_features)
    bias = None if linear.bias is None else nn.Parameter(linear.bias.float())
    return PackedLinear(packed, linear.out_features, bias, torch.float32, ("Q8_0", linear.in_features))


def part_of(linear: Any, first: int, last: int) -> Any:
    """Return outputs [first, last) of a linear as a linear of its own, in its memory if it ends with groups."""
    bias = None if linear.bias is None else nn.Parameter(linear.bias.detach()[first:last], requires_grad=False)
    if isinstance(linear, PackedLinear) and first % LANES == last % LANES == 0:
        blocks = None if linear.form is None else (linear.form, linear.in_features)
        return PackedLinear(linear.packed[first // LANES : last // LANES], last - first, bias, linear.dtype, blocks)
    made = nn.Linear(linear.in_features, last - first, bias=False, device="meta")
    made.weight = nn.Parameter(linear.weight.detach()[first:last], requires_grad=False)
    made.register_parameter("bias", bias)
    return made


def in_blocks(linear: Any) -> bool:
    """Return whether a linear holds the blocks of a GGUF file."""
    return isinstance(linear, PackedLinear) and linear.form is not None


def side_by_side(linears: Sequence[Any]) -> Tensor:
    """Return weights [outputs of all, inputs]; a single linear's own, as a copy would leave a hole in the heap."""
    weights = [m.weight.detach() for m in linears]
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def linear_bytes(target: Any) -> int:
    """Return the bytes that a copy of the stock linears of a target's layers and head takes."""
    modules = [m for layer in target.layers for m in layer.modules()] + [target.model.get_output_embeddings()]
    # compressed-tensors gives a linear its weight in the first pass.
    return sum(weight_bytes(m.weight) for m in modules if type(m) is nn.Linear and hasattr(m, "weight"))


def misfit(groups: Sequence[Sequence[Any]]) -> str | None:
    """Return why linears cannot be packed; None if they can."""
    for linears in groups:
        if all(in_blocks(m) for m in linears):
            continue
        kinds = {_type_of(m) for m in linears}
        if len(kinds) > 1:
            return "of linears that read the same input some have weights of 8 bits and some have not"
        if linears[0].in_features % IN_WORD.get(kinds.pop(), 1):
            return "weights are read four bytes at a time, and a linear of this model has no whole number of them"
    return None


def _type_of(linear: Any) -> torch.dtype:
    """Return the dtype of a linear's weights, without unpacking them."""
    if isinstance(linear, PackedLinear):
        return linear.dtype
    return torch.int8 if eight_bits(linear.weight) else linear.weight.dtype


def is_packed(model: nn.Module) -> bool:
    """Return whether linears of a model are packed."""
    return any(isinstance(module, PackedLinear) for module in model.modules())


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Join tensors along their first dimension without a copy; None if they are not adjacent in memory."""
    first = parts[0]
    end = first.data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += part.nbytes
    rows = sum(part.shape[0] for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


class PackedLinear(nn.Module):
    """A linear whose weight is packed.

    It multiplies as `nn.Linear` does and saves the same tensors; `weight` is a copy, made by each access. Moves, casts,
    loading a state and gradients of the weight need `unpack_weights` first.

    Attributes:
        packed: see `to_packed`, perhaps `in_16_bits`, or `pack_blocks`; a buffer, as the layout is not the model's.
        form: of the blocks of a GGUF file that it holds; None for numbers.
        dtype: of the weight, of which `packed` may hold fewer bits.
        bias: parameter [out_features], or None.
    """

    packed: Tensor

    def __init__(
        self,
        packed: Tensor,
        outputs: int,
        bias: nn.Parameter | None,
        dtype: torch.dtype,
        blocks: tuple[str, int] | None = None,
        *,
        saved: bool = True,
    ) -> None:
        """`blocks` are the format and the inputs of packed blocks; `saved` is off for a tied head."""
        super().__init__()
        self.saved = saved
        self.form: str | None = None if blocks is None else blocks[0]
        self.in_features = inputs_of(packed) if blocks is None else blocks[1]
        self.out_features, self.dtype = outputs, dtype
        self.register_buffer("packed", packed, persistent=False)
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features] in `dtype`, a copy."""
        if self.form is not None:
            return all_floats(self.packed, self.form, self.in_features, self.out_features).to(self.dtype)
        return from_packed(self.packed, self.out_features).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [..., in_features] to [..., out_features]."""
        library = load_library()
        plain = x.dtype == self.dtype and x.is_cpu
        if library is None or not plain or (x.requires_grad and torch.is_grad_enabled()):
            return F.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, self.in_features).float().contiguous()
        out = rows.new_empty(rows.shape[0], self.out_features)
        if self not in _described:
            _described[self] = Packed([self])
        scratch = scratch_for(len(rows), self.in_features)
        at, by, to = (address(t, torch.float32) for t in (rows, scratch, out))
        library.layer_product(_described[self].described, at, len(rows), torch.get_num_threads(), 0, by, to)
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    @torch.no_grad()
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        _described.pop(self, None)
        empty = fn(self.packed.new_empty(0, dtype=self.dtype))
        if empty.dtype != self.dtype or not empty.is_cpu:
            raise ValueError("Packed weights stay on the CPU in their type: call draftree.unpack_weights(model) first.")
        bits, dtype = fn(self.packed.view(BITS[self.packed.itemsize])), self.packed.dtype
        self._buffers["packed"] = None  # `fn` may cast 16 bits to the type of the weight
        super()._apply(fn, recurse)
        self._buffers["packed"] = bits.view(dtype)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.saved:
            destination[prefix + "weight"] = self.weight


_described: WeakKeyDictionary[PackedLinear, Packed] = WeakKeyDictionary()  # what C reads of the linears
