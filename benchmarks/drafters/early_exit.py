"""The first layers of a model as a small model: the early-exit pair of BiLD, and a self-speculative drafter.

`early_exit_model` returns a stock Hugging Face model with fewer layers on the parameters of the large one: embedding,
first layers, final norm and head. It can be the small model of BiLD or DraftModel, or be trained together with the
large one (`benchmarks.drafters.exit_training`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from draftree.drafting import DraftModel
from draftree.runner.target import inspect_model

COUNTS = ("num_decoder_layers", "decoder_layers")  # what encoder-decoders call the number of decoder layers


def early_exit_model(model: Any, layers: int) -> Any:
    """Return a stock model of the first `layers` layers of `model`, on the same parameters.

    An encoder-decoder keeps its whole encoder; its decoder is shortened. Whatever changes the one model's weights
    changes the other's.

    Args:
        model: a Hugging Face causal language model or encoder-decoder, as loaded.
        layers: how many of its (decoder) layers, 1 or more and fewer than it has.

    Returns:
        A model of the same class in evaluation mode.

    Raises:
        TypeError, ValueError: a model that draftree cannot drive, a number out of range, or modules that are not stock
            (quantised, packed, adapted).
    """
    target = inspect_model(model)
    model, total = target.model, len(target.layers)
    if not 1 <= layers < total:
        raise ValueError(f"layers is {layers} and the model has {total}: give 1 to {total - 1}.")
    config = copy.deepcopy(model.config)
    if target.encoder_decoder:
        setattr(config, next(name for name in COUNTS if hasattr(config, name)), layers)
    else:
        text = config.get_text_config(decoder=True)
        for name, value in vars(text).copy().items():  # one entry a layer: kinds of attention and the like
            if isinstance(value, list | tuple) and len(value) == total:
                setattr(text, name, type(value)(value[:layers]))
        text.num_hidden_layers = layers
    with torch.device("meta"):
        small = type(model)(config)
    for name, module in small.named_modules():
        _share(module, model.get_submodule(name), name)
    small.generation_config = copy.deepcopy(model.generation_config)
    return small.eval()


def _share(module: nn.Module, theirs: nn.Module, name: str) -> None:
    """Give `module` the tensors of `theirs`."""
    if type(module) is not type(theirs):
        raise ValueError(
            f"The model's {name or 'class'} is a {type(theirs).__name__}, not a stock {type(module).__name__}: take "
            "the early layers of the model as it was loaded, without quantisation, packing or adapters."
        )
    module._parameters.update({key: theirs._parameters[key] for key in module._parameters})
    module._buffers.update({key: theirs._buffers[key] for key in module._buffers})
    for key, value in vars(module).items():  # tensors that are neither
        if isinstance(value, torch.Tensor):
            setattr(module, key, getattr(theirs, key))


class SelfSpeculative(DraftModel):
    """Drafts with the first layers of the target itself, and a KV cache of their own.

    Early-exit self-speculation (Elhoushi et al., 2024), the baseline of BiTA's Table 2 and Hidden Transfer's Table 1.
    It drafts a chain of six tokens with the second likeliest token at each place.

    Args:
        model: the target, as of `early_exit_model`.
        exit_layer: layers of it that draft; None for half of them.
    """

    name = method = "self-speculative"

    def __init__(self, model: Any, exit_layer: int | None = None) -> None:
        layers = exit_layer or max(len(inspect_model(model).layers) // 2, 1)
        super().__init__(early_exit_model(model, layers), depth=6, branching=2, beam=1)
