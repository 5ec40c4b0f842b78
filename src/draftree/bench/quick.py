"""`draftree bench quick`: the first question about a machine, answered in a few minutes.

How fast are Hugging Face's ways of decoding and ours, on the same model, prompts, dtype and threads, and are all
outputs equal? It is one case of `bench compare`, and the peak memory of drafting. Lookahead is measured with an empty
trie, with one that has answered other prompts of the same sets, and with all its draft tokens refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from draftree.bench.case import Result, Settings, encode_all, make_kit, run_case
from draftree.bench.inflate import inflate
from draftree.bench.kit import COLD, COMPILED, HOOKED, PLAIN, PROMPT_LOOKUP, REFERENCE, REFUSED, SELF, SMALL, WARM
from draftree.bench.memory import compare_memory
from draftree.progress import Watcher
from draftree.prompts import Prompt

METHODS = (
    REFERENCE, COMPILED, PROMPT_LOOKUP, HOOKED, PLAIN, "prompt_lookup", "jacobi", SMALL, SELF, COLD, WARM, REFUSED,
)  # fmt: skip


def run_quick(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    name: str | None = None,
    params: str | None = None,
    watcher: Watcher | None = None,
) -> Result:
    """Measure everything.

    Args:
        model, tokenizer: a decoder-only model and its tokenizer.
        prompts: to measure on and to warm with.
        settings: how much.
        name: the model's folder or hub name, None for the embedded one.
        params: inflate the model to about so many parameters; None for the model itself.
        watcher: shows progress.

    Raises:
        ValueError: a model or prompt that cannot be measured, before any work.
    """
    watcher = watcher or Watcher()
    texts = encode_all(model, tokenizer, prompts, settings)
    large = None if params is None else inflate(model, params)
    kit = make_kit(model, tokenizer, texts, settings, watcher, large=large, size=params or "")
    result = run_case(kit, tokenizer, texts, settings, METHODS, name=name, watcher=watcher)
    watcher.stage("memory", None)
    ids, threads = [task.ids for task in texts.tasks], result.about["threads"]
    return replace(result, memory=compare_memory(ids, settings.max_new_tokens, threads, name, params=params))
