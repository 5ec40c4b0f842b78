"""What rows of a pass leave out: attention or MLP of some layers, or whole layers.

A layer adds the outputs of its attention and its MLP to the residual stream, so a row can do without either: its state
stays as it was. Rows that leave out every layer from n on exit there, and their logits approximate the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntFlag


class Omitted(IntFlag):
    """Parts of one layer; the numbers are those of `native/layers.c`."""

    ATTENTION = 1
    MLP = 2


@dataclass(frozen=True, slots=True)
class Skip:
    """The parts that all rows of a pass leave out.

    Attributes:
        attention: layers without attention; their keys and values are neither read nor written.
        mlp: layers without MLP. A layer without both is left out whole, cross attention included.
    """

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    @classmethod
    def of(cls, attention: Iterable[int] = (), mlp: Iterable[int] = ()) -> Skip:
        """From any collections of layer numbers."""
        return cls(frozenset(attention), frozenset(mlp))

    @classmethod
    def behind(cls, exit_layer: int, layers: int) -> Skip:
        """Everything from layer `exit_layer` on: only the first so many of `layers` layers are run."""
        return cls.of(range(exit_layer, layers), range(exit_layer, layers))

    def at(self, layer: int) -> Omitted:
        """What is left out of that layer."""
        return Omitted(Omitted.ATTENTION * (layer in self.attention) | Omitted.MLP * (layer in self.mlp))

    @property
    def whole(self) -> frozenset[int]:
        """Layers left out whole."""
        return self.attention & self.mlp

    def kept(self, layers: int) -> Sequence[int]:
        """The layers, of so many, that do anything."""
        whole = self.whole
        return [layer for layer in range(layers) if layer not in whole]
