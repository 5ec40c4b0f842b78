"""Quality against latency of a large and a small model that write one text (BiLD, section 4). LOSSY by choice.

After figures 4, 5, 8 and 9 and table 1: a grid of both thresholds, with a small model as it was trained and with an
aligned one; both models alone, the paper's baselines and ablations, Hugging Face's generate and assisted generation.
Quality is taken on all rows, latency on some of them, in turns. Speed is the plain large model's total time over the
way's own, not tokens a second: lossy texts have other lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.drafters import bild_pair
from benchmarks.drafters.bild_claims import ALIGNED, UNALIGNED, best_points, claimed, claimed_of_operations
from benchmarks.drafters.bild_ways import (
    BILD,
    PLAIN,
    SAMPLED,
    SMALL,
    THEIRS,
    BildWay,
    Pair,
    check_windows,
    read_thresholds,
    ways_of,
)
from benchmarks.drafters.kept_texts import texts_of
from benchmarks.drafters.operations import Operations, operations_of, total
from benchmarks.harness import Experiment, Setup, Share, Task, Way, table_of
from benchmarks.harness.comparisons import CLAIMED
from benchmarks.harness.measure import measure, of
from benchmarks.harness.plots import plain_axis
from benchmarks.harness.quality import METRICS, check_metric, points, row_statistics
from draftree.bench.measure import ready
from draftree.checkpoints import known_folder
from draftree.drafting import DraftModel
from draftree.drafting.folder import demo_drafter, model_hash
from draftree.drafting.second_model import check_pair
from draftree.prompts import Prompt, take_per_set
from draftree.runner import inspect_model
from draftree.trace.file import pieces
from draftree.training.answers import fingerprint
from draftree.training.options import Question, read_questions, template_of

COUNTED = 8  # prompts whose operations are counted


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """BLEU or ROUGE-L against latency: BiLD's grid of thresholds, its baselines and ablations (LOSSY by choice)."""
    check_options(setup)
    setup = bild_pair.built(setup) if setup["pair_data"] else setup
    rows, metric = open_rows(setup)
    for table in compared(setup, open_pair(setup), rows, metric):
        table.attrs["about"] = table.attrs["about"] | bild_pair.about(setup)
        yield table


def check_options(setup: Setup) -> None:
    """Raise a ValueError for thresholds, windows or a metric that are none, before anything is built or trained."""
    read_thresholds(setup["thresholds"])
    check_windows(setup["windows"])
    if setup["metric"]:
        check_metric(setup["metric"])


def open_pair(setup: Setup) -> Pair:
    """Return the models that the setup and its options `small` and `aligned` name; the embedded pair by default.

    Where no small model is named beside a large one, or one that does not fit, that is a ValueError.
    """
    named = {name: setup[name_of] for name, name_of in ((UNALIGNED, "small"), (ALIGNED, "aligned"))}
    if setup.name is not None and not any(named.values()):
        raise ValueError("A large model is named and no small one: name one by --set small=, --set aligned= or both.")
    large, smalls = setup.model, {}
    for name, folder in named.items():
        if folder:
            held = DraftModel.from_pretrained(known_folder(folder), setup.tokenizer, dtype=large.dtype).model
            check_pair(inspect_model(held), inspect_model(large))
            smalls[name] = held
    return Pair(large, smalls or {ALIGNED: demo_drafter("draft-model", setup.small).model})


def open_rows(setup: Setup) -> tuple[list[Question], str]:
    """Return the rows to answer and the metric: rows of the file `data`, or measured prompts of every set in turn.

    Raises:
        ValueError: nothing there, rows without what was named, references where the prompts are the package's, or a
            metric that they do not suit.
    """
    rows = _rows(setup)
    metric = setup["metric"] or ("bleu" if setup["reference"] else "rouge-l")
    check_references(rows, metric)
    return rows, metric


def _rows(setup: Setup) -> list[Question]:
    field, reference = setup["field"] or None, setup["reference"] or None
    if setup["data"]:
        return read_questions([Path(setup["data"])], setup["limit"], field=field, reference=reference)
    if reference is not None or field is not None:
        raise ValueError("The prompts of the package have no such fields: name your own rows by --set data=.")
    prompts = [p for p in setup.prompts if not p.warm]
    spread = take_per_set(prompts, len(prompts))[: setup["limit"]]
    return [Question(i, p.id, p.set, (p.text,)) for i, p in enumerate(spread)]


def check_references(rows: list[Question], metric: str) -> None:
    """Raise a ValueError for BLEU without references, and for a metric whose package is missing."""
    check_metric(metric)
    if metric == "bleu" and any(row.reference is None for row in rows):
        raise ValueError(
            "BLEU needs references: name their field by --set reference=, or take metric=rouge-l, which without "
            "references is measured against the plain large model's own texts."
        )


