"""Weights of any supported model in the blocks of GGUF files: `--quantize q4_0` and `q8_0`.

A block has 32 weights and one scale; the package gguf makes them, as llama.cpp does. The embedding and the head, in
which a model is most sensitive, have 8 bits with both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftree.native import load_library
from draftree.runner.eager.parts import FAMILIES
from draftree.runner.weights.blocks import FORMATS, PackedEmbedding, pack_blocks
from draftree.runner.weights.packed import PackedLinear

TABLES = "Q8_0"  # the format of embedding and head


def check_family(source: str | Path, quantize: str) -> None:
    """Refuse a model whose layers have no products with blocks, before it is loaded."""
    from transformers import AutoConfig

    family = AutoConfig.from_pretrained(source).model_type
    if family not in FAMILIES:
        raise ValueError(
            f"--quantize {quantize} is for the families {', '.join(FAMILIES)}, and this model is of '{family}': "
            "leave it out, or give int8."
        )
    if load_library() is None:
        raise ValueError(
            f"--quantize {quantize} needs the compiled functions, which are missing or stale: install a C compiler and "
            "reinstall draftree; in a clone of it, run python hatch_build.py."
        )


@torch.no_grad()
def to_blocks(model: Any, form: str) -> list[str]:
    """Put a model's linears and embedding into blocks, in place; what is left is float32.

    Returns:
        Names of linears whose inputs are no multiple of 32, which are left as numbers.
    """
    embedding, head, left = model.get_input_embeddings(), model.get_output_embeddings(), []
    tied = head.weight is embedding.weight
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    table = next(name for name, module in model.named_modules() if module is embedding)
    for name in linears:
        module = model.get_submodule(name)  # not held before, so that its numbers go when it is replaced
        if tied and module is head:
            continue
        kind = TABLES if module is head else form
        if module.in_features % FORMATS[kind][1]:
            left.append(name)
            continue
        packed = _packed(module.weight, kind)
        bias = None if module.bias is None else nn.Parameter(module.bias.float())
        blocks = kind, module.in_features
        model.set_submodule(name, PackedLinear(packed, module.out_features, bias, torch.float32, blocks))
    if embedding.embedding_dim % FORMATS[TABLES][1] == 0:
        made = PackedEmbedding(_packed(embedding.weight, TABLES), TABLES, embedding)
        model.set_submodule(table, made)
        if tied:
            model.set_output_embeddings(tied_head(made))
    model.float()
    return left


def tied_head(embedding: PackedEmbedding) -> PackedLinear:
    """Return a head that reads the weights of the embedding."""
    blocks = embedding.form, embedding.embedding_dim
    return PackedLinear(embedding.packed, embedding.num_embeddings, None, torch.float32, blocks, saved=False)


def _packed(weight: Tensor, form: str) -> Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    rows = quantize(weight.float().numpy(), GGMLQuantizationType[form])
    return pack_blocks(rows, form, weight.shape[1])
