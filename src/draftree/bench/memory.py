"""Peak memory of plain and of drafted decoding, each in a process of its own.

Memory that a process once held hides what came later, so the two ways need two processes; both load the same model and
answer the same prompts. `python -m draftree.bench.memory` is such a process: it reads a job on standard input and
prints its peak.
"""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from draftree.bench.inputs import Subject
from draftree.bench.methods import Draftree
from draftree.drafting import Lookahead
from draftree.engine import Engine
from draftree.placement import Placement
from draftree.runner.target import device_of
from draftree.shaping import Fixed

DECODING_LENGTH = 64
PROMPTS = 8  # enough for the caches to have grown; each way answers them in a second or two
TIMEOUT = 300  # seconds


def reset_peak(device: torch.device) -> None:
    """Let `peak_bytes` count from now on, where the system allows that."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's mark of the most that was resident


def peak_bytes(device: torch.device) -> int:
    """Most memory this process has had since `reset_peak`: of a GPU what tensors took, else what was resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        # The kernel's own mark of this address space. getrusage, the portable way, also counts what the parent
        # held before exec.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def compare_memory(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    threads: int,
    model: str | None,
    decoding_length: int = DECODING_LENGTH,
    params: str | None = None,
    placement: Placement | None = None,
) -> dict[str, Any]:
    """Peak memory of plain and drafted decoding of `prompts` (token ids), Lookahead at `decoding_length`.

    It is that of whole processes while they decode, the model included; what loading took at most is not. The model is
    loaded for `placement`, and inflated to `params` where that is given. Returns `plain_bytes`, `drafted_bytes` and
    `overhead` (drafted / plain - 1); or `why`, where it could not be measured.
    """
    chosen = [list(ids) for ids in prompts[:PROMPTS]]
    job = {"prompts": chosen, "max_new_tokens": max_new_tokens, "threads": threads, "model": model, "params": params}
    job["placement"] = asdict(placement or Placement())
    try:
        plain = _peak(job | {"decoding_length": None})
        drafted = _peak(job | {"decoding_length": decoding_length})
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        return {"why": lines[-1] if lines else f"exit status {error.returncode}"}
    except (subprocess.TimeoutExpired, OSError) as error:
        return {"why": str(error)}
    found = {"plain_bytes": plain, "drafted_bytes": drafted, "overhead": drafted / plain - 1}
    return {"decoding_length": decoding_length, "prompts": len(chosen)} | found


def remark(memory: dict[str, Any]) -> str:
    """What `compare_memory` has found, in a line."""
    if "why" in memory:
        return f"Peak memory: not measured: {memory['why']}"
    drafted, plain = (f"{memory[way] / 2**20:.1f} MiB" for way in ("drafted_bytes", "plain_bytes"))
    length, overhead = memory["decoding_length"], f"{100 * memory['overhead']:+.1f} %"
    return f"Peak memory at decoding length {length}: drafted {drafted}, plain {plain}: {overhead}."


def _peak(job: dict[str, Any]) -> int:
    """The peak of a process that runs `job`."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": TIMEOUT, "check": True}
    done = subprocess.run([sys.executable, "-m", "draftree.bench.memory"], input=json.dumps(job), **options)
    return int(done.stdout.strip().splitlines()[-1])


def _run(job: dict[str, Any]) -> int:
    """Answer the prompts of a job, plainly where its decoding length is None; the peak of this process meanwhile."""
    torch.set_num_threads(job["threads"])
    model = Subject.load(job["model"], Placement(**job["placement"])).inflated(job["params"]).model
    length = job["decoding_length"]
    drafted: Any = () if length is None else ((lambda: Lookahead(length)), (lambda: Fixed(length)))
    method = Draftree("", model, job["max_new_tokens"], *drafted)
    Engine(model)  # which may hold the weights in another form from then on
    device = device_of(model)
    reset_peak(device)
    for ids in job["prompts"]:
        method.answer(ids)
    return peak_bytes(device)


if __name__ == "__main__":
    print(_run(json.load(sys.stdin)))
