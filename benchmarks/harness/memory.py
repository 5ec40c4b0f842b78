"""Peak memory of plain and of drafted decoding, each in a process of its own.

Memory that a process once held hides later peaks, so each way needs a process. Both load the same model and answer the
same prompts. `python -m benchmarks.harness.memory` is such a process: it reads a job on standard input and prints its
peak.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.inputs import Subject
from benchmarks.peers.worker import peak_bytes
from draftree.bench.methods import Draftree
from draftree.checkpoints import Placement
from draftree.drafting import Lookahead
from draftree.engine import Engine
from draftree.runner.target import device_of
from draftree.shaping import Fixed

ROOT = Path(__file__).parents[2]
PROMPTS = 8  # enough for the caches to have grown
TIMEOUT = 300  # seconds


def compare_memory(
    prompts: Sequence[Sequence[int]],
    new: int,
    model: str | None,
    decoding_length: int,
    params: str | None = None,
    placement: Placement | None = None,
) -> tuple[int, int]:
    """Return the peak bytes of plain and of drafted decoding, the model included.

    Args:
        prompts: token ids.
        new: most tokens of an answer.
        model: folder or hub name; None for the embedded one.
        decoding_length: draft tokens of Lookahead.
        params: inflate the model to about so many parameters.
        placement: device and type of the model.

    Raises:
        ValueError: a process failed; the message has its last line.
    """
    job: dict[str, Any] = {"prompts": [list(ids) for ids in prompts[:PROMPTS]], "new": new, "model": model}
    job |= {"threads": torch.get_num_threads(), "params": params, "placement": asdict(placement or Placement())}
    return _peak(job | {"length": None}), _peak(job | {"length": decoding_length})


def _peak(job: dict[str, Any]) -> int:
    command = [sys.executable, "-m", "benchmarks.harness.memory"]
    done = subprocess.run(
        command, input=json.dumps(job), capture_output=True, text=True, timeout=TIMEOUT, cwd=ROOT, check=False
    )
    if done.returncode:
        raise ValueError(f"Memory could not be measured: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return int(done.stdout.strip().splitlines()[-1])


def _run(job: dict[str, Any]) -> int:
    """Answer the prompts of a job, plainly without a length; return the peak of this process meanwhile."""
    torch.set_num_threads(job["threads"])
    model = Subject.load(job["model"], Placement(**job["placement"])).inflated(job["params"]).model
    length = job["length"]
    drafted: Any = () if length is None else ((lambda: Lookahead(length)), (lambda: Fixed(length)))
    method = Draftree("", model, job["new"], *drafted)
    Engine(model)  # It may hold the weights in another form from then on.
    device = device_of(model)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # This resets the kernel's peak mark.
    for ids in job["prompts"]:
        method.answer(ids)
    return torch.cuda.max_memory_allocated(device) if on_gpu else peak_bytes()


if __name__ == "__main__":
    print(_run(json.load(sys.stdin)))
