"""Answers by JSON schemas, one after another: what a grammar costs a step, and what its forced tokens save.

Every way answers the same prompts under the same schemas, in turns; what it has to make of a schema first is in its
time, as each meets the schema for the first time. Hugging Face's `generate` has the same library's mask as a logits
processor. A second table shows what requests without a grammar lose where others of their batch have one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any
from unittest import mock

import pandas as pd
from transformers import LogitsProcessorList

from benchmarks.harness import PLAIN, Experiment, Setup, Share, bars, table_of
from benchmarks.harness.measure import all_differing, length, of
from benchmarks.harness.setup import Task
from benchmarks.machine.schemas import SCHEMAS, Reference, reference_grammar, reference_words
from draftree.bench.methods import HuggingFace
from draftree.drafting import Drafter, GrammarDrafter, Lookahead, Merge
from draftree.engine import Engine, SamplingParams
from draftree.engine.limits import eos_token_ids
from draftree.engine.request import State
from draftree.grammar import CompiledGrammar, Grammar, GrammarState, source

HF = "HF generate"
BOTH = "lookahead+grammar"
DRAFTERS: dict[str, Any] = {PLAIN: lambda: None, "grammar": GrammarDrafter, "lookahead": Lookahead}
DRAFTERS[BOTH] = lambda: Merge([Lookahead(), GrammarDrafter()])
WITH_OTHERS = (PLAIN, BOTH)
Other = tuple[Task, str, int]  # a prompt, the schema of its answer, and how long that is
ASKED = ("allowed", "forced", "permits")  # of `GrammarState`: all that the engine and drafters ask of a grammar


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Tokens a second of answers by JSON schemas, plainly and with what the grammar forces drafted."""
    names = list(SCHEMAS)[: setup["schemas"]]
    tasks = list(itertools.islice(itertools.cycle(setup.tasks), len(names)))
    setup.watcher.stage("measuring", len(names) * setup["rounds"])
    compiled(setup, "nested"), words_of(setup)  # the tokenizer is read once, whoever does it
    rows: list[dict[str, Any]] = []
    for turn in range(setup["rounds"]):
        engines = {name: Engine(setup.model, drafter=make(), slots=1) for name, make in DRAFTERS.items()}
        ways: list[tuple[str, Any]] = [(HF, by_hugging_face)]
        ways += [(name, partial(by_engine, engine)) for name, engine in engines.items()]
        for number, (name, task) in enumerate(zip(names, tasks, strict=True)):
            first = (turn * len(names) + number) % len(ways)
            for way, ask in [*ways[first:], *ways[:first]]:
                facts = {"way": way, "round": turn, "group": number, "set": name}
                rows.append(facts | ask(setup, name, task))
            setup.watcher.step()
    runs = pd.DataFrame(rows)
    lengths = of(runs, PLAIN)["tokens"].div(setup["rounds"]).astype(int).tolist()
    yield table(runs, with_others(setup, list(zip(tasks, names, lengths, strict=True))))


