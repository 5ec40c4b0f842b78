"""Acceptance length of every drafter with every kind of tree at equal node budgets, from real decoding runs.

Estimates from recorded guesses are biased, as trees stop where text is hard; so every row here comes from answers that
were decoded with that tree, one request at a time, all of them compared with the plain engine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftree.bench.analysis_guesses import hits_of
from draftree.bench.analysis_setup import Sampled, Setup, Subject
from draftree.bench.analysis_trees import SEARCHED, Case, cases_of, checked_kinds, with_tree
from draftree.bench.harness import Sample, measure, ready
from draftree.bench.methods import Answer, Draftree
from draftree.drafting.in_model import InModelDrafter
from draftree.engine import Request
from draftree.shaping import Fixed

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Counted(Answer):
    """An answer with what its passes held, the prompt's pass left out.

    Attributes:
        passes: how many.
        rows: of all of them; rows that join half-way count as half.
        pass_seconds: of all of them, each taken to last as long as the middle one: a pause of the machine is no pass.
    """

    passes: int = 0
    rows: float = 0.0
    pass_seconds: float = 0.0


class WithTree(Draftree):
    """Decoding with one tree of a drafter; no tree for the plain engine."""

    def __init__(self, name: str, model: Any, max_new_tokens: int, make: Callable[[], InModelDrafter | None]) -> None:
        super().__init__(name, name, model, max_new_tokens, make)

    def answer(self, ids: Sequence[int], after_step: Callable[[Request], None] | None = None) -> Counted:
        """See `Method.answer`."""
        rows = 0.0
        spent: list[float] = []
        drafted = emitted = 0
        mark = 0.0

        def count(request: Request) -> None:
            nonlocal rows, drafted, emitted, mark
            stats = request.stats
            if stats.steps > 1:
                nodes = 1 + stats.drafted - drafted
                context = request.context
                # Nothing is left to guess at the end, and a drafter that will rest prepares nothing.
                prepared = self.drafter is not None and self._new - emitted > 1 and not context.resting
                own = self.drafter.rows(nodes, 1, context.spawn) if prepared and self.drafter is not None else nodes
                rows += float(own)
                spent.append(time.perf_counter() - mark)
            drafted, emitted = stats.drafted, stats.emitted
            if after_step is not None:
                after_step(request)
            mark = time.perf_counter()

        answer = super().answer(ids, count)
        middle = float(np.median(spent)) if spent else 0.0
        return Counted(
            answer.ids, answer.seconds, answer.stats, passes=len(spent), rows=rows, pass_seconds=len(spent) * middle
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """One drafter with one tree.

    Attributes:
        subject: the drafter.
        case: the tree.
        length: acceptance length, 1 + accepted / steps.
        rows: of a pass.
        seconds: of a pass.
        differing: prompts whose answer is not the plain engine's.
    """

    subject: Subject
    case: Case
    length: Sampled
    rows: float
    seconds: Sampled
    differing: int


def measure_trees(setup: Setup, kinds: Sequence[str] = ()) -> tuple[list[Measured], float]:
    """Decode all tasks with every tree of every subject, interleaved; also seconds of a plain pass.

    Args:
        setup: subjects are drafters inside the model.
        kinds: of trees; those of the settings by default.

    Raises:
        ValueError: an unknown kind, or no prompts to search choice lists on.
    """
    kinds = checked_kinds(kinds or setup.settings.trees)
    chosen: list[tuple[Subject, InModelDrafter, Case]] = []
    for subject in setup.subjects:
        drafter = subject.trained
        assert isinstance(drafter, InModelDrafter)
        shares = None
        if SEARCHED in kinds:
            if not setup.lessons:
                raise ValueError(
                    "There are no prompts besides the measured ones to search choice lists on: give more prompts, or "
                    f"name the other kinds of trees by --tree, {SEARCHED!r} not among them."
                )
            setup.watcher.stage(f"search for trees of {subject.name}", len(setup.lessons))
            shares = hits_of(setup, drafter, setup.lessons).by_rank
        cases = cases_of(drafter, kinds, setup.settings.budgets, shares)
        if not cases:
            raise ValueError(
                f"No tree of {subject.name!r} fits {max(setup.settings.budgets)} guesses: raise --nodes to "
                f"{drafter.depth} or more."
            )
        chosen += [(subject, drafter, case) for case in cases]
    new = setup.settings.max_new_tokens
    methods = [WithTree(PLAIN, setup.model, new, lambda: None)]
    methods += [
        WithTree(str(i), setup.model, new, lambda d=d, c=c: _with_budget(d, c))  # type: ignore[misc]
        for i, (_, d, c) in enumerate(chosen)
    ]
    ready(methods[:1], setup.tasks)
    setup.watcher.stage("decoding", len(methods) * len(setup.tasks))
    samples = measure(methods, setup.tasks, 1, setup.watcher)
    by_method = {method.name: [s for s in samples if s.method == method.name] for method in methods}
    plain = by_method[PLAIN]
    expected = {sample.task: sample.answer.ids for sample in plain}
    found = [
        Measured(subject, case, *_figures(by_method[str(i)], expected)) for i, (subject, _, case) in enumerate(chosen)
    ]
    return found, _figures(plain, expected)[2].value


def _with_budget(drafter: InModelDrafter, case: Case) -> InModelDrafter:
    made = with_tree(drafter, case)
    made.shape = Fixed(case.nodes)
    return made


def _figures(samples: Sequence[Sample], expected: dict[int, list[int]]) -> tuple[Sampled, float, Sampled, int]:
    """Acceptance length, rows of a pass, seconds of a pass, differing answers."""
    answers = [s.answer for s in sorted(samples, key=lambda s: s.task)]
    counted = [answer for answer in answers if isinstance(answer, Counted)]
    accepted, steps = (np.array([getattr(a.stats, name) for a in counted]) for name in ("accepted", "steps"))
    passes, rows, seconds = (np.array([getattr(a, n) for a in counted]) for n in ("passes", "rows", "pass_seconds"))
    return (
        Sampled.share(accepted, steps, plus=1.0),
        Sampled.share(rows, passes).value,
        Sampled.share(seconds, passes),
        sum(s.answer.ids != expected[s.task] for s in samples),
    )
