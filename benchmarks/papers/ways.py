"""Ways of decoding side by side on the same prompts: what the tables of Lookahead, BiTA and Hidden Transfer compare.

The trie has seen the model's answers to other prompts of the same sets, as the paper warms it with a development set,
and goes on learning. Speeds are over plain decoding by the same engine in the same run, prompts' passes left out; what
is Hugging Face's own, or measured against its `generate`, is timed over whole answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from benchmarks.harness import PLAIN, Setup, Way, table_of
from benchmarks.harness.comparisons import CLAIMED, Comparison, measured
from benchmarks.harness.measure import all_differing, length, measure, of, per_token, size, whole
from draftree.bench.methods import HuggingFace
from draftree.drafting import Drafter
from draftree.shaping import DynamicTree, Fixed

COLUMNS = (
    *("way", "batch", "over_plain", "over_hf", "over_the_whole", "acceptance_length", "draft_tokens_a_step"),
    *("draft_ms", "paper"),
)
HF = "HF generate"
QUICK: dict[str, Any] = {
    **{"per_set": 1, "max_new_tokens": 64, "sets": (), "batch": 1},
    **{"nodes": 16, "warm_per_set": 8},
}


def sized(name: str, drafter: Drafter, nodes: int | None, paper: str = "", *, reject: bool = False) -> Way:
    """Return a way with trees of `nodes` draft tokens, or sized by cost for None; its drafter is a fresh one.

    `paper` is the paper's figure for it, and with `reject` no draft token is accepted.
    """
    shape = DynamicTree() if nodes is None else Fixed(nodes)
    return Way(name, drafter, shape, {"reject_drafts": reject}, paper=paper)


def hf_way(setup: Setup, name: str = HF, paper: str = "", **options: Any) -> Way:
    """Hugging Face's own `generate`; with these options of it, one of its ways of drafting, prompt by prompt."""
    ask = HuggingFace(name, setup.model, setup["max_new_tokens"], **options).answers
    return Way(name, ask=ask, paper=paper, single=bool(options))


def compared(
    setup: Setup,
    ways: Sequence[Way],
    *,
    batch: int | None = None,
    over: str = "",
    by_set: bool = False,
    claims: Sequence[Comparison] = (),
    **attrs: Any,
) -> Iterator[pd.DataFrame]:
    """Compare the ways with plain decoding, `batch` prompts together; a row for each, also over the way `over`.

    Without a `batch` it is the option of that name. Where one of them is Hugging Face's `generate` each is compared
    with that as well, over whole answers. `by_set` adds a table of the ratios set by set, for single prompts, and
    `claims` one of what the paper claims.
    """
    batch = batch or setup["batch"]
    if gone := {way.name for way in ways if way.single and batch > 1}:
        claims = [claim for claim in claims if not {claim.above, *claim.below} & gone]
        attrs["remarks"] = [
            *attrs.get("remarks", ()),
            f"One prompt at a time is all that these take: {', '.join(gone)}.",
        ]
    ways = [Way(PLAIN), *(way for way in ways if way.name not in gone)]
    theirs = any(way.name == HF for way in ways)
    runs = measure(setup, ways, batch=batch)
    plain, rows = of(runs, PLAIN), []
    for way in ways:
        own = of(runs, way.name)
        timed = per_token if way.ask is None else whole
        row = {"way": way.name, "batch": batch} | (timed(plain) / timed(own)).columns("over_plain")
        row |= (whole(of(runs, HF)) / whole(own)).columns("over_hf") if theirs else {}
        row |= (per_token(of(runs, over)) / per_token(own)).columns("over_the_whole") if over else {}
        if own["steps"].sum():
            row |= length(own).columns("acceptance_length") | {"draft_tokens_a_step": size(own)}
        row |= {"draft_ms": 1000 * own["draft"].sum() * batch / max(own["steps"].sum(), 1)}
        rows.append(row | {"tokens_a_second": 1 / per_token(own).value, "paper": way.paper or None})
    tables = {"Set by set": _by_set(runs, ways)} if by_set and batch == 1 else {}
    if claims:
        tables[CLAIMED] = measured(claims, runs, [way.name for way in ways if way.ask is not None])
    yield table_of(rows, differing=all_differing(runs), **{"tables": tables, **attrs})


def _by_set(runs: pd.DataFrame, ways: Sequence[Way]) -> pd.DataFrame:
    """Return speed over plain decoding, seconds of a whole answer and acceptance length of every way and set."""
    rows = []
    for name in runs["set"].unique():
        plain = of(runs, PLAIN, name)
        for way in ways:
            own, timed = of(runs, way.name, name), per_token if way.ask is None else whole
            row = {"set": name, "way": way.name, "over_plain": (timed(plain) / timed(own)).value}
            row |= {"seconds_an_answer": (own["seconds"] + own["prompt_seconds"] + own["left_seconds"]).mean()}
            rows.append(row | ({"acceptance_length": length(own).value} if own["steps"].sum() else {}))
    return pd.DataFrame(rows)
