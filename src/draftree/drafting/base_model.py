"""The model that something was trained for: its name, and a hash of all its weights by which it is known again."""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftree.runner.target import inspect_model
from draftree.runner.weights.blocks import PackedEmbedding
from draftree.runner.weights.packed import PackedLinear
from draftree.runner.weights.stock import fingerprint, parts_of


@dataclass(frozen=True, slots=True)
class Base:
    """The model that something was trained for."""

    name: str  # its hub name, or the last part of its folder's
    hash: str  # `model_hash` of its weights
    model_type: str  # Hugging Face's name of the family


_hashes: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()


def model_hash(model: Any) -> str:
    """Return the SHA-256 (hexadecimal) of the names, shapes, dtypes and bytes of a model's parameters, sorted by name.

    Parameters of 16 bits count as float32, which holds them exactly: a drafter belongs to the model in either type.
    Computed once per model object, and again when its weights have changed.

    Raises:
        ValueError: weights that are not in memory.
    """
    packed: dict[str, Any] = {}
    for name, module in model.named_modules():  # a tied head counts as its embedding, as among parameters
        if isinstance(module, PackedLinear | PackedEmbedding):
            places = {other.packed.data_ptr() for other in packed.values()}
            packed |= {} if module.packed.data_ptr() in places else {f"{name}.weight": module}
    named = [(name, part) for name, parameter in model.named_parameters() for part in parts_of(parameter)]
    parameters = sorted([*named, *((name, m.packed) for name, m in packed.items())], key=lambda pair: pair[0])
    if any(parameter.is_meta for _, parameter in parameters):
        raise ValueError(
            "The model's weights are offloaded and cannot be compared: load the drafter with "
            "same_weights=False, or the model without offloading."
        )
    known = fingerprint(model)
    held = _hashes.get(model)
    if held is not None and held[0] == known:
        return held[1]
    digest = hashlib.sha256()
    for name, parameter in parameters:
        if name in packed:
            parameter = packed[name].weight
        if parameter.dtype in (torch.float16, torch.bfloat16):
            parameter = parameter.detach().float()
        digest.update(f"{name} {list(parameter.shape)} {parameter.dtype}\n".encode())
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    _hashes[model] = (known, digest.hexdigest())
    return digest.hexdigest()


def base_of(model: Any) -> Base:
    """Return the name, hash and family of `model`."""
    target = inspect_model(model)
    name = str(getattr(target.model.config, "_name_or_path", "") or target.model_type)
    if Path(name).is_dir():  # a path of this machine says nothing to others
        name = Path(name).resolve().name
    return Base(name, model_hash(target.model), target.model_type)
