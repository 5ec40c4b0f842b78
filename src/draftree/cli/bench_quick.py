"""`draftree bench quick`: Hugging Face's ways of decoding and ours, in a few minutes."""

from __future__ import annotations

from draftree.cli.measuring import Measuring
from draftree.cli.options import Assistant, Compiled, DrafterWarm, Inflate, MaxNewTokens, Model, PerSet, Rounds, grouped
from draftree.cli.where import Where


@grouped
def quick(
    *,
    model: Model = None,
    where: Where,
    params: Inflate = None,
    assistant: Assistant = None,
    per_set: PerSet = 4,
    max_new_tokens: MaxNewTokens = 96,
    rounds: Rounds = 2,
    drafter_warm: DrafterWarm = 23,
    compiled: Compiled = True,
    measuring: Measuring,
) -> None:
    """Hugging Face's ways of decoding and ours, interleaved in one process: speed, acceptance, equality, memory."""
    from draftree.bench.inputs import Settings, Subject
    from draftree.bench.quick import run_quick
    from draftree.cli.screen import StageBar, show_report, wide_console
    from draftree.models import load_model

    where.check()
    prompts, console = measuring.begin(), wide_console()
    settings = Settings(per_set, max_new_tokens, rounds, drafter_warm, compiled)
    subject = Subject.load(model, where.placement)
    small = None if assistant is None else load_model(assistant, where.placement)[0]
    with StageBar(console) as bar:
        report = run_quick(subject, prompts, settings, params=params, assistant=small, watcher=bar)
    show_report(console, report, measuring.out)
