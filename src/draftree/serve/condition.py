"""Whether a worker's engine answers: it may be stopping, over, or failing step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

FAILURES = 3  # of steps in a row, after which the server is failing; one may be the fault of a request
ACCELERATOR: Any = getattr(torch, "AcceleratorError", ())  # none but a new process can go on after it


@dataclass(slots=True)
class Condition:
    """The condition of a worker.

    Attributes:
        stopping: it takes nothing new.
        over: its thread has come upon an error that nobody foresaw, and ends.
        failures: steps that have failed since the last that succeeded.
    """

    stopping: bool = False
    over: bool = False
    failures: int = 0

    @property
    def failing(self) -> bool:
        """Whether steps fail, so that nobody is answered."""
        return self.failures >= FAILURES

    def stepped(self, error: Exception | None) -> None:
        """A step has ended, by an error or well (None)."""
        if error is None:
            self.failures = 0
        else:
            self.failures += FAILURES if isinstance(error, ACCELERATOR) else 1
