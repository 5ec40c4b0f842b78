"""llama.cpp through llama-cpp-python: plainly and with its prompt lookup; weights written by the gguf package.

Of a model that came as a GGUF file it reads that file, and beside it the same weights in Q4_0 and Q8_0.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from benchmarks.peers.worker import Ask, Ids, Job, Peer, convert_apart, leave

CONTEXT = 2048
DRAFTED = 10


def make(job: Job) -> Peer:
    """See `Job`; in 8 bits its Q8_0."""

    def written(kind: str) -> str:
        file = Path(job.work) / f"{kind}.gguf"
        if not file.is_file():
            convert_apart("benchmarks.peers.engines.gguf_file", job.folder, str(file), kind)
        return str(file)

    def way(kind: str = "", **options: object) -> Ask:
        own = "Q8_0" if job.int8 else {"float32": "F32", "bfloat16": "BF16"}[job.dtype]
        file = job.gguf if job.gguf and not kind else written(kind or own)
        threads = {"n_threads": job.threads, "n_threads_batch": job.threads}
        model = llama_cpp.Llama(file, n_ctx=CONTEXT, verbose=False, **threads, **options)
        return lambda prompts: [answer(model, ids) for ids in prompts]

    def lookup() -> Ask:
        return way(draft_model=LlamaPromptLookupDecoding(num_pred_tokens=DRAFTED), logits_all=True)

    def answer(model: llama_cpp.Llama, ids: Ids) -> Ids:
        model.reset()
        found = []
        for token in islice(model.generate(ids, temp=0.0, repeat_penalty=1.0), job.new):
            found.append(token)
            if token in job.ends:
                break
        return found

    ways = {"plain": way, "prompt-lookup": lookup}
    if job.gguf:
        ways |= {f"plain {kind}": partial(way, kind) for kind in ("Q4_0", "Q8_0")}
    return Peer(llama_cpp.__version__, ways)


if __name__ == "__main__":
    leave(make)
