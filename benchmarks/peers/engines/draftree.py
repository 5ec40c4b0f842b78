"""draftree, one call an answer; as its command line loads a model, with drafters that live on from call to call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import draftree
from benchmarks.peers.engines.hugging_face import loaded
from benchmarks.peers.worker import COLD, Ask, Job, Peer, asking, leave
from draftree.bench.methods import Draftree
from draftree.checkpoints import Placement
from draftree.drafting import Drafter
from draftree.drafting.folder import load_drafter
from draftree.models import load_model
from draftree.runner import pack_own


def make(job: Job) -> Peer:
    """See `Job`."""
    if job.gguf:
        torch.set_num_threads(job.threads)
    model = load_model(job.gguf)[0] if job.gguf else loaded(job)
    pack_own(model, "auto")

    def warm() -> draftree.Lookahead:
        drafter = draftree.Lookahead()
        drafter.warm(job.texts)
        return drafter

    def trained(name: str) -> Drafter:
        return load_drafter(job.drafters[name], model)

    def small() -> draftree.DraftModel:
        return draftree.DraftModel(load_model(job.draft, Placement(dtype=job.dtype))[0])

    def way(*makers: Callable[[], Drafter]) -> Callable[[], Ask]:
        def ready() -> Ask:
            parts = [make() for make in makers]
            drafter = draftree.Merge(parts) if len(parts) > 1 else parts[0] if parts else None
            return asking(Draftree("", model, job.new, lambda: drafter))

        return ready

    ways = {"plain": way(), COLD: way(draftree.Lookahead), "lookahead": way(warm)}
    if job.draft:
        ways["draft-model"] = way(small)
        ways["lookahead+draft-model"] = way(warm, small)
    for name in job.drafters:
        ways[name] = way(partial(trained, name))
        ways[f"lookahead+{name}"] = way(warm, partial(trained, name))
    return Peer(draftree.__version__, ways, batches=True)


if __name__ == "__main__":
    leave(make)
