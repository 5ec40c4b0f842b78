"""Lookahead's tables and figures: ways of decoding with a trie (Zhao et al., KDD '24).

Acceptance lengths do not depend on the machine; speeds are this machine's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pandas as pd

from benchmarks.drafters.jacobi import Jacobi
from benchmarks.harness import PLAIN, Experiment, Setup, Share, Way, bars, lines, table_of
from benchmarks.harness.claims import claims_of
from benchmarks.harness.comparisons import ANSWERS, CLAIMED, LENGTH, SPEED, Comparison, rows_of
from benchmarks.harness.experiment import Run
from benchmarks.harness.memory import compare_memory
from benchmarks.harness.plots import Plot
from benchmarks.papers.ways import COLUMNS, HF, QUICK, compared, hf_way, sized
from draftree.drafting import Drafter, Lookahead, PromptLookup
from draftree.engine.limits import eos_token_ids

CLAIMS = claims_of("Lookahead")
UNBOUNDED = 2**26  # nodes
BRANCH, DECODING_LENGTH = 12, 64  # tokens of a branch and nodes of a draft in the paper
LENGTHS, BRANCHES = (4, 8, 16, 32, 64), (4, 12, 24)
CAPACITIES, DEFAULT = (1, 2, 4, 8, 16, 32, 64, 128), 16  # the default of the paper
MEMORY_LENGTHS = (2, 4, 8, 16, 32, 64, 128)
LLMA, SINGLE = "LLMA (one branch, of the prompt)", "single branch of the trie"
TRIE, PARALLEL, JACOBI = "hierarchical trie", "parallel branches", "lookahead decoding (Fu et al.)"
SIZED = "hierarchical, sized by cost"
BOTH = (("speed", SPEED), ("length", LENGTH))
BATCH_BRANCH = 8  # tokens of a branch in the paper's batches
BARS = bars("over_plain", "acceptance_length", label=("way", "batch"))


def trie(setup: Setup, warm: int | None = None, **options: Any) -> Lookahead:
    """Return a trie that has seen `warm` answers of every set; None for all there are."""
    texts = setup.texts if warm is None else setup.texts[: warm * len(setup.sets)]
    return setup.trie(texts, **({"decoding_length": setup.options.get("nodes", 64), "branch_length": BRANCH} | options))


def llma(setup: Setup, **options: Any) -> Drafter:
    """Return one branch at a time, drawn from the prompt alone (section 4.3.1)."""
    return trie(setup, mode="single", sources="prompt", **options)


def nodes_held(setup: Setup) -> int:
    """Nodes of a forest that has seen all the answers, unbounded."""
    return setup.trie(branch_length=BRANCH).trie.nodes


def methods(setup: Setup) -> Iterator[pd.DataFrame]:
    """Methods without training side by side, at equal draft tokens."""
    n, claim = setup["nodes"], CLAIMS["Table 2"]

    def printed(column: str) -> str:
        rows = [f"Llama-7B, {name}, A100" for name in ("Dolly", "GSM8k", "HumanEval-x")]
        return " / ".join(claim.cell(row, column).partition("(")[2].rstrip(")") for row in rows)

    ways = [
        hf_way(setup),
        hf_way(setup, "HF prompt lookup", prompt_lookup_num_tokens=n),
        sized("prompt lookup", PromptLookup(), n),
        sized(LLMA, llma(setup), n, printed("LLMA")),
        sized(SINGLE, trie(setup, mode="single"), n),
        sized(JACOBI, Jacobi(), n, printed("LookaheadDecoding")),
        sized(PARALLEL, trie(setup, mode="parallel"), n),
        sized(TRIE, trie(setup), n, printed("Lookahead")),
        sized(SIZED, trie(setup), None),
    ]
    claims = [
        Comparison("lookahead-hf-speed", TRIE, (HF,)),
        Comparison("lookahead-plain-speed", TRIE, (PLAIN,)),
        *(Comparison(f"lookahead-llma-{by}", TRIE, (LLMA,), kind) for by, kind in BOTH),
        *(Comparison(f"lookahead-single-{by}", TRIE, (SINGLE,), kind) for by, kind in BOTH),
        *(Comparison(f"lookahead-parallel-{by}", TRIE, (PARALLEL,), kind) for by, kind in BOTH),
        *(Comparison(f"lookahead-jacobi-{by}", TRIE, (JACOBI,), kind) for by, kind in BOTH),
    ]
    remark = "Paper: Llama-7B, A100, Dolly / GSM8k / HumanEval-x, times HF generate."
    yield from compared(setup, ways, claims=claims, remarks=[remark], by_set=True)


def procedures(setup: Setup) -> Iterator[pd.DataFrame]:
    """What goes into the trie and what leaves it, in a forest too small for all, so that pruning has work."""
    most = max(nodes_held(setup) // 2, 64)
    claim = CLAIMS["Table 3"]

    def cell(name: str, **options: Any) -> Way:
        ratio = float(claim.cell(name, "tokens/s")) / float(claim.cell("Lookahead", "tokens/s"))
        said = f"{claim.cell(name, 'tokens/s')} tokens/s, {ratio:.2f}"
        return sized(name, trie(setup, **({"max_nodes": most} | options)), setup["nodes"], said)

    ways = [
        cell("without prompt", sources="output"),
        cell("without output", sources="prompt"),
        cell("without pruning", prune=False, max_nodes=UNBOUNDED),
        cell("without eliminating", eliminate=False),
        cell("Lookahead"),
    ]
    remark = f"Forests are bounded to {most} nodes, half of what the warm-up fills, but for the one without pruning."
    whole = "Lookahead"
    claims = [
        Comparison(f"lookahead-{name.replace(' ', '-')}", whole, (name,))
        for name in ("without prompt", "without output", "without pruning", "without eliminating")
    ]
    yield from compared(setup, ways, over=whole, claims=claims, remarks=[remark], more={"max_nodes": most})


def capacity(setup: Setup) -> Iterator[pd.DataFrame]:
    """Speed, acceptance, and the times of a retrieval and an update by the trie's capacity, in decoding lengths."""
    claim, ways, clocks = CLAIMS["Table 4"], [], dict[str, dict[str, list[float]]]()
    for times in CAPACITIES:
        name = f"{times}*DL"
        said = f"{claim.cell(name, 'tokens/s')}; {claim.cell(name, 'retrieve, ms')} + {claim.cell(name, 'update, ms')}"
        drafter = trie(setup, capacity=times, eos_token_ids=eos_token_ids(setup.model))
        clocks[name] = {kind: _clocked(drafter.trie, kind) for kind in ("retrieve", "extend")}
        ways.append(sized(name, drafter, setup["nodes"], said))
    length, held = setup["nodes"], nodes_held(setup)
    remark = f"DL is {length}, in the paper {DECODING_LENGTH}. The warm-up alone fills {held} nodes where none leaves."
    claims = [
        Comparison("lookahead-capacity", f"{DEFAULT}*DL", ("1*DL",)),
        Comparison("lookahead-capacity-enough", f"{DEFAULT}*DL", (f"{CAPACITIES[-1]}*DL",)),
    ]
    for table in compared(setup, ways, claims=claims, remarks=[remark]):
        for column, kind in (("retrieve_ms", "retrieve"), ("update_ms", "extend")):
            means = {name: 1000 * sum(taken[kind]) / max(len(taken[kind]), 1) for name, taken in clocks.items()}
            table[column] = table["way"].map(means)
        yield table


