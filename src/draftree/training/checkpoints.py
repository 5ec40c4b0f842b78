"""The checkpoints that Hugging Face's Trainer leaves in a folder: which one is the last, and whether a run is over."""

from __future__ import annotations

from pathlib import Path

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


def state_of(checkpoint: str | Path) -> TrainerState | None:
    """What the trainer had done by a checkpoint; None where it is not whole, since this is written last."""
    try:
        return TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
    except (OSError, ValueError, TypeError):
        return None


def last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written whole; None where there is none."""
    found = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.rpartition("-")[2].isdecimal()]
    for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        if state_of(path) is not None:
            return str(path)
    return None