def compared(setup: Setup, pair: Pair, rows: list[Question], metric: str) -> Iterator[pd.DataFrame]:
    """Measure all ways of decoding on one pair of models."""
    template = template_of(setup.tokenizer, setup["template"] or None)
    prompts, new = [template.encode(row.turns[:1]) for row in rows], setup["max_new_tokens"]
    ways = ways_of(
        list(pair.smalls),
        read_thresholds(setup["thresholds"]),
        setup["windows"],
        ablations=setup["ablations"],
    )
    hashes = {name: model_hash(model) for name, model in {"large": pair.large, **pair.smalls}.items()}
    methods = {way: way.method(pair, new) for way in ways}
    written = [way for way in ways if not way.exact or way.group == PLAIN]
    setup.watcher.stage("texts of all rows", len(written))
    ids: dict[BildWay, list[list[int]]] = {}
    about = [hashes, fingerprint(prompts), new]
    for way in written:
        ids[way] = texts_of(methods[way], prompts, setup["batch"], about, setup.out)
        setup.watcher.step()
    texts = {way: setup.tokenizer.batch_decode(own, skip_special_tokens=True) for way, own in ids.items()}
    own_references = any(row.reference is None for row in rows)
    whole = next(own for way, own in texts.items() if way.group == PLAIN)
    scores = {}
    for way, own in texts.items():
        scores[way] = row_statistics(metric, own, whole if own_references else [str(row.reference) for row in rows])
    qualities = {way: points(metric, own.sum(0)) for way, own in scores.items()}
    tasks = [Task(Prompt(r.id, r.set, r.turns[0]), p) for r, p in zip(rows, prompts, strict=True)][: setup["timed"]]
    able, refused = ready(list(methods.values()), tasks)
    usable = [way for way in ways if methods[way] in able]
    against = "the plain large model's texts" if own_references else "references"
    facts: dict[str, Any] = {
        "remarks": [
            f"{METRICS[metric][0]} over {len(rows)} rows against {against}, time over {len(tasks)} of them. The best "
            "points are measured points of the grid, chosen on the rows that they are reported on.",
            *(f"{name}: not measured, {why}" for name, why in refused.items()),
        ],
        "about": {"prompts": len(tasks), "sets": list(dict.fromkeys(task.prompt.set for task in tasks))},
        "more": {"hashes": hashes, "refused": refused},
    }
    asks = [Way(way.name, ask=methods[way].answers) for way in usable]
    runs = measure(setup, asks, tasks, rounds=setup["rounds"])
    table = _summed_up(runs, usable, ids, qualities)
    best = best_points(table, list(pair.smalls))
    claims = claimed(table, best, pair, runs, {way.name: own for way, own in scores.items()}, metric)
    facts["tables"] = {"Best points of the grid, after table 1": pd.DataFrame(best), CLAIMED: claims}
    counted = _counted(best, {way.name: way for way in usable}, methods, pair, prompts, setup)
    _fill_in(table, counted)
    if not pair.exits and (last := best[-2]["way"]):  # of the aligned pair, without loss
        facts["tables"][CLAIMED] = pd.concat([claims, claimed_of_operations(counted, last)])
    grid = table[(table["group"] == BILD) & (table["pair"] == list(pair.smalls)[-1])]
    fullest = str(grid.loc[grid["quality"].idxmax(), "way"])
    shown = next((row["way"] for row in reversed(best) if row["way"]), fullest)
    chosen = next(way for way in usable if way.name == shown)
    alone = {way: own for way, own in texts.items() if way.group in (PLAIN, SMALL)}
    facts["remarks"][0] += f" Examples: {shown}."
    facts["examples"] = [
        _example(setup, rows[i], {way: own[i] for way, own in alone.items()}, methods[chosen], prompts[i])
        for i in range(min(setup["examples"], len(rows)))
    ]
    yield table_of(table.to_dict("records"), **facts)


def _summed_up(
    runs: pd.DataFrame, ways: list[BildWay], ids: Mapping[BildWay, Any], qualities: Mapping[BildWay, float]
) -> pd.DataFrame:
    """Return a row for each way: its quality, time, and how often the large model was called."""
    base, hf = of(runs, PLAIN), of(runs, THEIRS)
    found: list[dict[str, Any]] = []
    for way in ways:
        mine, expected = of(runs, way.name), ids.get(way, ids[ways[0]])
        timed = runs[runs["way"] == way.name]
        # What is drawn depends on a prompt's place in its batch.
        drawn = way.group == SAMPLED
        differing = 0 if drawn else sum(row.ids[0] != expected[row.group] for row in timed.itertuples())
        row = {"way": way.name, "group": way.group, "pair": way.pair, "fallback": way.fallback}
        row |= {"rollback": way.rollback, "window": way.window}
        if way in qualities:
            row["quality"] = qualities[way]
        elif not differing:
            row["quality"] = found[0]["quality"]
        row |= {"ms": 1000 * timed["seconds"].mean()}
        row |= Share(base["seconds"], mine["seconds"]).columns("times_plain")
        row |= Share(hf["seconds"], mine["seconds"]).columns("times_hf")
        if mine["drafted"].sum():
            row |= {"large_calls_a_token": mine["steps"].sum() / mine["tokens"].sum()}
            row |= {"engaged": 1 - mine["accepted"].sum() / mine["tokens"].sum()}
            row |= {"cut": mine["rollbacks"].sum() / mine["steps"].sum()}
        found.append(row | {"differing": differing})
    return pd.DataFrame(found)


