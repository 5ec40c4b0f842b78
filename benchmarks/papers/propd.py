"""ProPD's tables and figures (Zhong et al., 2024).

Tables 1 and 3 compare it as published (`ProPDTree`, pruning in every pass) with Medusa's heads and a static tree that
was searched on other prompts, with the best chain of them (BPD), and with this package's own sizing. Batches are timed
while they are full, against plain decoding of the same batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.drafters.kinds import KINDS
from benchmarks.drafters.subjects import subjects
from benchmarks.harness import PLAIN, Experiment, Setup, Share, Way, bars, lines, measure, on_demand, table_of
from benchmarks.harness.comparisons import CLAIMED, LENGTH, SPEED, Comparison, measured, rows_of
from benchmarks.harness.measure import all_differing, length, of, per_token, size
from benchmarks.harness.setup import TRAINED, Task
from benchmarks.harness.trees import Case, anew, with_tree
from benchmarks.harness.truth import hits_of
from benchmarks.papers import premise
from benchmarks.papers.propd_shape import ProPDTree
from benchmarks.shapes import pruning
from benchmarks.shapes.subjects import OPTIONS, batches, heads, trains_heads
from draftree.drafting.in_model import InModelDrafter
from draftree.pruning import EarlyPruning
from draftree.shaping import DynamicTree, Fixed
from draftree.tree.static import best_choices, chain

MEDUSA: dict[str, Any] = {"drafters": ("medusa",)}
BPD, STATIC, PUBLISHED, OWN = "BPD", "Medusa, static tree", "ProPD as published", "sized by cost"
TOPS, WIDEST = (1, 2, 5, 10, 20, 50), 50
CLAIMED_AT = (1, 4, 16)  # batches of the table of claims
PRUNED, DYNAMIC = "pruning alone", "dynamic alone"


def speeds(setup: Setup) -> Iterator[pd.DataFrame]:
    """ProPD, Medusa and BPD over autoregressive decoding, by batch."""
    return _compared(setup, (BPD, STATIC, PUBLISHED, OWN), over=PLAIN)


def parts(setup: Setup) -> Iterator[pd.DataFrame]:
    """Each part of ProPD alone, and both, over the static tree without either, by batch."""
    return _compared(setup, (STATIC, PRUNED, DYNAMIC, PUBLISHED), over=STATIC)


def pruned(setup: Setup) -> Iterator[pd.DataFrame]:
    """The static tree pruned inside the pass, by layer and top-k, against the same tree whole."""
    drafter, static = _static(setup)
    early = heads(setup)
    remarks = [_searched(setup, static), _pruned(setup)]
    for table, runs in pruning.compared(setup, early, {STATIC: (partial(with_tree, drafter, static), static.nodes)}):
        claims = _of_pruning(runs, [head.layer for head in early], list(setup["top_k"]))
        yield table_of(table.to_dict("records"), **{**table.attrs, "remarks": remarks, "tables": {CLAIMED: claims}})


def _of_pruning(runs: pd.DataFrame, layers: list[int], ks: list[int]) -> pd.DataFrame:
    """What Table 2 shows: first and last layer, smallest and largest k."""
    first, last, widest = f"{min(layers)}/{max(ks)}", f"{max(layers)}/{max(ks)}", f"{min(layers)}/{min(ks)}"
    sides = [
        *(("propd-pruned-speed", first, pruning.WHOLE, SPEED), ("propd-deeper-length", last, first, LENGTH)),
        *(("propd-wider-length", first, widest, LENGTH), ("propd-earlier-speed", first, last, SPEED)),
        ("propd-pruning-length", first, pruning.WHOLE, LENGTH),
    ]
    found = [Comparison(claim, above, (below,), by) for claim, above, below, by in sides if above != below]
    own = of(runs, first)
    share = ("propd-pruned-share", first, "all draft tokens", "share pruned", Share(own["pruned"], own["drafted"]))
    return pd.concat([measured(found, runs), rows_of([share])])


def _pruned(setup: Setup) -> str:
    """Return where trees are pruned, and where the paper's are; and how heads were trained, if they were."""
    layers = ", ".join(str(head.layer) for head in heads(setup))
    said = (
        f"Trees are pruned behind layer {layers} of {len(setup.target.layers)}, the paper's behind layers 1 to 4 of 32 "
        f"and more; the best k are of {setup.small.config.vocab_size:,} tokens, in the paper of 32,000."
    )
    return " ".join([said, *_trained(setup)])


def _trained(setup: Setup) -> list[str]:
    return [on_demand.remark(setup)] if trains_heads(setup) else []


def _searched(setup: Setup, static: Case) -> str:
    return f"The static tree has {static.nodes} draft tokens, searched on {len(setup.lessons)} other prompts."


