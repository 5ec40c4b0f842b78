"""Checks, between requests, that a model is still the one that an engine was made for."""

from __future__ import annotations

from draftree.engine.slots import Slots
from draftree.runner import Runner


class ModelWatch:
    """Compares a model with what its runner copied, and has slots forget what older weights computed.

    To compare takes as long as a step of decoding: the engine does it when the first request comes after a pause.

    Args:
        runner: runs the passes.
        slots: may keep keys and values of requests that have left.

    Attributes:
        just_compared: whether whoever made the engine has just compared the model, so that the next check need not.
    """

    def __init__(self, runner: Runner, slots: Slots) -> None:
        self._runner, self._slots = runner, slots
        self._read_by = self._in_place()  # by which weights prompts were read
        self.just_compared = False

    def check(self) -> None:
        """Refuse to answer as a model that has changed; for a request that comes while none waits or runs.

        Raises:
            ValueError: it has changed, or was put into a training mode in which no two passes agree.
        """
        if self.just_compared:
            self.just_compared = False
            return
        self._runner.target.refuse_training()
        if self._runner.outdated:
            raise ValueError(
                "The model has changed since this engine was made, which would answer as it was: make a new Engine."
            )
        weights = self._in_place()
        if weights != self._read_by:
            self._slots.forget()
            self._read_by = weights

    def _in_place(self) -> list[bytes]:
        """Checksums of the weights that are read where they lie, as far as anything that they computed is kept."""
        return self._runner.copied.in_place_checksums(self._runner.target.model) if self._slots.keeps else []
