"""Record hidden states of a frozen model at the rows of a data set, once for all passes of a training.

A folder holds one safetensors file for every 64 rows. A file is written whole, so a stopped recording goes on with the
next one; a file's name has a hash of its contents' source, so those of other data or taps are not taken for it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftree.drafting.folder import model_hash
from draftree.files import replacing
from draftree.runner.hooked.runner import HookedRunner
from draftree.runner.plan import Plan
from draftree.runner.target import Target
from draftree.training.rows import Row

SHARD = 64  # Rows of a file.
BATCH = 8  # Rows of a pass.
EVERY = 20.0  # Seconds between two lines of progress.


class Recording:
    """Hold the hidden states of a data set's rows, in a folder.

    Args:
        folder: is made where it is missing.
        target: the model.
        taps: layers whose incoming hidden states are recorded.
        rows: of the data set.
        bf16: whether the model computes in mixed precision.
    """

    def __init__(self, folder: Path, target: Target, taps: Sequence[int], rows: Sequence[Row], *, bf16: bool) -> None:
        self.folder, self.target, self.taps, self.bf16 = folder, target, tuple(taps), bf16
        self._shards: dict[int, list[Row]] = {}
        for row in sorted(rows, key=lambda row: row.number):
            self._shards.setdefault(row.number // SHARD, []).append(row)
        source = f"{model_hash(target.model)} {self.taps} {bf16}"
        self._paths = {number: folder / _name(number, held, source) for number, held in self._shards.items()}
        self._files: dict[int, Any] = {}

    def __getitem__(self, number: int) -> Tensor:
        """Return the tapped hidden states of a row side by side, bfloat16 [T, taps * d]."""
        shard = number // SHARD
        if shard not in self._files:
            self._files[shard] = safe_open(str(self._paths[shard]), "pt")
        states: Tensor = self._files[shard].get_tensor(str(number))
        return states

    def complete(self, report: Callable[[str], None]) -> None:
        """Record the rows that are missing; `report` gets lines of progress."""
        self.folder.mkdir(parents=True, exist_ok=True)
        left = [number for number, path in self._paths.items() if not path.is_file()]
        begin = reported = time.monotonic()
        for done, number in enumerate(left, 1):
            with replacing(self._paths[number]) as path:
                save_file(self._record(self._shards[number]), path)
            if time.monotonic() - reported > EVERY or done == len(left):
                reported = time.monotonic()
                minutes = (reported - begin) / done * (len(left) - done) / 60
                report(f"hidden states of {done} of {len(left)} files recorded, {minutes:.1f} min left")

    @torch.no_grad()
    def _record(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        device, runner = self.target.device, HookedRunner(self.target)
        tensors: dict[str, Tensor] = {}
        ordered = sorted(rows, key=len)
        for some in (ordered[i : i + BATCH] for i in range(0, len(ordered), BATCH)):
            texts = [torch.tensor(row.tokens, dtype=torch.long, device="cpu") for row in some]
            tokens = pad_sequence(texts, batch_first=True).to(device)
            plan = Plan.causal(tokens, taps=self.taps, first_logit_row=tokens.shape[1] - 1)
            with torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
                hidden = runner.run_with_gradients(plan).hidden
            states = torch.cat([hidden[tap] for tap in self.taps], -1).to(torch.bfloat16).cpu()
            tensors |= {str(row.number): own[: len(row)].contiguous() for row, own in zip(some, states, strict=True)}
        return tensors


def _name(number: int, rows: Sequence[Row], source: str) -> str:
    text = f"{source} {[(row.number, row.tokens) for row in rows]}"
    return f"rows-{number:05}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.safetensors"
