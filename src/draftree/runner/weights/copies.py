"""What a runner copied of its model when it was opened, and whether the model is still as it was then."""

from __future__ import annotations

from typing import Any

from torch import nn

from draftree.runner.own_thread import lock_of
from draftree.runner.weights.checksum import Span, weights_checksums
from draftree.runner.weights.stock import state_of


class Copies:
    """The weights that a runner computes with: copies in a layout of its own, or the model's as they lie.

    Attributes:
        nbytes: bytes that the copies take.
        in_place: where the weights lie that are read from the model itself.
        state: of the model when it was looked at (`state_of`); None where nobody has looked.
        checksums: of the weights when they were copied, but for those in place; None where all are in place.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.in_place: set[Span] = set()
        self.state: list[Any] | None = None
        self.checksums: list[bytes] | None = None

    def keep_checksums(self, checksums: dict[Span, bytes]) -> None:
        """What all weights were before they were copied, by their places; `in_place` must be known."""
        self.checksums = [checksum for span, checksum in checksums.items() if span not in self.in_place]

    def outdated(self, model: nn.Module) -> bool:
        """Whether `model` has changed since; it reads all weights that were copied."""
        with lock_of(model):  # no pass of another thread may have its hooks there
            if self.state is not None and self.state != state_of(model):
                return True
        if self.checksums is None:
            return False
        return self.checksums != [*weights_checksums(model, lambda span: span not in self.in_place).values()]

    def in_place_checksums(self, model: nn.Module) -> list[bytes]:
        """Of the weights that are read where the model has them: a change shows in passes, but not in keys and values.

        Raises:
            ValueError: weights that are not in memory.
        """
        of = None if self.checksums is None else self.in_place.__contains__
        return [*weights_checksums(model, of).values()]
