"""How long a training run took in all its parts: a resumed run goes on counting where its checkpoint was written."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from draftree.files import parse_json, write_json

FILE = "elapsed.json"  # in every checkpoint


class Elapsed(TrainerCallback):
    """Counts from now on, and leaves the count in every checkpoint.

    Args:
        checkpoint: folder of the one that the run goes on from; None for a new run.
    """

    def __init__(self, checkpoint: str | None) -> None:
        self._begin, self._worked = time.perf_counter(), time.process_time()
        self._before = {"seconds": 0.0, "cpu_seconds": 0.0}
        kept = None if checkpoint is None else Path(checkpoint) / FILE
        if kept is not None and kept.is_file():  # a kill may come between a checkpoint and its count
            self._before = parse_json(kept.read_bytes())

    @property
    def total(self) -> dict[str, float]:
        """`seconds` by the clock, and `cpu_seconds` of this process, which a busy machine moves less."""
        now = {"seconds": time.perf_counter() - self._begin, "cpu_seconds": time.process_time() - self._worked}
        return {name: round(self._before[name] + spent, 1) for name, spent in now.items()}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint has been written."""
        if state.is_world_process_zero:
            write_json(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / FILE, self.total)