def by_task(setup: Setup) -> Iterator[pd.DataFrame]:
    """ProPD, Medusa and BPD over autoregressive decoding, by kind of text and batch."""
    sizes, known = setup["batch"], {one: kind for kind, sets in KINDS.items() for one in sets}
    tasks: dict[str, list[Task]] = {}
    for task in setup.tasks:
        tasks.setdefault(known.get(task.prompt.set, task.prompt.set), []).append(task)
    there = {kind: own for kind, own in tasks.items() if len(own) >= max(sizes)}
    if not there:
        raise ValueError(f"No kind of text has {max(sizes)} prompts for a batch: give --per-set, or smaller batches.")
    left_out = ", ".join(sorted(set(tasks) - set(there))) or "none"
    remark = f"Kinds with too few prompts for a batch of {max(sizes)}: {left_out}."
    yield from _compared(setup, (BPD, STATIC, PUBLISHED, OWN), over=PLAIN, remark=remark, kinds=there)


def premises(setup: Setup) -> Iterator[pd.DataFrame]:
    """What ProPD rests on: accuracy of early layers' heads by top-k, time of a step, acceptance length by task."""
    rows: list[dict[str, Any]] = []
    premise.check(setup)
    tasks = [task.ids for task in setup.tasks]
    drafter, static = _static(setup)
    tables: dict[str, pd.DataFrame] = {}
    for head in heads(setup):
        setup.watcher.stage(f"layer {head.layer}", len(tasks))
        hits = hits_of(setup, head, tasks, WIDEST)
        rows += [{"layer": head.layer, "top": k} | hits.top(0, k).columns("accuracy") for k in TOPS]
        yield table_of(rows, remarks=_trained(setup))
    *_, timed = premise.run(setup)
    tables["Time of a pass by batch, context and rows of a text"] = timed
    runs = measure(setup, [Way(PLAIN), Way(STATIC, with_tree(drafter, static), Fixed(static.nodes))])
    lengths = [{"set": name} | length(of(runs, STATIC, name)).columns("acceptance_length") for name in setup.sets]
    tables["Acceptance length by task"] = pd.DataFrame(lengths)
    yield table_of(rows, differing=all_differing(runs), remarks=_trained(setup), tables=tables)


def _compared(
    setup: Setup, names: tuple[str, ...], *, over: str, remark: str = "", kinds: dict[str, list[Task]] | None = None
) -> Iterator[pd.DataFrame]:
    """These ways over one of them, by batch; and by kind of text, where its prompts are given."""
    rows: list[dict[str, Any]] = []
    claims: list[pd.DataFrame] = []
    wrong, sizes = 0, batches(setup)
    _check_single(setup)
    _published(setup)
    drafter, static = _static(setup)
    remarks = [_searched(setup, static), _pruned(setup), remark or f"Speeds are over {over} at the same batch."]
    for kind, tasks in (kinds or {"": setup.tasks}).items():
        for batch in sizes:
            ways = [Way(PLAIN), *(_way(setup, name, drafter, static) for name in names)]
            runs = measure(setup, ways, tasks, batch=batch, stop=False)
            wrong += all_differing(runs)
            rows += [({"task": kind} if kinds else {}) | row for row in _rows(runs, ways, batch, over)]
            claims += [] if kinds else _claims(runs, names, batch)
            tables = {CLAIMED: pd.concat(claims, ignore_index=True)} if claims else None
            yield table_of(rows, differing=wrong, remarks=remarks, tables=tables)


def _check_single(setup: Setup) -> None:
    """Refuse several early heads where trees are pruned by one."""
    if max(len(setup["early_heads"]), len(setup["early_layers"])) > 1:
        raise ValueError("This table prunes by one early head: name one by --early-head, or one of early_layers.")


def _rows(runs: pd.DataFrame, ways: list[Way], batch: int, over: str) -> list[dict[str, Any]]:
    rows, base = [], per_token(of(runs, over))
    for way in ways:
        own = of(runs, way.name)
        rows.append(
            {"way": way.name, "batch": batch}
            | (base / per_token(own)).columns("over")
            | length(own).columns("acceptance_length")
            | {"draft_tokens_a_step": size(own), "pruned": own["pruned"].sum() / max(own["drafted"].sum(), 1)}
            | {"tokens_a_second": 1 / per_token(own).value}
        )
    return rows


