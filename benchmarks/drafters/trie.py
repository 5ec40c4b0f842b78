"""What the Lookahead trie costs: time a call, bytes a node, and whether a full trie stalls.

The text is made, not read, so that the figures need no data: phrases drawn by a Zipf law over a vocabulary of usual
size, and answers that copy from their prompt now and then. That leaves wide keys, many singletons and long matches,
which are the three things that cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.harness import Experiment, Setup, bars, table_of
from draftree.drafting.lookahead import Trie

CALLS = {"begin": "insert a prompt", "extend": "store a token", "retrieve": "retrieve a draft", "end": "drop a prompt"}


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Microseconds of every call of the Lookahead trie on made text, and what its nodes weigh."""
    found = measure_trie(**setup.options)
    rows = [{"call": says} | found[f"{call}_us"] for call, says in CALLS.items()]
    remark = (
        f"{found['drafted']:.1f} nodes a draft; {found['nodes']:,} nodes of {found['bytes_per_node']:.1f} bytes; "
        f"{found['bytes_grown']:,} bytes taken on in the second half; twin: {found['backend']}."
    )
    yield table_of(rows, remarks=[remark], more=found)


def made_text(
    prompts: int, prompt_tokens: int, answer_tokens: int, vocabulary: int, seed: int = 0
) -> Iterator[tuple[list[int], list[int]]]:
    """Pairs of prompt and answer, of `prompt_tokens` and `answer_tokens` ids under `vocabulary`."""
    rng = np.random.default_rng(seed)
    by_rank = rng.permutation(vocabulary)
    phrases = [_zipf_tokens(rng, by_rank, int(rng.integers(1, 9))) for _ in range(vocabulary // 4)]
    weights = 1.0 / np.arange(1, len(phrases) + 1)
    weights /= weights.sum()

    def text(length: int, source: list[int]) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < length:
            kind = rng.random()
            if kind < 0.3:
                tokens += _zipf_tokens(rng, by_rank, 3)
            elif source and kind < 0.5:
                start = int(rng.integers(0, len(source)))
                tokens += source[start : start + int(rng.integers(2, 16))]
            else:
                tokens += phrases[int(rng.choice(len(phrases), p=weights))]
        return tokens[:length]

    for _ in range(prompts):
        prompt = text(prompt_tokens, [])
        yield prompt, text(answer_tokens, prompt)


def measure_trie(
    *,
    prompts: int = 200,
    prompt_tokens: int = 400,
    answer_tokens: int = 120,
    vocabulary: int = 32_000,
    decoding_length: int = 64,
    branch_length: int = 12,
    max_nodes: int = 2**20,
    warm_answers: int = 0,
    backend: str = "auto",
) -> dict[str, Any]:
    """Serves made text one request after the other and times every call.

    An answer is committed in runs of 1 to 4 tokens, with one retrieval before each, as decoding does. `warm_answers`
    finished answers are stored first: enough of them fill the forest, so that the rest is measured at capacity.

    Times are in microseconds: `begin_us` a prompt, `extend_us` a token, `retrieve_us` and `end_us` a call, each as
    {"median", "p99", "max"}; with `drafted` (nodes a retrieval gave), `nodes`, `bytes_per_node`, `backend`, and
    `bytes_grown`, what the store took on in the second half of the requests.
    """
    trie = Trie(branch_length=branch_length, decoding_length=decoding_length, max_nodes=max_nodes, backend=backend)
    for _, answer in made_text(warm_answers, 0, answer_tokens, vocabulary, 1):
        trie.warm(answer)
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {name: [] for name in CALLS}

    def timed(call: str, *given: Any, per: int = 1) -> Any:
        start = perf_counter()
        found = getattr(trie, call)(*given)
        times[call].append((perf_counter() - start) / per)
        return found

    drafted = bytes_at_half = 0
    for request, (prompt, answer) in enumerate(made_text(prompts, prompt_tokens, answer_tokens, vocabulary)):
        timed("begin", request, prompt)
        at = 0
        while at < len(answer):
            run = answer[at : at + int(rng.integers(1, 5))]
            drafted += len(timed("retrieve", request, decoding_length).tokens)
            timed("extend", request, run, per=len(run))
            at += len(run)
        timed("end", request)
        if request == prompts // 2:
            bytes_at_half = trie.nbytes
    return {
        **{f"{name}_us": _quantiles(seconds) for name, seconds in times.items()},
        "drafted": drafted / max(1, len(times["retrieve"])),
        "nodes": trie.nodes,
        "bytes_per_node": trie.nbytes / max(1, trie.nodes),
        "bytes_grown": trie.nbytes - bytes_at_half,
        "backend": trie.backend,
    }


def _zipf_tokens(rng: np.random.Generator, by_rank: NDArray[Any], n: int) -> list[int]:
    # The exponent 1 has no normal law on an open range; this is its inverse on 1..vocabulary.
    ranks = np.exp(rng.random(n) * np.log(len(by_rank))).astype(int) - 1
    return by_rank[ranks].tolist()


def _quantiles(seconds: list[float]) -> dict[str, float]:
    micros = np.array(seconds) * 1e6
    return {"median": float(np.median(micros)), "p99": float(np.quantile(micros, 0.99)), "max": float(micros.max())}


EXPERIMENT = Experiment(
    run,
    ("call", "median", "p99", "max"),
    bars("median", "p99", label="call", mark=None),
    {"prompts": 200, "prompt_tokens": 400, "answer_tokens": 120, "vocabulary": 32_000, "decoding_length": 64}
    | {"branch_length": 12, "warm_answers": 0, "backend": "auto"},
    name="trie",
)