def _clocked(store: Any, call: str) -> list[float]:
    """Return seconds of every call of one of a trie's methods from now on."""
    taken, inner = list[float](), getattr(store, call)

    def timed(*given: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return inner(*given, **options)
        finally:
            taken.append(time.perf_counter() - begin)

    setattr(store, call, timed)
    return taken


def memory(setup: Setup) -> Iterator[pd.DataFrame]:
    """Peak memory of whole processes that answer the same prompts, drafted over plain."""
    prompts, without = [task.ids for task in setup.tasks], float(CLAIMS["Table 5"].cell("1", "GiB"))
    setup.watcher.stage("processes", len(MEMORY_LENGTHS))
    rows = []
    for length in MEMORY_LENGTHS:
        given = (prompts, setup["max_new_tokens"], setup.name, length, setup.params, setup.placement)
        plain_bytes, drafted_bytes = compare_memory(*given)
        with_it = float(CLAIMS["Table 5"].cell(str(length), "GiB"))
        row: dict[str, Any] = {"decoding_length": length, "plain_mib": plain_bytes / 2**20}
        row |= {"drafted_mib": drafted_bytes / 2**20, "more_percent": 100 * (drafted_bytes / plain_bytes - 1)}
        rows.append(row | {"paper": f"{with_it} GiB, {with_it / without - 1:+.1%}"})
        setup.watcher.step()
        remark = "Two processes a row, of the same prompts; libraries are counted. The interval is over lengths."
        plain, drafted = ([row[name] for row in rows] for name in ("plain_mib", "drafted_mib"))
        ratio = ("lookahead-memory", PLAIN, "Lookahead", "peak memory", Share(plain, drafted))
        yield table_of(rows, remarks=[remark], tables={CLAIMED: rows_of([ratio])})


def scenarios(setup: Setup) -> Iterator[pd.DataFrame]:
    """Seconds of a whole answer by scenario (set of prompts): Hugging Face's generate, plain, and with a warm trie."""
    ways = [hf_way(setup), sized(TRIE, trie(setup), setup["nodes"]), sized(SIZED, trie(setup), None)]
    claims = [Comparison("lookahead-scenarios", name, (HF,)) for name in (TRIE, SIZED)]
    claims += [Comparison("lookahead-scenarios-plain", name, (PLAIN,), ANSWERS) for name in (TRIE, SIZED)]
    yield from compared(setup, ways, by_set=True, claims=claims)


def batch(setup: Setup) -> Iterator[pd.DataFrame]:
    """Batches of 2 and 4, each against plain decoding of the same batch."""
    claim, wrong = CLAIMS["Table 12"], 0
    rows, found = list[dict[str, Any]](), list[pd.DataFrame]()
    for size in setup["batch"]:
        column = f"batch {size}"
        said = {way: claim.cell(way, column) if column in claim.columns else "" for way in ("LLMA", "Lookahead")}
        ways = [
            sized(LLMA, llma(setup, branch_length=BATCH_BRANCH), setup["nodes"], said["LLMA"]),
            sized(TRIE, trie(setup, branch_length=BATCH_BRANCH), setup["nodes"], said["Lookahead"]),
            sized(SIZED, trie(setup, branch_length=BATCH_BRANCH), None),
        ]
        names = [(f"lookahead-batch-{size}", LLMA), (f"lookahead-batch-{size}-plain", PLAIN)]
        claims = [Comparison(name, TRIE, (below,)) for name, below in names] if column in claim.columns else []
        *_, table = compared(setup, ways, batch=size, claims=claims)
        rows += table.to_dict("records")
        wrong += table.attrs["differing"]
        found += [table.attrs["tables"][CLAIMED]] if claims else []
        yield table_of(rows, differing=wrong, tables={CLAIMED: pd.concat(found)} if found else {})


def worst(setup: Setup) -> Iterator[pd.DataFrame]:
    """Every draft token verified, none accepted."""
    said = " / ".join(row[1] for row in CLAIMS["section 5.2"].rows)
    ways = [sized(TRIE, trie(setup), setup["nodes"], said, reject=True), sized(SIZED, trie(setup), None, reject=True)]
    claims = [Comparison("lookahead-worst-case", name, (PLAIN,)) for name in (TRIE, SIZED)]
    yield from compared(setup, ways, claims=claims)


def warm_up(setup: Setup) -> Iterator[pd.DataFrame]:
    """By the answers of every set that the trie has seen beforehand."""
    most_seen = len(setup.lessons) // len(setup.sets)
    counts = [count for count in setup["seen"] if count <= most_seen]
    if not any(counts):
        raise ValueError(f"There are {most_seen} other prompts of every set to see: give seen a number from 1 to that.")
    left_out = [str(count) for count in setup["seen"] if count > most_seen]
    said = f"Left out, as there are {most_seen} other prompts of every set: {', '.join(left_out)}."
    ways = [sized(f"{count} a set", trie(setup, warm=count), setup["nodes"]) for count in counts]
    most, none = ways[-1].name, ways[0].name
    claims = [Comparison(f"lookahead-warm-up-{by}", most, (none,), kind) for by, kind in BOTH] if most != none else []
    for table in compared(setup, ways, claims=claims, remarks=[said] if left_out else []):
        yield table_of(table.assign(seen=[None, *counts]).to_dict("records"), **table.attrs)


def lengths(setup: Setup) -> Iterator[pd.DataFrame]:
    """Speed and acceptance length by decoding and branch length, for every kind of draft."""
    ways, facts = [], {}
    for mode in ("hierarchical", "parallel"):
        for branch in BRANCHES:
            for n in LENGTHS:
                name = f"{mode}, branch {branch}, DL {n}"
                facts[name] = (f"{mode}, branch {branch}", n)
                made = trie(setup, mode=mode, decoding_length=n, branch_length=branch)
                ways.append(sized(name, made, n))
    for n in sorted({*LENGTHS, *BRANCHES}):
        name = f"{LLMA}, branch {n}"
        facts[name] = (LLMA, n)
        ways.append(sized(name, llma(setup, decoding_length=n, branch_length=n), n))
    longest, middle = max(LENGTHS), BRANCHES[1]
    whole, least = f"hierarchical, branch {max(BRANCHES)}, DL {longest}", f"hierarchical, branch {BRANCHES[0]}, DL 4"
    claims = [
        *(Comparison(f"lookahead-lengths-{by}", whole, (least,), kind) for by, kind in BOTH),
        *(
            Comparison(f"lookahead-parallel-{by}", f"hierarchical, {at}", (f"parallel, {at}",), kind)
            for at in [f"branch {middle}, DL {longest}"]
            for by, kind in BOTH
        ),
        Comparison("lookahead-llma-longer", f"{LLMA}, branch 24", [f"{LLMA}, branch {n}" for n in (32, 64)]),
    ]
    for table in compared(setup, ways, claims=claims):
        kinds = [facts.get(way, (None, None)) for way in table["way"]]
        made = table.assign(kind=[kind for kind, _ in kinds], draft_tokens=[n for _, n in kinds])
        yield table_of(made.to_dict("records"), **table.attrs)


CURVES = lines("draft_tokens", "over_plain", "acceptance_length", by="kind")
SEEN = lines("seen", "over_plain", "acceptance_length")
MEMORY = lines("decoding_length", "more_percent")
MEMORY_COLUMNS = ("decoding_length", "plain_mib", "drafted_mib", "more_percent", "paper")
PROMPTS: dict[str, Any] = {name: QUICK[name] for name in ("per_set", "max_new_tokens", "sets")}
WARM = PROMPTS | {name: QUICK[name] for name in ("batch", "warm_per_set")}


def _of(item: str, run: Run, plot: Plot = BARS, columns: tuple[str, ...] = COLUMNS, **options: Any) -> Experiment:
    return Experiment(run, columns, plot, options).of_paper("Lookahead", item)


EXPERIMENTS = (
    _of("Table 2", methods, **QUICK),
    _of("Table 3", procedures, **QUICK),
    _of("Table 4", capacity, columns=(*COLUMNS[:-1], "retrieve_ms", "update_ms", "paper"), **QUICK),
    _of("Table 5", memory, MEMORY, MEMORY_COLUMNS, **PROMPTS),
    _of("Table 7", scenarios, **QUICK),
    _of("Table 12", batch, **QUICK | {"batch": (2, 4)}),
    _of("Figure 4", lengths, CURVES, **WARM),
    _of("Figure 5", lengths, CURVES, **WARM),
    _of("Figure 7", warm_up, SEEN, **QUICK | {"warm_per_set": 16}, seen=(0, 1, 2, 4, 8, 16)),
    replace(_of("section 5.2", worst, **QUICK), name="lookahead-worst-case"),
)
