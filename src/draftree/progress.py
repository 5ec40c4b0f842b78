"""The progress reports of measurements and trainings."""

from __future__ import annotations


class Watcher:
    """Receive the progress of a run; the base class shows nothing."""

    def stage(self, name: str, total: int | None) -> None:
        """Begin a stage of `total` steps; None if they cannot be counted."""

    def step(self) -> None:
        """Count one finished step of the stage."""
