"""`draftree bench quick`: the first question about a machine, answered in a few minutes.

How fast are Hugging Face's ways of decoding and ours, on the same model, prompts, dtype and threads, and are all
outputs equal? It is one case of `bench compare`, with the peak memory of drafting beside it. Lookahead is measured with
an empty trie, with one that has answered other prompts of the same sets, and with all its guesses refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from draftree.bench.compare_case import Result, Settings, encode_all, run_case, teach
from draftree.bench.compare_methods import COLD, COMPILED, HOOKED, PLAIN, REFERENCE, REFUSED, SELF, SMALL, WARM, Kit
from draftree.bench.memory import compare_memory
from draftree.progress import Watcher
from draftree.prompts import Prompt

METHODS = (
    REFERENCE, COMPILED, "hf_prompt_lookup", HOOKED, PLAIN, "prompt_lookup", "jacobi", SMALL, SELF, COLD, WARM, REFUSED,
)  # fmt: skip


def run_quick(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    name: str | None = None,
    watcher: Watcher | None = None,
) -> Result:
    """Measure everything.

    Args:
        model, tokenizer: a decoder-only model and its tokenizer.
        prompts: to measure on and to warm with.
        settings: how much.
        name: the model's folder or hub name, None for the embedded one.
        watcher: hears of progress.

    Raises:
        ValueError: a model or prompt that cannot be measured, before any work.
    """
    watcher = watcher or Watcher()
    texts = encode_all(model, tokenizer, prompts, settings)
    warm = teach(model, tokenizer, texts, settings, watcher)
    kit = Kit(model, settings.max_new_tokens, warm=warm, compiled=settings.compiled)
    result = run_case(kit, tokenizer, texts, settings, METHODS, name=name, watcher=watcher)
    watcher.stage("memory", None)
    threads = result.about["threads"]
    memory = compare_memory([task.ids for task in texts.tasks], settings.max_new_tokens, threads, name)
    return replace(result, memory=memory)