def table(runs: pd.DataFrame, mixed: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each way."""
    rows = []
    plain, theirs = of(runs, PLAIN), of(runs, HF)
    for way in runs["way"].unique():
        own = of(runs, way)
        share = Share(own["seconds"], own["tokens"])
        rows.append(
            {"way": way, "tokens/s": 1 / share.value}
            | (Share(plain["seconds"], plain["tokens"]) / share).columns("over plain")
            | (Share(theirs["seconds"], theirs["tokens"]) / share).columns("over HF")
            | {"acceptance length": None if way == HF else length(own).value}
            | {"% of the time in the grammar": None if way == HF else 100 * own["grammar"].sum() / own["seconds"].sum()}
        )
    title = "Two requests without a grammar, in a batch with two others"
    kept = ", ".join(f"{row['ratio']:.2f} ({row['way']})" for _, row in mixed.iterrows())
    remark = f"Two requests without a grammar keep this share of their speed where two beside them have one: {kept}."
    return table_of(rows, differing=all_differing(runs, reference=HF), tables={title: mixed}, remarks=[remark])


def compiled(setup: Setup, name: str) -> CompiledGrammar:
    """Return a schema as the engine takes it."""
    grammar, ends = Grammar.json_schema(SCHEMAS[name]), eos_token_ids(setup.model)
    return grammar.compile(setup.tokenizer, setup.target.vocab_size, ends)


def forget(tokenizer: Any) -> None:
    """Let go of a tokenizer's compiled grammars, but not of what was read of the tokenizer itself."""
    source._caches[tokenizer].grammars.clear()


def by_engine(engine: Engine, setup: Setup, name: str, task: Task) -> dict[str, Any]:
    """Return one answer by an engine that lives on, under a schema that it does not know."""
    forget(setup.tokenizer)
    with timed() as spent:
        began = time.perf_counter()
        params = SamplingParams(setup["max_new_tokens"], eos_token_ids(setup.model), grammar=compiled(setup, name))
        request = engine.add(task.ids, params)
        engine.run()
        seconds = time.perf_counter() - began
    if request.error is not None:
        raise request.error
    stats = request.stats
    row = {"seconds": seconds, "grammar": spent[0], "tokens": stats.emitted, "ids": [request.tokens]}
    return row | {"steps": stats.steps, "accepted": stats.accepted}


def by_hugging_face(setup: Setup, name: str, task: Task) -> dict[str, Any]:
    """Return one answer by Hugging Face's `generate` with the library's mask as a processor."""
    began = time.perf_counter()
    eos = eos_token_ids(setup.model)[0]
    processor = Reference(words_of(setup), [reference_grammar(SCHEMAS[name])], len(task.ids), eos)
    method = HuggingFace(HF, setup.model, setup["max_new_tokens"], logits_processor=LogitsProcessorList([processor]))
    (answer,) = method.answers([task.ids])
    seconds = time.perf_counter() - began
    row = {"seconds": seconds, "grammar": 0.0, "tokens": len(answer.ids), "ids": [list(answer.ids)]}
    return row | {"steps": len(answer.ids), "accepted": 0}


_words = cache(reference_words)


def words_of(setup: Setup) -> Any:
    """Return the tokenizer as the library reads it for Hugging Face's processor."""
    return _words(setup.tokenizer, setup.target.vocab_size, eos_token_ids(setup.model)[0])


@contextmanager
def timed() -> Iterator[list[float]]:
    """Yield a list of one number: seconds spent in grammars while the context is open."""
    spent = [0.0]

    def clocked(method: Any) -> Any:
        def called(state: GrammarState, *given: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(state, *given)
            finally:
                spent[0] += time.perf_counter() - began

        return called

    with ExitStack() as stack:
        for name in ASKED:
            stack.enter_context(mock.patch.object(GrammarState, name, clocked(getattr(GrammarState, name))))
        yield spent


# ------------------------------------------------------------------------- beside others


def with_others(setup: Setup, others: Sequence[Other]) -> pd.DataFrame:
    """Return tokens a second of two requests without a grammar, beside others with and without one, in turns."""
    found: dict[tuple[str, bool], list[float]] = {}
    for turn in range(setup["rounds"]):
        for name in WITH_OTHERS:
            for constrained in (bool(turn % 2), not turn % 2):
                found.setdefault((name, constrained), []).append(speed(setup, others, name, constrained=constrained))
    rows = []
    for name in WITH_OTHERS:
        free, held = (pd.Series(found[name, constrained]) for constrained in (False, True))
        rows.append(
            {"way": name, "tokens/s beside others without": free.median()}
            | {"tokens/s beside others with": held.median(), "ratio": (held / free).median()}
        )
    return table_of(rows)


def speed(setup: Setup, others: Sequence[Other], name: str, *, constrained: bool) -> float:
    """Return tokens a second of two requests that go on to their last token, while two slots beside them answer others.

    The others are the same answers with a grammar and without, as long as each other.
    """
    drafter: Drafter | None = DRAFTERS[name]()
    ends, new = eos_token_ids(setup.model), setup["max_new_tokens"]
    with Engine(setup.model, drafter=drafter, slots=4) as engine:
        own = [engine.add(task.ids, SamplingParams(new)) for task, _, _ in others[:2]]
        for task, schema, length in others[: setup["beside"]]:
            grammar = compiled(setup, schema) if constrained else None
            engine.add(task.ids, SamplingParams(length, ends if constrained else (), grammar=grammar))
        began = time.perf_counter()
        while any(request.state is not State.FINISHED for request in own):
            engine.step()
        return sum(len(request.tokens) for request in own) / (time.perf_counter() - began)


EXPERIMENT = Experiment(
    run,
    ("way", "tokens/s", "over plain", "over HF", "acceptance length", "% of the time in the grammar"),
    bars("over plain", label="way"),
    {"per_set": 2, "max_new_tokens": 200, "schemas": 30, "beside": 16, "rounds": 2},
    name="grammar",
)
