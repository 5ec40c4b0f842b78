"""Read the files of a published drafter: its configuration, its tensors, and which tensors belong to which module."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from draftree.drafting.published.layers import CONFIGS
from draftree.errors import brief

Tensors = dict[str, Tensor]


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json.

    Raises:
        ValueError: it is missing or broken.
    """
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        config = None
    if not isinstance(config, dict):
        raise ValueError(f"{str(folder / 'config.json')!r} is missing or broken: fetch the drafter's folder anew.")
    return config


def read_tensors(folder: Path) -> Tensors:
    """Return all tensors of a folder's safetensors files, or else of its pytorch_model.bin, which holds only tensors.

    Raises:
        ValueError: no such file, or a broken one.
    """
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    found: Tensors = {}
    for file in files:
        try:
            if file.suffix == ".bin":
                found |= torch.load(file, "cpu", weights_only=True)
            else:
                found |= load_file(file)
        except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as error:
            raise ValueError(f"{str(file)!r} is broken: fetch the drafter's folder anew ({brief(error)}).") from None
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{str(file)!r} holds more than tensors, which draftree does not open: ask for a safetensors file."
            ) from error
    if not found:
        raise ValueError(f"The folder {str(folder)!r} holds no weights: fetch the drafter's folder anew.")
    return found


def layer_config(given: Mapping[str, Any], folder: Path) -> Any:
    """Return the configuration of a drafter's decoder layers, of Llama's or Qwen 3's kind.

    Raises:
        ValueError: another kind of layer, or sizes that do not fit together.
    """
    given = given.get("transformer_layer_config") or given  # speculators nests it
    kind = given.get("model_type")
    if kind not in CONFIGS:
        raise ValueError(
            f"The drafter in {str(folder)!r} has layers of the kind {brief(repr(kind))}, and draftree runs "
            f"{' and '.join(CONFIGS)}: use another drafter of this model."
        )
    own = {key: value for key, value in given.items() if key not in ("architectures", "auto_map", "torch_dtype")}
    try:
        return CONFIGS[kind](**own)
    except Exception as error:  # Hugging Face's validators have errors of their own
        raise ValueError(f"{folder / 'config.json'} does not describe a layer: {brief(error)}.") from None


def fill(module: nn.Module, tensors: Tensors, folder: Path, unused: Iterable[str] = ()) -> None:
    """Put tensors into a module, in their own type.

    Args:
        module: on any device, also meta.
        tensors: by the names of the module's.
        folder: named in errors.
        unused: names that may be left over.

    Raises:
        ValueError: a tensor is missing, left over or of another shape.
    """
    expected = {name: list(tensor.shape) for name, tensor in module.state_dict().items()}
    given = {name: list(tensor.shape) for name, tensor in tensors.items() if name not in set(unused)}
    for name in sorted({*expected, *given}):
        if given.get(name) != expected.get(name):
            raise ValueError(
                f"The drafter in {str(folder)!r} has {_said(given, name)} for {name!r}, and {_said(expected, name)} is "
                "expected by its configuration: fetch the folder anew, or use another drafter of this model."
            )
    module.load_state_dict({name: tensors[name] for name in expected}, assign=True)


def _said(shapes: Mapping[str, list[int]], name: str) -> str:
    return f"a tensor of shape {shapes[name]}" if name in shapes else "no tensor"


def draft_vocabulary(tensors: Tensors, size: int) -> Tensor | None:
    """Return the target's token id of each draft id, LongTensor [Vd]; None where they are the same.

    `d2t` holds offsets: token = draft id + d2t[draft id]. All zeros are the identity.
    """
    offsets = tensors.get("d2t")
    if offsets is None or not bool(offsets.any()):
        return None
    return offsets.long() + torch.arange(size, dtype=torch.long, device="cpu")
