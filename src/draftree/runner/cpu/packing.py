"""Pack a model's linears in place: the CPU runner's speed without a second copy of the weights.

A packed model computes and saves the same. Its weights are no longer parameters, so it cannot be trained, and code that
reads `weight` gets copies. `unpack_weights` reverses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

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


@torch.no_grad()
def pack_weights(model: Any) -> None:
    """Pack the linears of the decoder layers, and an untied head, one layer at a time.

    Args:
        model: a Hugging Face model in float32 or bfloat16 on the CPU that the eager runner drives.

    Raises:
        ValueError: a model that the eager runner does not drive, of another type or on another device, weights that
            cannot be laid so, or no compiled library.
    """
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
            _replace(layer, linears)
    head, embedding = target.model.get_output_embeddings(), target.model.get_input_embeddings()
    if type(head) is nn.Linear and head.weight is not embedding.weight:
        _replace(target.model, [head])


def pack_own(model: Any, runner: str) -> None:
    """Pack a newly loaded model in place if the runner would otherwise copy much of it.

    Args:
        model: a Hugging Face model.
        runner: name of the runner that will drive it.
    """
    if runner not in ("auto", "cpu"):
        return
    with suppress(TypeError, ValueError):
        if linear_bytes(inspect_model(model)) >= MUCH:
            pack_weights(model)


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


def _replace(parent: nn.Module, linears: Sequence[Any]) -> None:
    """Pack linears below `parent` that read the same input, in one piece of memory if groups of outputs allow it."""
    if any(type(linear) is not nn.Linear for linear in linears):
        return  # packed already
    if any(linear.out_features % LANES for linear in linears[:-1]):
        for linear in linears:
            _replace(parent, [linear])
        return
    packed, dtype = to_packed(in_16_bits(side_by_side(linears))), linears[0].weight.dtype
    counts = [-(-linear.out_features // LANES) for linear in linears]
    for linear, own in zip(linears, packed.split(counts), strict=True):
        made = PackedLinear(own, linear.out_features, linear.bias, dtype).train(linear.training)
        for module in list(parent.modules()):
            for name, child in list(module.named_children()):
                if child is linear:
                    setattr(module, name, made)
