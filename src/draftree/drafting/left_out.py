"""What of a model is left out where the model drafts for itself, and whether a given model can do without it."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Self

from draftree.errors import check_least, layers_of
from draftree.runner.hooked.bypass import omitted_modules
from draftree.runner.layout.skip import Skip
from draftree.runner.target import Target


class LeftOut(NamedTuple):
    """All layers from one on, or the attentions and MLPs of some."""

    exit_layer: int | None  # run the first so many layers alone; None where parts are left out
    skip_attention: tuple[int, ...]  # layers whose attention is left out, ascending
    skip_mlp: tuple[int, ...]  # layers whose MLP is left out, ascending

    @classmethod
    def of(cls, exit_layer: int | None, skip_attention: Collection[int], skip_mlp: Collection[int]) -> Self:
        """Of a user's options.

        Raises:
            TypeError: something else where layers are listed.
            ValueError: an exit layer that is no number of layers, nothing to leave out, or both ways at once.
        """
        attention, mlp = layers_of("skip_attention", skip_attention), layers_of("skip_mlp", skip_mlp)
        check_least(1, exit_layer=exit_layer)
        skips = bool(attention or mlp)
        if skips == (exit_layer is not None):
            raise ValueError(
                "SelfSpeculative leaves parts of the model out: give exit_layer, or skip_attention and skip_mlp "
                f"({'not both' if skips else 'draftree train skip-set searches them'})."
            )
        return cls(exit_layer, tuple(sorted(attention)), tuple(sorted(mlp)))

    def skip(self, target: Target) -> Skip:
        """What rows leave out in `target`.

        Raises:
            ValueError: layers that it does not have, nothing left in or out, or a part that cannot be left out alone.
        """
        layers = len(target.layers)
        if self.exit_layer is not None:
            if self.exit_layer >= layers:
                raise ValueError(
                    f"exit_layer is {self.exit_layer} and the model has {layers} layers: give 1 to {layers - 1}."
                )
            return Skip.behind(self.exit_layer, layers)
        for option, numbers in (("skip_attention", self.skip_attention), ("skip_mlp", self.skip_mlp)):
            for number in numbers:
                if not 0 <= number < layers:
                    raise ValueError(f"{option} names layer {number}: this model has layers 0 to {layers - 1}.")
        skip = Skip.of(self.skip_attention, self.skip_mlp)
        if not skip.kept(layers):
            raise ValueError("skip_attention and skip_mlp leave out the whole model: keep a layer or more.")
        for number in range(layers):
            if skip.at(number):
                omitted_modules(target.layers[number], skip.at(number))
        return skip
