"""What leaving out layers is worth, lossless as drafts (SelfSpeculative) and lossy as early exits (CALM).

SelfSpeculative runs with a skip set and with early exits, as bare chains of fixed length and with its defaults; CALM
with several thresholds. CALM changes texts, so what is left of them is shown: the share of plain decoding's answer
before the first difference. Of an inflated model CALM is left out: the layers that inflation adds change no state, so
every token would leave there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

import pandas as pd

from benchmarks.harness import PLAIN, Experiment, Setup, Way, measure, points, table_of
from benchmarks.harness.measure import length, measure_parts, of, size, whole
from draftree.drafting import Drafter, SelfSpeculative
from draftree.drafting.folder import demo_drafter
from draftree.pruning import LossyCALM
from draftree.runner import inspect_model
from draftree.shaping import Fixed


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Layers left out, as drafts and as early exits; whole answers, plain decoding = 1."""
    target = inspect_model(setup.small)
    for exit_layer in map(int, setup["exits"]):
        SelfSpeculative(exit_layer=exit_layer).skip_of(target)
    ways, rules = _ways(setup)
    measure(setup, [way for way, _ in ways], setup.tasks[:1])  # first calls do not count
    for rule in rules.values():
        rule.layers_run.clear()
    for runs in measure_parts(setup, [way for way, _ in ways], rounds=setup["rounds"]):
        table = _summed_up(runs, {way.name: kind for way, kind in ways}, rules)
        table.attrs["more"]["layers"] = len(setup.target.layers)
        yield table


def _summed_up(runs: pd.DataFrame, kinds: Mapping[str, str], rules: Mapping[str, LossyCALM]) -> pd.DataFrame:
    """A row for each way, of these kinds."""
    plain = of(runs, PLAIN)
    truth = {(row.round, row.group): row.ids[0] for row in runs[runs["way"] == PLAIN].itertuples()}
    rows: list[dict[str, Any]] = []
    for name, kind in kinds.items():
        own = of(runs, name)
        kept = [kept_of(row.ids[0], truth[row.round, row.group]) for row in runs[runs["way"] == name].itertuples()]
        rows.append(
            {"way": name, "kind": kind}
            | (whole(plain) / whole(own)).columns("over_plain")
            | {"tokens_a_step": length(own).value, "draft_tokens_a_step": size(own)}
            | {"layers_a_token": rules[name].mean_layers if name in rules else None}
            | {"left_of_the_text": sum(a for a, _ in kept) / max(sum(b for _, b in kept), 1)}
        )
    wrong = [row["way"] for row in rows if row["kind"] != "CALM" and row["left_of_the_text"] < 1]
    remark = f"Lossless ways whose answers differ from plain decoding's: {', '.join(wrong) or 'none'}."
    return table_of(rows, remarks=[remark], more={"differing_ways": wrong})


def _ways(setup: Setup) -> tuple[list[tuple[Way, str]], dict[str, LossyCALM]]:
    def made(options: dict[str, Any]) -> Drafter:
        return setup.inflated.fitted(SelfSpeculative.fresh(setup.small, **options))

    sources: dict[str, Any] = {}
    if setup["skip_set"]:
        sources["skip set"] = SelfSpeculative.from_pretrained(setup["skip_set"], setup.small).settings
    elif setup.name is None:
        sources["skip set"] = demo_drafter("self-speculative", setup.small).settings
    sources |= {f"exit {n}": SelfSpeculative(exit_layer=n).settings for n in map(int, setup["exits"])}
    ways = [(Way(PLAIN), PLAIN)]
    for source, own in sources.items():
        options = {name: own[name] for name in ("exit_layer", "skip_attention", "skip_mlp")}
        for chain in setup["chains"]:
            bare = {"num_draft_tokens": chain, "branching": 1, "confidence": 0.0}
            ways.append((Way(f"{source}, chain of {chain}", made(options | bare), Fixed(chain)), "chain"))
        ways.append((Way(source, made(options)), "default"))
    rules = {f"CALM {t:g} (lossy)": LossyCALM(t) for t in setup["thresholds"]} if setup.params is None else {}
    return ways + [(Way(name, options={"early_exit": rule}), "CALM") for name, rule in rules.items()], rules


def kept_of(ids: Any, expected: Any) -> tuple[int, int]:
    """How many tokens of `expected` come before the first difference, and how many it has."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(ids, expected, strict=False))
    return sum(1 for _ in same), len(expected)


EXPERIMENT = Experiment(
    run,
    ("way", "over_plain", "tokens_a_step", "draft_tokens_a_step", "layers_a_token", "left_of_the_text"),
    points("over_plain", label="way"),
    {"per_set": 2, "max_new_tokens": 96, "sets": (), "rounds": 2, "skip_set": "", "chains": (1, 2, 4)}
    | {"exits": (), "thresholds": (0.9, 0.95, 0.98, 1.0)},
    name="layers",
    source="Draft and Verify; CALM",
)
