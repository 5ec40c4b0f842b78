"""What was trained for a small model, made to fit a large one that it was inflated to.

The large model's hidden states begin with the small one's, so matrices on them are set into larger ones, prompt keys go
to the heads and entries where the small model's went, and layers are counted as `Places.layer` counts them. Draft
tokens are the small drafter's, and their cost is that of a drafter of the large model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftree.bench.inflate.model import places_of
from draftree.bench.inflate.places import Places
from draftree.bench.inflate.weights import GAIN, NEVER
from draftree.drafting.folder import Trained

Rule = Callable[[Places, float, Tensor], Tensor]


def inflate_drafter(drafter: Trained, model: Any) -> Any:
    """The drafter (or early head) of the large `model` with the draft tokens that `drafter` has for the small one.

    Args:
        drafter: BiTA, Hidden Transfer, Medusa, SelfSpeculative or an early head of the small model.
        model: what `inflate` made of that model.

    Returns:
        One of the same class and settings, on the CPU in fp32, with layers of the large model.

    Raises:
        ValueError: a model that was not inflated, or from another one than the drafter was trained for; a drafter that
            holds a tensor which no rule here knows.
    """
    places = places_of(model)
    hash_ = model.config.inflated_from["hash"]
    if drafter.base is not None and drafter.base.hash != hash_:
        raise ValueError(
            f"This {drafter.method} drafter was trained for {drafter.base.name!r}, and the model was inflated from "
            "another one: inflate the model that it was trained for."
        )
    for name in ("hidden_size", "layers"):
        own, needed = drafter.shapes()[name], getattr(places.small, name)
        if own != needed:
            raise ValueError(
                f"This {drafter.method} drafter is made for a model with {name} {own}, and the "
                f"model was inflated from one with {needed}: inflate the model that it was made for."
            )
    settings = dict(drafter.settings)
    for name in ("layer", "transfer_layers", "exit_layer"):
        if isinstance(layers := settings.get(name), int):
            settings[name] = places.layer(layers)
        elif layers is not None:
            settings[name] = [places.layer(i) for i in layers]
    for name in ("skip_attention", "skip_mlp"):  # a layer becomes one that does its work and others that do nothing
        if name in settings:
            settings[name] = [i for n in settings[name] for i in range(places.layer(n), places.layer(n + 1))]
    constant = 0.0
    if places.constant is not None:
        constant = float(model.get_input_embeddings().weight.detach()[0, places.constant])
    large = type(drafter).fresh(model, **settings)
    rules = RULES.get(drafter.method, {})
    made = {}
    for name, tensor in drafter.weights.state_dict().items():
        rule = next((rule for ending, rule in rules.items() if name.endswith(ending)), None)
        if rule is None:
            raise ValueError(
                f"There is no rule to inflate {name!r} of a {drafter.method} drafter: add one to {__name__}."
            )
        made[name] = rule(places, constant, tensor.detach().float().cpu())
    large.weights.load_state_dict(made)
    return large


def _padded(tensor: Tensor, *shape: int) -> Tensor:
    """`tensor` at the beginning of zeros of `shape`."""
    made = torch.zeros(shape)
    made[tuple(slice(n) for n in tensor.shape)] = tensor
    return made


def _square(places: Places, constant: float, tensor: Tensor) -> Tensor:
    """A matrix from states to states, which hands the constant on."""
    made = _change(places, constant, tensor)
    if places.constant is not None:
        made[places.constant, places.constant] = 1
    return made


def _change(places: Places, constant: float, tensor: Tensor) -> Tensor:
    """A matrix or bias of what is added to states, which leaves the constant alone."""
    return _padded(tensor, *[places.large.hidden_size] * tensor.dim())


def _columns(places: Places, constant: float, tensor: Tensor) -> Tensor:
    """A matrix that reads states."""
    return _padded(tensor, tensor.shape[0], places.large.hidden_size)


def _rows(places: Places, constant: float, tensor: Tensor) -> Tensor:
    """A matrix whose result is added to states."""
    return _padded(tensor, places.large.hidden_size, tensor.shape[1])


def _head(places: Places, constant: float, tensor: Tensor) -> Tensor:
    """A head of its own over the vocabulary; tokens that the small model lacks never win."""
    made = _padded(tensor, places.large.vocab_size, places.large.hidden_size)
    if places.constant is not None:
        made[places.small.vocab_size :, places.constant] = NEVER
    return made


def _states(places: Places, constant: float, tensor: Tensor) -> Tensor:
    """States that enter in place of embeddings."""
    made = _columns(places, constant, tensor)
    if places.constant is not None:
        made[:, places.constant] = constant
    return made


def _gains(places: Places, constant: float, tensor: Tensor) -> Tensor:
    """A norm before the model's head."""
    made = _change(places, constant, tensor * math.sqrt(places.small.hidden_size / places.large.hidden_size))
    if places.constant is not None:
        made[places.constant] = GAIN
    return made


def _keys(places: Places, constant: float, tensor: Tensor) -> Tensor:
    """Keys [L, kv heads, P, head_dim] of prompts, in layers, heads and entries of the small model's."""
    return _by_layer_and_head(places, tensor, places.turned())


def _values(places: Places, constant: float, tensor: Tensor) -> Tensor:
    """Values of prompts, as `_keys`."""
    return _by_layer_and_head(places, tensor, torch.arange(places.small.head_dim))


def _by_layer_and_head(places: Places, tensor: Tensor, entries: Tensor) -> Tensor:
    large = places.large
    made = torch.zeros(large.layers, large.kv_heads, tensor.shape[2], large.head_dim)
    layers = torch.tensor([places.layer(i) for i in range(places.small.layers)])
    for number in range(places.copies):
        heads = torch.tensor(places.keys(number))
        part = torch.zeros(*tensor.shape[:3], large.head_dim)
        part[..., entries] = tensor
        made[layers[:, None], heads] = part
    return made


# By method, how tensors whose names end so are made larger.
RULES: dict[str, dict[str, Rule]] = {
    "hidden-transfer": {"weight": _square},
    "medusa": {"linear.weight": _change, "linear.bias": _change, "weight": _head},
    "bita": {"mask_embeddings": _states, "prompt_keys": _keys, "prompt_values": _values},
    "self-speculative": {},
    "early-head": {"norm": _gains, "projection": _square, "down": _columns, "up": _rows},
}
