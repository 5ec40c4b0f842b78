"""How far a long piece of work is: what measurements and trainings report while they run."""

from __future__ import annotations


class Watcher:
    """Receives how far a run is; the base class shows nothing."""

    def stage(self, name: str, total: int | None) -> None:
        """A stage begins; `total` is its steps, None where they cannot be counted."""

    def step(self) -> None:
        """One step of the stage is done."""
