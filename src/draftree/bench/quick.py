"""`draftree bench quick`: the first question about a machine, answered in a few minutes.

How fast are Hugging Face's ways of decoding and ours, on the same model, prompts, dtype and threads, and are all
outputs equal? It is one case of `bench compare`, and the peak memory of drafting. Lookahead is measured with an empty
trie, with one that has answered other prompts of the same sets, and with all its draft tokens refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from draftree.bench.case import run_case
from draftree.bench.case_report import case_report
from draftree.bench.inputs import Settings, Subject, encode_all
from draftree.bench.kit import make_kit
from draftree.bench.memory import compare_memory, remark
from draftree.bench.names import COLD, COMPILED, HOOKED, PLAIN, PROMPT_LOOKUP, REFERENCE, REFUSED, SMALL, WARM
from draftree.bench.report import Report
from draftree.progress import Watcher
from draftree.prompts import Prompt

METHODS = (
    REFERENCE, COMPILED, PROMPT_LOOKUP, HOOKED, PLAIN, "prompt-lookup", SMALL, COLD, WARM,
    REFUSED,
)  # fmt: skip


def run_quick(
    subject: Subject,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    params: str | None = None,
    assistant: Any = None,
    watcher: Watcher | None = None,
) -> Report:
    """Measure everything, on the model inflated to about `params` parameters where those are given.

    `assistant` is a small Hugging Face model that drafts; None for the embedded model's own.

    Raises:
        ValueError: a model or prompt that cannot be measured, before any work.
    """
    watcher = watcher or Watcher()
    texts = encode_all(subject, prompts, settings)
    kit = make_kit(subject.inflated(params), texts.lessons, settings, watcher, assistant)
    result = run_case(kit, texts, METHODS, watcher)
    watcher.stage("memory", None)
    ids, new, threads = [task.ids for task in texts.tasks], settings.max_new_tokens, result.about["threads"]
    memory = compare_memory(ids, new, threads, subject.name, params=params, placement=subject.placement)
    report = case_report("quick", result)
    return replace(report, remarks=[*report.remarks, remark(memory)], more=report.more | {"memory": memory})
