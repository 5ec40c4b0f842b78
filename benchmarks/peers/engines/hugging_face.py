"""Hugging Face's `generate`: plainly, with prompt lookup, and assisted by a small model."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmarks.peers.worker import Ask, Job, Peer, asking, leave
from draftree.bench.methods import HuggingFace
from draftree.checkpoints import Placement
from draftree.models import load_model


def loaded(job: Job) -> Any:
    """Return the model; in 8 bits the weights are torchao's."""
    torch.set_num_threads(job.threads)
    return load_model(job.folder, Placement(dtype=job.dtype, quantize="int8" if job.int8 else None))[0]


def make(job: Job) -> Peer:
    """See `Job`."""
    model = loaded(job)

    def way(**options: Any) -> Ask:
        return asking(HuggingFace("", model, job.new, **options))

    def assisted() -> Ask:
        return way(assistant_model=load_model(job.draft, Placement(dtype=job.dtype))[0])

    ways = {"plain": way, "prompt-lookup": lambda: way(prompt_lookup_num_tokens=10)}
    if job.draft:
        ways["draft-model"] = assisted
    return Peer(transformers.__version__, ways, batches=True)


if __name__ == "__main__":
    leave(make)