def _counted(best: Any, ways: Any, methods: Any, pair: Pair, prompts: Any, setup: Setup) -> dict[str, list[Operations]]:
    """Operations of the large model alone and of the best points, prompt by prompt."""
    names = list(dict.fromkeys([PLAIN, *(row["way"] for row in best if row["way"])]))
    setup.watcher.stage("operations", len(names))
    counted = {}
    for name in names:
        way = ways[name]
        models = [pair.large, *([pair.smalls[way.pair]] if way.pair else [])]
        counted[name] = operations_of(methods[way].answers, models, prompts[:COUNTED])
        setup.watcher.step()
    return counted


def _fill_in(table: pd.DataFrame, counted: Mapping[str, Sequence[Operations]]) -> None:
    """Operations of the ways over those of the large model alone, in columns of the table."""
    base = total(counted[PLAIN])
    for name, each in counted.items():
        done = total(each)
        facts = {"operations": done.flops / base.flops, "moved": done.moved / base.moved}
        for column, value in (facts | {"intensity": done.intensity / base.intensity}).items():
            table.loc[table["way"] == name, column] = value


def _example(setup: Setup, row: Question, alone: Any, method: Any, ids: Any) -> list[Any]:
    """Return a row for the page: each model's text alone, and BiLD's with the large model's tokens marked."""
    emitted: list[tuple[int, bool]] = []

    def note(request: Any) -> None:
        emitted[:] = [(one.token, one.source is None) for one in request.output]

    method.answer(ids, after_step=note)
    lines = [("input", [(row.turns[0], False)])]
    lines += [("reference", [(row.reference, False)])] if row.reference is not None else []
    lines += [(way.name, [(text, False)]) for way, text in alone.items()]
    marked = zip(pieces(setup.tokenizer, [token for token, _ in emitted]), (large for _, large in emitted), strict=True)
    return [*lines, (BILD, list(marked))]


def plot(figure: Any, table: pd.DataFrame) -> None:
    """Quality against latency; larger dots fall back more (figures 4, 5 and 9)."""
    figure.set_size_inches(8, 5.2)
    axis = figure.add_subplot()
    for (group, pair), own in table.dropna(subset=["quality", "times_plain"]).groupby(["group", "pair"], sort=False):
        size, label = 20 + 60 * own["fallback"].fillna(0.0), ", ".join(filter(None, [group, pair]))
        axis.scatter(1 / own["times_plain"], own["quality"], s=size, alpha=0.6, label=label)
    axis.set_xlim(0, 2)
    plain_axis(axis, "", "time of the large model alone = 1 (slower than 2 not shown)", "quality")


def plot_by_rollback(figure: Any, table: pd.DataFrame) -> None:
    """Quality against latency, a curve over fallback thresholds for each rollback threshold (figure 9)."""
    pairs = [pair for pair in table["pair"].unique() if pair]
    figure.set_size_inches(5 * len(pairs) + 1, 4.4)
    for axis, pair in zip(figure.subplots(1, len(pairs), squeeze=False)[0], pairs, strict=True):
        draw_curves(axis, table[table["pair"].isin(["", pair])], pair, {BILD: ("rollback", "fallback")})


def draw_curves(axis: Any, table: pd.DataFrame, title: str, curves: Mapping[str, tuple[str, str]]) -> None:
    """Quality against latency of some groups: of each a curve for each value of one threshold, along another."""
    for (group, (by, along)), line in zip(curves.items(), ("-", "--"), strict=False):
        for value, own in table[table["group"] == group].sort_values(along).groupby(by):
            axis.plot(1 / own["times_plain"], own["quality"], line, marker="o", label=f"{group}, {by} {value:g}")
    axis.axhline(table.loc[table["way"] == PLAIN, "quality"].iloc[0], color="0.5", linestyle=":")
    plain_axis(axis, title, "time of the large model alone = 1", "quality")


COLUMNS = (
    *("way", "quality", "ms", "times_plain", "times_hf", "large_calls_a_token", "engaged", "cut", "differing"),
    *("operations", "moved", "intensity"),
)
OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("small", "aligned", "data", "field", "reference", "metric", "template"), ""),
    "thresholds": tuple(f"{f}:{r}" for f in (0.3, 0.45, 0.6, 0.75, 0.9) for r in (1, 2, 3, 5, 8)),
    "windows": (3, 4, 5, 6, 7, 8, 9, 10),
    **{"ablations": True, "limit": 500, "timed": 40, "rounds": 1, "max_new_tokens": 80, "batch": 32, "examples": 6},
    **bild_pair.OPTIONS,
}
EXPERIMENT = Experiment(run, COLUMNS, plot, OPTIONS, name="bild", source="BiLD, section 4")
