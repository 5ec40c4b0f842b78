"""Record hidden states and predictions of a frozen model at the rows of a data set, once for all passes of a training.

A folder holds one safetensors file for every 64 rows. A file is written whole, so a stopped recording goes on with the
next one; a file's name has a hash of its contents' source, so those of other data or taps are not taken for it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftree.drafting.folder import model_hash
from draftree.files import replacing
from draftree.runner.base import top_tokens
from draftree.runner.hooked.runner import HookedRunner
from draftree.runner.plan import Plan
from draftree.runner.target import Target
from draftree.training.rows import Row

SHARD = 64  # Rows of a file.
BATCH = 8  # Most rows of a pass.
LOGITS = 1 << 28  # Most logits of a pass of several rows.
LIKELY = 16  # Tokens whose probabilities are recorded.
EVERY = 20.0  # Seconds between two lines of progress.


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was recorded of a row of T tokens.

    Attributes:
        states: bfloat16 [T, taps * d], the tapped hidden states side by side.
        ids, shares: int32 and float16 [A, K], the K likeliest tokens behind each of the row's last A tokens, the first
            of which is the last of the prompt, and their probabilities.
    """

    states: Tensor
    ids: Tensor
    shares: Tensor


class Recording:
    """Hold what was recorded of a data set's rows, in a folder.

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
        source = f"{model_hash(target.model)} {self.taps} {bf16} {LIKELY}"
        self._paths = {number: folder / _name(number, held, source) for number, held in self._shards.items()}
        self._files: dict[int, Any] = {}

    def __getitem__(self, number: int) -> Recorded:
        shard = number // SHARD
        if shard not in self._files:
            self._files[shard] = safe_open(str(self._paths[shard]), "pt")
        return Recorded(*(self._files[shard].get_tensor(f"{number} {field.name}") for field in fields(Recorded)))

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
        left = sorted(rows, key=len)
        while left:
            some = [left.pop()]
            while left and len(some) < min(BATCH, LOGITS // (len(some[0]) * self.target.vocab_size)):
                some.append(left.pop())
            texts = [torch.tensor(row.tokens, dtype=torch.long, device="cpu") for row in some]
            tokens = pad_sequence(texts, batch_first=True).to(device)
            first = min(row.start for row in some) - 1
            plan = Plan.causal(tokens, taps=self.taps, first_logit_row=first)
            with torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
                result = runner.run_with_gradients(plan)
            states = torch.cat([result.hidden[tap] for tap in self.taps], -1).to(torch.bfloat16).cpu()
            for row, own, logits in zip(some, states, result.logits, strict=True):
                logits = logits[row.start - 1 - first : len(row) - first]
                best = top_tokens(logits[None], min(LIKELY, logits.shape[-1]))
                ids, logp = (torch.from_numpy(found[0]) for found in best)
                made = own[: len(row)].contiguous(), ids.int(), logp.exp().half()
                tensors |= {f"{row.number} {f.name}": one for f, one in zip(fields(Recorded), made, strict=True)}
        return tensors


def _name(number: int, rows: Sequence[Row], source: str) -> str:
    text = f"{source} {[(row.number, row.tokens) for row in rows]}"
    return f"rows-{number:05}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.safetensors"