def _claims(runs: pd.DataFrame, names: tuple[str, ...], batch: int) -> list[pd.DataFrame]:
    """What the paper claims of these ways, at one batch."""
    pairs = [(PUBLISHED, STATIC, "propd-medusa"), (PUBLISHED, BPD, "propd-bpd")]
    pairs += [(PRUNED, STATIC, "propd-pruning"), (DYNAMIC, STATIC, "propd-dynamic")]
    pairs += [(PUBLISHED, PLAIN, "propd-plain"), (PUBLISHED, PRUNED, "propd-both-pruning")]
    pairs += [(PUBLISHED, DYNAMIC, "propd-both-dynamic")]
    there = [pair for pair in pairs if set(pair[:2]) <= {PLAIN, *names} and batch in CLAIMED_AT]
    found = [Comparison(f"{claim}-batch-{batch}", above, (below,)) for above, below, claim in there]
    if PRUNED in names and batch == 1:
        found.append(Comparison("propd-pruning-length", PRUNED, (STATIC,), LENGTH))
    return [measured(found, runs)]


def _static(setup: Setup) -> tuple[InModelDrafter, Case]:
    """Return the heads, and the tree of `nodes` draft tokens that is best for them on other prompts.

    No heads, several, or no other prompts is a ValueError.
    """
    if len(setup.named) != 1:
        raise ValueError("ProPD's tables are of one set of heads: name one by --drafter.")
    ((name, word),) = setup.named.items()
    if word not in TRAINED and not Path(word).is_dir():
        raise ValueError(f"ProPD's tables are of heads inside the model, and {name} has none: name Medusa's.")
    drafter = subjects(setup, "medusa")[name]
    lessons = setup.searched_on
    heads(setup)  # refuses one that is not there, or of another model
    setup.watcher.stage("search for the static tree", len(lessons))
    choices = best_choices(hits_of(setup, drafter, lessons).by_rank, setup["nodes"])
    return drafter, Case(STATIC, tuple(choices), len(choices))


def _way(setup: Setup, name: str, drafter: InModelDrafter, static: Case) -> Way:
    if name == BPD:
        straight = Case(BPD, tuple(chain(drafter.depth)), drafter.depth)
        return Way(name, with_tree(drafter, straight), Fixed(straight.nodes))
    options: dict[str, Any] = {}
    if name in (PRUNED, PUBLISHED):
        head = heads(setup)[0]
        options["pruner"] = EarlyPruning(head, top_k=setup["pruned_top_k"], always=True)
    if name in (STATIC, PRUNED):
        return Way(name, with_tree(drafter, static), Fixed(static.nodes), options)
    own = anew(drafter)
    if name == OWN:
        return Way(name, own, DynamicTree())
    return Way(name, own, _published(setup), options)


def _published(setup: Setup) -> ProPDTree:
    """Return the paper's trees by the options that are named; refuses those that cannot be."""
    return ProPDTree(setup["nodes"], **{name: setup[name] for name in ("alpha", "fading", "share_alpha")})


TABLE = Experiment(
    speeds,
    ("way", "batch", "over", "acceptance_length", "draft_tokens_a_step", "pruned", "tokens_a_second"),
    lines("batch", "over", by="way", log=True),
    OPTIONS
    | MEDUSA
    | {"nodes": 32, "batch": (1, 2, 4, 8, 16), "depth": 0, "pruned_top_k": 50}
    | {"early_heads": (), "early_layers": ()}
    | on_demand.OPTIONS
    | {"alpha": 0.2, "fading": 0.02, "share_alpha": 0.02},
)
FIGURE = Experiment(
    premises,
    ("layer", "top", "accuracy"),
    lines("top", "accuracy", by="layer", log=True),
    OPTIONS
    | MEDUSA
    | {"per_set": 2, "max_new_tokens": 64, "nodes": 32, "warm_per_set": 4, "depth": 0}
    | {"early_layers": (1, 2, 4, 6), "early_heads": (), "batch": (1, 2, 4), "context": (128, 512)}
    | {"rows": (1, 2, 4, 8, 16, 32, 64), "rounds": 3}
    | on_demand.OPTIONS,
)
BY_TASK = bars("over", label=("task", "way", "batch"))
BATCHES: dict[str, Any] = {"batch": (1, 2, 4, 8, 16), "per_set": 2}
EXPERIMENTS = (
    TABLE.of_paper("ProPD", "Table 1", **BATCHES),
    replace(
        pruning.EXPERIMENT,
        run=pruned,
        options=dict(pruning.EXPERIMENT.options) | on_demand.OPTIONS | {"early_layers": (), "depth": 0},
    ).of_paper("ProPD", "Table 2", **MEDUSA, batch=4, top_k=(4, 16, 50), early_heads=(), early_layers=(1, 2, 4, 6)),
    replace(TABLE, run=parts).of_paper("ProPD", "Table 3", **BATCHES),
    FIGURE.of_paper("ProPD", "Figure 3", **MEDUSA),
    replace(TABLE, run=by_task, columns=("task", *TABLE.columns), plot=BY_TASK).of_paper(
        "ProPD", "Figure 7", batch=(1, 4), per_set=4
    ),
)
