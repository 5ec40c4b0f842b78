"""What was trained for a small model, made to fit a large one that it was inflated to.

The large model's hidden states begin with the small one's, so matrices on them are set into larger ones, prompt keys go
to the heads and entries where the small model's went, and layers are counted as `Places.layer` counts them. Draft
tokens are the small drafter's, and their cost is that of a drafter of the large model. An EAGLE-3 head reads the small
model's entries alone, and costs what it did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.inflate.model import places_of
from benchmarks.inflate.places import Places
from benchmarks.inflate.weights import GAIN, NEVER
from draftree.drafting.folder import Trained
from draftree.drafting.published.eagle import Eagle3
from draftree.drafting.published.features import Sizes
from draftree.runner import Runner


class SmallEagle3(Eagle3):
    """A small model's EAGLE-3 head on a large one.

    Args:
        drafter: for the small model.
        model: what `inflate` made of that model.
    """

    def __init__(self, drafter: Eagle3, model: Any) -> None:
        places, vocabulary = places_of(model), drafter.vocabulary
        ids = None if vocabulary is None else torch.from_numpy(vocabulary)
        super().__init__(drafter.head, [places.layer(tap) for tap in drafter.taps], ids)
        self.sizes = Sizes(places.large.hidden_size, None, places.large.vocab_size)
        self._width = places.small.hidden_size
        if self.head.embed_tokens is None:
            table = model.get_input_embeddings().weight.detach()[:, : self._width]
            self.head.embed_tokens = nn.Embedding.from_pretrained(table.clone())

    def features_of(self, taps: Sequence[Tensor], runner: Runner) -> Tensor:
        """See `FeatureDrafter.features_of`."""
        return super().features_of([tap[..., : self._width] for tap in taps], runner)


def inflate_drafter(drafter: Trained | Eagle3, model: Any) -> Any:
    """Return a drafter (or early head) of the large `model` with the draft tokens of the small model's `drafter`.

    Args:
        drafter: BiTA, Hidden Transfer, Medusa, EAGLE-3 or an early head of the small model.
        model: what `inflate` made of that model.

    Returns:
        One of the same class and settings, on the CPU in fp32, with layers of the large model.

    Raises:
        ValueError: a model that was not inflated, or from another one than the drafter was trained for; a drafter that
            holds a tensor which no rule here knows.
    """
    if isinstance(drafter, Eagle3):
        return SmallEagle3(drafter, model)
    places = places_of(model)
    if places.small.recurrent:
        raise ValueError("Drafters of a model with recurrent layers cannot be inflated: its states were scaled.")
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
    for name in ("layer", "transfer_layers"):
        if isinstance(layers := settings.get(name), int):
            settings[name] = places.layer(layers)
        elif layers is not None:
            settings[name] = [places.layer(i) for i in layers]
    large = type(drafter).fresh(model, **settings)
    enlarged, rules, made = _Enlarged(places, model), RULES[drafter.method], {}
    for name, tensor in drafter.weights.state_dict().items():
        rule = next((rule for ending, rule in rules.items() if name.endswith(ending)), None)
        if rule is None:
            raise ValueError(
                f"There is no rule to inflate {name!r} of a {drafter.method} drafter: add one to {__name__}."
            )
        made[name] = rule(enlarged, tensor.detach().float().cpu())
    large.weights.load_state_dict(made)
    return large


class _Enlarged:
    """Makes tensors that were trained for the small model ones of the large `model`."""

    def __init__(self, places: Places, model: Any) -> None:
        self._places, self._at = places, places.constant
        self._width = places.large.hidden_size
        if self._at is not None:
            self._constant = float(model.get_input_embeddings().weight.detach()[0, self._at])

    def square(self, tensor: Tensor) -> Tensor:
        """Return a matrix from states to states, which hands the constant on."""
        made = self.change(tensor)
        if self._at is not None:
            made[self._at, self._at] = 1
        return made

    def change(self, tensor: Tensor) -> Tensor:
        """Return a matrix or bias of what is added to states, which leaves the constant alone."""
        return _padded(tensor, *[self._width] * tensor.dim())

    def columns(self, tensor: Tensor) -> Tensor:
        """Return a matrix that reads states."""
        return _padded(tensor, tensor.shape[0], self._width)

    def rows(self, tensor: Tensor) -> Tensor:
        """Return a matrix whose result is added to states."""
        return _padded(tensor, self._width, tensor.shape[1])

    def head(self, tensor: Tensor) -> Tensor:
        """Return a head of its own over the vocabulary; tokens that the small model lacks never win."""
        made = _padded(tensor, self._places.large.vocab_size, self._width)
        if self._at is not None:
            made[self._places.small.vocab_size :, self._at] = NEVER
        return made

    def states(self, tensor: Tensor) -> Tensor:
        """Return states that enter in place of embeddings."""
        made = self.columns(tensor)
        if self._at is not None:
            made[:, self._at] = self._constant
        return made

    def gains(self, tensor: Tensor) -> Tensor:
        """Return a norm before the model's head."""
        made = self.change(tensor * math.sqrt(self._places.small.hidden_size / self._width))
        if self._at is not None:
            made[self._at] = GAIN
        return made

    def keys(self, tensor: Tensor) -> Tensor:
        """Return keys [L, kv heads, P, head_dim] of prompts, in layers, heads and entries of the small model's."""
        return self._by_layer_and_head(tensor, self._places.turned())

    def values(self, tensor: Tensor) -> Tensor:
        """Return values of prompts, as `keys`."""
        return self._by_layer_and_head(tensor, torch.arange(self._places.small.head_dim))

    def _by_layer_and_head(self, tensor: Tensor, entries: Tensor) -> Tensor:
        places, large = self._places, self._places.large
        made = torch.zeros(large.layers, large.kv_heads, tensor.shape[2], large.head_dim)
        layers = torch.tensor([places.layer(i) for i in range(places.small.layers)])
        part = torch.zeros(*tensor.shape[:3], large.head_dim)
        part[..., entries] = tensor
        for number in range(places.copies):
            made[layers[:, None], torch.tensor(places.key_heads(number))] = part
        return made


def _padded(tensor: Tensor, *shape: int) -> Tensor:
    """`tensor` at the beginning of zeros of `shape`."""
    made = torch.zeros(shape)
    made[tuple(slice(n) for n in tensor.shape)] = tensor
    return made


# By method, how tensors whose names end so are made larger.
RULES: dict[str, dict[str, Callable[[_Enlarged, Tensor], Tensor]]] = {
    "hidden-transfer": {"weight": _Enlarged.square},
    "medusa": {"linear.weight": _Enlarged.change, "linear.bias": _Enlarged.change, "weight": _Enlarged.head},
    "bita": {
        "mask_embeddings": _Enlarged.states,
        "prompt_embeddings": _Enlarged.states,
        "prompt_keys": _Enlarged.keys,
        "prompt_values": _Enlarged.values,
    },
    "early-head": {
        "norm": _Enlarged.gains,
        "projection": _Enlarged.square,
        "down": _Enlarged.columns,
        "up": _Enlarged.rows,
    },
}
