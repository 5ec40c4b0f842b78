"""What tuning searches: drafters with their options, trees of fixed sizes and trees sized by cost.

A trie's options are searched one after the other, as they hardly depend on each other. Then all tree sizes are tried
for each drafter, and the best trie is merged with each drafter of another kind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftree.bench.methods import teach
from draftree.drafting import Drafter, Lookahead, Merge
from draftree.drafting.in_model import InModelDrafter
from draftree.engine.limits import eos_token_ids
from draftree.runner import inspect_model
from draftree.tuning.file import Spec, make, shape_of
from draftree.tuning.record import Record, Text
from draftree.tuning.replay import Clock, RecordedHeads, Replayed, replay

# Draft tokens of a step; None: sized by cost.
SIZES: tuple[int | None, ...] = (None, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
PROBE = 8  # draft tokens of a step while a trie's options are searched
TRIE_OPTIONS: dict[str, tuple[Any, ...]] = {
    "branch_length": (12, 4, 8, 20, 32),
    "max_query_length": (4, 2, 3, 6, 8),
    "prompt_weight": (4.0, 1.0, 2.0, 8.0),
    "decoding_length": (64, 16, 32, 128),
    "capacity": (16, 1, 4, 64),
}
LOOKUPS: tuple[dict[str, int], ...] = (
    {},
    {"max_ngram_size": 3},
    {"max_ngram_size": 4},
    {"num_draft_tokens": 20, "max_ngram_size": 3},
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way of decoding."""

    spec: Spec | None  # the drafter; None for plain decoding
    node_budget: int | None = None  # draft tokens of every step; None for trees sized by cost

    @property
    def label(self) -> str:
        """What tables call it."""
        size = "sized by cost" if self.node_budget is None else f"{self.node_budget} draft tokens"
        return "plain" if self.spec is None else f"{self.spec.label}; {size}"

    @property
    def name(self) -> str:
        """Names it among all candidates, its drafter's options included."""
        return f"{self.spec} {self.node_budget}"


PLAIN = Candidate(None)


@dataclass(frozen=True, slots=True)
class Predicted:
    """A candidate and what its replay predicts; None where its draft tokens cannot be replayed."""

    candidate: Candidate
    replayed: Replayed | None

    @property
    def speed(self) -> float:
        """Tokens a second, as predicted."""
        return 0.0 if self.replayed is None else self.replayed.speed


class Space:
    """Makes drafters, those of `specs` besides tries and prompt lookup, and predicts what they bring."""

    def __init__(self, record: Record, specs: Sequence[Spec], tokenizer: Any) -> None:
        self.model, self.new = record.model, record.new
        self.specs = list(specs)
        self._record, self._tokenizer = record, tokenizer
        self._ends = eos_token_ids(record.model)
        self.timing = record.timing()

    def trie(self, spec: Spec, texts: Sequence[Text] = ()) -> Lookahead:
        """A Lookahead; where the spec is warm it has seen the lessons, and `texts` behind them."""
        drafter = Lookahead(**spec.options, eos_token_ids=self._ends)
        for text in [*self._record.lessons, *texts] if spec.warm else ():
            teach(drafter, text.task.ids, text.answer)
        return drafter

    def drafter(self, candidate: Candidate) -> Drafter | None:
        """A fresh drafter, for a run."""
        return None if candidate.spec is None else make(candidate.spec, self.model, self._tokenizer, self.trie)

    def can_replay(self, spec: Spec) -> bool:
        """Whether a drafter's draft tokens follow from what was recorded."""
        if spec.kind == "merge":
            return all(self.can_replay(part) for part in spec.parts)
        return spec.kind in ("lookahead", "prompt-lookup") or (spec.name or "") in self._record.trained

    def predict(self, candidate: Candidate, texts: Sequence[Text], clock: Clock = time.thread_time) -> Replayed | None:
        """Replay `texts`, see `replay`; None where the candidate cannot be replayed."""
        spec = candidate.spec
        if spec is not None and not self.can_replay(spec):
            return None
        drafter = None if spec is None else self._replayed(spec)
        shape = None if spec is None else shape_of(candidate.node_budget)
        return replay(texts, drafter, shape, self.timing, self._record.new, self._ends, clock=clock)

    def _replayed(self, spec: Spec) -> Drafter:
        if spec.kind == "merge":
            return Merge([self._replayed(part) for part in spec.parts])
        if spec.name in self._record.trained:
            return RecordedHeads(str(spec.name), self._record.trained[str(spec.name)])
        return make(spec, self.model, self._tokenizer, self.trie)

    # ---------------------------------------------------------------- the search

    def search(self, over: Callable[[], bool], step: Callable[[], None]) -> list[Predicted]:
        """Predictions, fastest first, of every drafter with at least one size of trees.

        `over` returns whether time is up, `step` is called behind every replay.
        """
        found: dict[str, Predicted] = {}

        def look(candidate: Candidate) -> float:
            if candidate.name not in found:
                found[candidate.name] = Predicted(candidate, self.predict(candidate, self._record.texts))
                step()
            return found[candidate.name].speed

        warmths = (True, False) if self._record.lessons else (False,)
        tries = [self._best_trie(Spec("lookahead", warm=warm), over, step) for warm in warmths]
        alone = [*tries, *(Spec("prompt-lookup", dict(options)) for options in LOOKUPS), *self.specs]
        best = tries[0]
        merged = [Spec("merge", parts=(best, spec)) for spec in self.specs]
        for spec in [*alone, *merged]:
            replayed = self.can_replay(spec)
            for place, node_budget in enumerate(SIZES if replayed else (None, PROBE // 2)):
                if place and replayed and over():
                    break
                look(Candidate(spec, node_budget))
        return sorted(found.values(), key=lambda p: -p.speed)

    def _best_trie(self, spec: Spec, over: Callable[[], bool], step: Callable[[], None]) -> Spec:
        """Options of a trie by accepted draft tokens, one option after the other; a tie keeps the default."""
        best = self._accepted(spec)
        for option, values in TRIE_OPTIONS.items():
            for value in values[1:]:
                if over():
                    return spec
                tried = replace(spec, options=spec.options | {option: value})
                accepted = self._accepted(tried)
                step()
                if accepted > best:
                    spec, best = tried, accepted
        return spec

    def _accepted(self, spec: Spec) -> float:
        replayed = self.predict(Candidate(spec, PROBE), self._record.texts, clock=lambda: 0.0)
        assert replayed is not None
        return replayed.stats.acceptance_length


def trained_of(specs: Sequence[Spec], model: Any, tokenizer: Any) -> dict[str, InModelDrafter]:
    """The drafters inside the model among `specs`, by name; every one of `specs` is tried on the model.

    Raises:
        ValueError: a drafter or small model that is not there or does not fit the model.
    """
    found = {}
    target = inspect_model(model)
    for spec in specs:
        drafter = make(spec, model, tokenizer, lambda own: Lookahead(**own.options))
        drafter.bind(target, eos_token_ids=eos_token_ids(model))
        if spec.kind == "trained" and isinstance(drafter, InModelDrafter):
            found[str(spec.name)] = drafter
    return found
