"""Pack a model's linears in place: the CPU runner's speed without a second copy of the weights.

A packed model computes, saves and loads the same. Its weights are no longer parameters, so it cannot be trained, and
code that reads `weight` gets copies. `unpack_weights` reverses it.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import c_size_t, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftree.native import load_library
from draftree.runner.cpu.runner import TYPES
from draftree.runner.eager.parts import Parts, products_of
from draftree.runner.eager.runner import EagerRunner
from draftree.runner.target import inspect_model
from draftree.runner.weights.blocks import PackedEmbedding
from draftree.runner.weights.packed import (
    LANES,
    MUCH,
    PackedLinear,
    in_16_bits,
    linear_bytes,
    misfit,
    side_by_side,
    to_packed,
)

NOT_NEEDED = 4  # MADV_DONTNEED of Linux


def pack_weights(model: Any) -> None:
    """Pack the linears of the decoder layers, and an untied head, one layer at a time.

    Args:
        model: a Hugging Face model in float32 or bfloat16 on the CPU that the eager runner drives.

    Raises:
        ValueError: a model that the eager runner does not drive, of another type or on another device, weights that
            cannot be laid so, or no compiled library.
    """
    _pack(model, forget=lambda weight: None)


@torch.no_grad()
def _pack(model: Any, forget: Callable[[Tensor], None]) -> None:
    """`pack_weights`; `forget` is given every weight that has been packed."""
    target = inspect_model(model)
    if not EagerRunner.qualifies(target):
        raise ValueError(
            f"This '{target.model_type}' model does not qualify for the eager runner, and nothing else reads packed "
            "weights: leave it as it is."
        )
    if target.dtype not in TYPES or target.device.type != "cpu":
        raise ValueError(
            "Weights are packed in float32 or bfloat16 on the CPU, and these are "
            f"{target.dtype} on {target.device.type}: leave the model as it is, or move it first."
        )
    reason = misfit(products_of(target))
    if reason is not None:
        raise ValueError(f"This model's weights cannot be packed, as {reason}: leave it as it is.")
    if load_library() is None:
        raise ValueError(
            "Packed weights need the compiled layers, which are missing or stale: install a C compiler and reinstall "
            "draftree; in a clone of it, run python hatch_build.py."
        )
    for layer in target.layers:
        for linears in Parts.of(layer, target.config).linears():
            _replace(layer, linears, forget)
    head, embedding = target.model.get_output_embeddings(), target.model.get_input_embeddings()
    if type(head) is nn.Linear and head.weight is not embedding.weight:
        _replace(target.model, [head], forget)


def pack_own(model: Any, runner: str) -> None:
    """Pack a newly loaded model in place if the runner would otherwise copy much of it.

    The pages of its file are given back layer by layer, so that at no time there are two copies in memory.

    Args:
        model: a Hugging Face model.
        runner: name of the runner that will drive it.
    """
    if runner not in ("auto", "cpu"):
        return
    with suppress(TypeError, ValueError):
        if linear_bytes(inspect_model(model)) >= MUCH:
            _pack(model, forget=drop_file_pages)


@torch.no_grad()
def unpack_weights(model: Any) -> None:
    """Replace packed linears by ordinary ones, whose new parameters require gradients as Hugging Face's do."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, PackedLinear):
                linear = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
                linear.weight = nn.Parameter(module.weight)
                linear.register_parameter("bias", module.bias)
                setattr(parent, name, linear.train(module.training))
            elif isinstance(module, PackedEmbedding):
                setattr(parent, name, module.unpacked())
    if getattr(model.config, "tie_word_embeddings", False):
        model.tie_weights()


def _replace(parent: nn.Module, linears: Sequence[Any], forget: Callable[[Tensor], None]) -> None:
    """Pack linears below `parent` that read the same input, in one piece of memory if groups of outputs allow it."""
    if any(type(linear) is not nn.Linear for linear in linears):
        return  # packed already
    if any(linear.out_features % LANES for linear in linears[:-1]):
        for linear in linears:
            _replace(parent, [linear], forget)
        return
    packed, dtype = to_packed(in_16_bits(side_by_side(linears))), linears[0].weight.dtype
    for linear in linears:
        forget(linear.weight.detach())
    counts = [-(-linear.out_features // LANES) for linear in linears]
    for linear, own in zip(linears, packed.split(counts), strict=True):
        made = PackedLinear(own, linear.out_features, linear.bias, dtype).train(linear.training)
        for module in list(parent.modules()):
            for name, child in list(module.named_children()):
                if child is linear:
                    setattr(module, name, made)


def drop_file_pages(tensor: Tensor) -> None:
    """Release the memory of a tensor that is mapped from a file; the system reads it again on access.

    Changes of the tensor since loading are lost, so this is only for a newly loaded model. Only Linux has the call.
    """
    if sys.platform != "linux" or not tensor.is_cpu:
        return
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end and _of_file(begin, end):
        ctypes.CDLL(None).madvise(c_void_p(begin), c_size_t(end - begin), NOT_NEEDED)


def _of_file(begin: int, end: int) -> bool:
    """Return whether these addresses belong to one mapped file."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, _, _, _, inode, *_ = line.split()
        first, last = (int(address, 16) for address in addresses.split("-"))
        if first <= begin and end <= last:
            return inode != "0"
    return False
