"""vLLM's CPU build: plainly, with n-gram lookup, with suffix decoding, and with draftree's trie inside it."""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.peers.worker import COLD, Ask, Ids, Job, Peer, leave

# Read when vllm is imported: one process, and no more memory for keys and values than the prompts need.
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
CONTEXT = 1024
SOURCE = Path(__file__).parents[3] / "src"  # draftree, which is not installed with vLLM
DRAFTED, MATCHED = 5, 3  # tokens of a draft, and the longest n-gram that it follows


def make(job: Job) -> Peer:
    """See `Job`; raise a ValueError for 8 bits, which its CPU build reads from checkpoints that it knows alone."""
    if job.int8:
        raise ValueError("its CPU build quantises nothing by itself")
    os.environ.update(SETTINGS, OMP_NUM_THREADS=str(job.threads))
    import vllm

    ngram = {"method": "ngram", "num_speculative_tokens": DRAFTED, "prompt_lookup_max": MATCHED}
    drafting: dict[str, dict[str, Any] | None] = {"plain": None}
    left_out = {}
    sys.path.append(str(SOURCE))
    try:
        from draftree.integrations.vllm import speculative_config

        drafting[COLD] = speculative_config(DRAFTED)  # Lookahead, Table 8
    except (ImportError, ValueError) as why:
        left_out[COLD] = str(why)
    # Behind it, as n-grams load llvmlite, over whose objects vLLM stumbles where it looks through modules.
    drafting["prompt-lookup"] = ngram
    if find_spec("arctic_inference") is None:
        left_out["suffix decoding"] = "needs arctic-inference, which pip could not install"
    else:
        drafting["suffix"] = {"method": "suffix", "num_speculative_tokens": DRAFTED}

    ends = list(job.ends)
    params = vllm.SamplingParams(temperature=0.0, max_tokens=job.new, stop_token_ids=ends, detokenize=False)

    def way(speculative: dict[str, Any] | None) -> Ask:
        options = {"max_model_len": CONTEXT, "skip_tokenizer_init": True, "speculative_config": speculative}
        engine = vllm.LLM(job.folder, dtype=job.dtype, disable_log_stats=True, seed=0, **options)

        def ask(prompts: list[Ids]) -> list[Ids]:
            given = [{"prompt_token_ids": ids} for ids in prompts]
            results = engine.generate(given, params, use_tqdm=False)
            return [list(result.outputs[0].token_ids) for result in results]

        return ask

    ways = {name: partial(way, speculative) for name, speculative in drafting.items()}
    return Peer(vllm.__version__, ways, left_out, batches=True)


if __name__ == "__main__":
    leave(make)
