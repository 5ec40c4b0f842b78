"""How near replay comes to real runs: the same candidates on the same prompts, once from the record and once live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftree.progress import Watcher
from draftree.prompts import Prompt
from draftree.tuning.file import Spec
from draftree.tuning.live import Judged, run_live
from draftree.tuning.prepare import TuningOptions, prepare
from draftree.tuning.record import Record
from draftree.tuning.search import fill
from draftree.tuning.space import PLAIN, Candidate, Space, trained_of

SIZES: tuple[int | None, ...] = (4, 16, None)


def check_replay(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], options: TuningOptions, watcher: Watcher
) -> list[Judged]:
    """Run cold and warm tries, prompt lookup, trained drafters and merges of both, as replayed and for real.

    A half each of the prompts teach tries and are answered; the time of `options` is not used.

    Raises:
        ValueError: prompts or drafters that cannot be used, before any work.
    """
    prepared = prepare(model, tokenizer, prompts, options)
    record = Record(model, options.max_new_tokens, trained_of(options.specs, model, tokenizer))
    judge = fill(record, prepared, watcher)
    space = Space(record, options.specs, tokenizer)
    cold, warm = Spec("lookahead"), Spec("lookahead", warm=True)
    small = Spec("lookahead", {"branch_length": 6, "max_query_length": 2, "capacity": 2, "prompt_weight": 1.0})
    specs = [cold, warm, small, Spec("prompt-lookup"), *options.specs]
    specs += [Spec("merge", parts=(cold, spec)) for spec in options.specs]
    candidates = [Candidate(spec, size) for spec in specs if space.can_replay(spec) for size in SIZES]
    judged = run_live(space, candidates, [*record.texts, *judge], watcher)
    return [one for one in judged if one.candidate != PLAIN]
