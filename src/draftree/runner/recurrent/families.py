"""The families of hybrid models that draftree drives."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

from draftree.runner.recurrent.operators import CONV_STEP, SCANS


@dataclass(frozen=True, slots=True)
class Recurrence:
    """How a family's recurrent layers are driven.

    Attributes:
        files: modelling files that hold the operators.
        chunk: number of tokens at whose multiples a prompt may be cut, so that the model's scan computes the same; None
            where it loses the state of earlier rows, so that a prompt must be read in one pass.
    """

    files: tuple[str, ...]
    chunk: int | None

    def prompt_rows(self, most: int) -> int:
        """Return how many rows of a prompt to read at once: at most `most`, unless the model needs more."""
        return WHOLE if self.chunk is None else max(most // self.chunk, 1) * self.chunk


CHUNKS = ("mamba_chunk_size", "chunk_size")  # The chunk length of Mamba-2's scan in configurations.
WHOLE = 1 << 30  # More rows than any prompt has.
CHUNK = 64  # That of the gated delta rule; convolutions have none.

# By Hugging Face's `model_type`. True where the scan takes no initial state.
FAMILIES: dict[str, bool] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear"), False),
    **dict.fromkeys(("granitemoehybrid", "bamba", "nemotron_h", "falcon_h1", "zamba2", "mamba2"), False),
    **dict.fromkeys(("lfm2", "lfm2_moe"), False),
    **dict.fromkeys(("jamba", "mamba", "falcon_mamba"), True),
}


def recurrence_of(model: nn.Module, config: Any) -> Recurrence | None:
    """Return how a model's recurrent layers are driven; None for a family without them, or one that is not known."""
    if config.model_type not in FAMILIES:
        return None
    files = {type(module).__module__ for module in model.modules()}
    names = (CONV_STEP, *SCANS)
    found = sorted(file for file in files if any(hasattr(sys.modules[file], name) for name in names))
    chunk = next((size for name in CHUNKS if (size := getattr(config, name, None))), CHUNK)
    return Recurrence(tuple(found), None if FAMILIES[config.model_type] else int(chunk))
