"""Lookahead's tables and figures: ways of decoding with a trie, side by side on the same prompts.

Every way answers each prompt before the next one comes. The trie has seen the model's answers to other prompts of the
same sets, as the paper warms it with a development set, and goes on learning. Acceptance lengths do not depend on the
machine; speeds are over plain decoding by the same engine in the same run, prompt passes left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from draftree.bench.analysis_setup import Findings, Sampled, bounds, plain_axis
from draftree.bench.harness import Task
from draftree.bench.papers import lookahead_claims as claims
from draftree.bench.propd_runs import Run, Way, batches, differing, run_all
from draftree.bench.propd_setup import PLAIN, warm_trie
from draftree.bench.summary import Estimate, shown
from draftree.drafting import Drafter, Jacobi, PromptLookup
from draftree.progress import Watcher
from draftree.shaping import DynamicTree, Fixed

BRANCH, DECODING_LENGTH = 12, 64  # tokens of a branch and nodes of a draft in the paper
LENGTHS = (4, 8, 16, 32, 64)
BRANCHES = (4, 12, 24)
CAPACITIES = (1, 2, 4, 8, 16, 32, 64, 128)
WARM = (0, 1, 2, 4, 8, 16)
PANELS = (("over_plain", "tokens a second, plain = 1"), ("acceptance_length", "acceptance length"))


@dataclass(frozen=True, slots=True)
class LookaheadSetup:
    """All that these experiments are given.

    Attributes:
        model: a decoder-only model.
        tasks: prompts to measure on.
        texts: answers to other prompts, set by set in turn.
        sets: how many sets of prompts those are of.
        nodes: guesses a step (the decoding length).
        new: most tokens of an answer.
        watcher: hears of progress.
        trained: a drafter of the package by its name, made for the model.
    """

    model: Any
    tasks: Sequence[Task]
    texts: Sequence[Sequence[int]]
    sets: int
    nodes: int
    new: int
    watcher: Watcher
    trained: Callable[[str], Drafter]

    def trie(self, warm: int | None = None, **options: Any) -> Drafter:
        """A trie that has seen `warm` answers of every set; None for all there are."""
        texts = self.texts if warm is None else self.texts[: warm * self.sets]
        return warm_trie(texts, **({"decoding_length": self.nodes, "branch_length": BRANCH} | options))


@dataclass(frozen=True, slots=True)
class Cell:
    """One way of decoding in a table.

    Attributes:
        name: what the table calls it.
        make: its drafter, as it is before the first prompt; None for plain decoding.
        nodes: guesses of every step; None for trees sized by cost.
        paper: the paper's figure for it.
        reject: whether no guess is accepted.
    """

    name: str
    make: Callable[[], Drafter] | None
    nodes: int | None
    paper: str = ""
    reject: bool = False

    def way(self) -> Way:
        """As `run_all` takes it."""
        if self.make is None:
            return Way(self.name)
        shape = DynamicTree() if self.nodes is None else Fixed(self.nodes)
        return Way(self.name, self.make(), shape, reject=self.reject)


# ---------------------------------------------------------------- the tables


def methods(setup: LookaheadSetup) -> Findings:
    """Table 2: ways of drafting without training."""
    n, paper = setup.nodes, claims.METHODS

    def printed(column: str) -> str:
        rows = [f"Llama-7B, {name}, A100" for name in ("Dolly", "GSM8k", "HumanEval-x")]
        return " / ".join(paper.cell(row, column).partition("(")[2].rstrip(")") for row in rows)

    cells = [
        Cell("prompt lookup", PromptLookup, n, ""),
        Cell("single branch (LLMA)", partial(setup.trie, mode="single"), n, printed("LLMA")),
        Cell("lookahead decoding (Fu et al.)", Jacobi, n, printed("LookaheadDecoding")),
        Cell("parallel branches", partial(setup.trie, mode="parallel"), n),
        Cell("hierarchical trie", setup.trie, n, printed("Lookahead")),
        Cell("hierarchical, sized by cost", setup.trie, None),
    ]
    return compare(setup, cells, "Methods", "paper: Llama-7B, A100,\nDolly / GSM8k / HumanEval-x")


def procedures(setup: LookaheadSetup) -> Findings:
    """Table 3: what goes into the trie, and what leaves it. A forest too small for all, so that pruning has work."""
    n, most = setup.nodes, max(_nodes_held(setup) // 2, 64)
    paper = claims.PROCEDURES

    def cell(name: str, **options: Any) -> Cell:
        ratio = float(paper.cell(name, "tokens/s")) / float(paper.cell("Lookahead", "tokens/s"))
        said = f"{paper.cell(name, 'tokens/s')} tokens/s, {ratio:.2f}"
        return Cell(name, partial(setup.trie, max_nodes=most, **options), n, said)

    cells = [
        cell("without prompt", sources="output"),
        cell("without output", sources="prompt"),
        cell("without pruning", prune=False),
        cell("without eliminating", eliminate=False),
        cell("Lookahead"),
    ]
    found = compare(setup, cells, "Updating procedures", "paper: AntGLM-10B, A100;\nover Lookahead", over="Lookahead")
    found.remarks.append(
        f"The forest is bounded to {most} nodes, half of what the warm-up alone would fill: unbounded, so little text "
        "leaves nothing to prune."
    )
    found.more["max_nodes"] = most
    return found


def capacity(setup: LookaheadSetup) -> Findings:
    """Table 4: acceptance and the time of the trie by its capacity, in decoding lengths."""
    n, paper = setup.nodes, claims.CAPACITY
    cells = []
    for times in CAPACITIES:
        name = f"{times}*DL"
        said = f"{paper.cell(name, 'tokens/s')}; {paper.cell(name, 'retrieve, ms')} + {paper.cell(name, 'update, ms')}"
        cells.append(Cell(name, partial(setup.trie, max_nodes=times * DECODING_LENGTH), n, said))
    found = compare(setup, cells, "Capacity", "paper: AntGLM-10B, A100;\ntokens/s; retrieve + update, ms")
    found.remarks.append(
        f"Here n*DL bounds the whole forest, to n times {DECODING_LENGTH} nodes; the warm-up alone would fill "
        f"{_nodes_held(setup)}. "
        "The paper bounds the tree of each first token."
    )
    return found


def batch(setup: LookaheadSetup) -> Findings:
    """Table 12: batches of 2 and 4, each against plain decoding of the same batch."""
    paper, parts = claims.BATCH, []
    for size in (2, 4):
        column = f"batch {size}"
        cells = [
            Cell("single branch (LLMA)", partial(setup.trie, mode="single"), setup.nodes, paper.cell("LLMA", column)),
            Cell("hierarchical trie", setup.trie, setup.nodes, paper.cell("Lookahead", column)),
            Cell("hierarchical, sized by cost", setup.trie, None),
        ]
        title = f"Batch {size}"
        parts.append(compare(setup, cells, title, "paper: AntGLM-10B;\ntokens/s (times baseline)", size=size))
    return joined(parts)


def worst(setup: LookaheadSetup) -> Findings:
    """Every guess verified, none accepted."""
    paper = " / ".join(row[1] for row in claims.WORST.rows)
    cells = [
        Cell("hierarchical trie", setup.trie, setup.nodes, paper, reject=True),
        Cell("sized by cost", setup.trie, None, reject=True),
    ]
    return compare(setup, cells, "Nothing accepted", "paper: AntGLM-10B / Llama-13B")


def warm_up(setup: LookaheadSetup) -> Findings:
    """Figure 7: by the answers of every set that the trie has seen."""
    most = len(setup.texts) // setup.sets
    counts = [count for count in WARM if count <= most]
    cells = [Cell(f"{count} a set", partial(setup.trie, warm=count), setup.nodes) for count in counts]
    found = compare(setup, cells, "Warm-up", "paper")
    found.draw = lambda figure: _curves(figure, found.rows, {"hierarchical trie": (counts, [c.name for c in cells])},
                                        "answers of every set seen before")  # fmt: skip
    return found


def lengths(setup: LookaheadSetup) -> Findings:
    """Figures 4 and 5: speed and acceptance length by decoding and branch length."""
    lines: dict[str, tuple[list[int], list[str]]] = {}
    cells = []
    for mode in ("hierarchical", "parallel"):
        for branch in BRANCHES:
            names = [f"{mode}, branch {branch}, DL {n}" for n in LENGTHS]
            lines[f"{mode}, branch {branch}"] = (list(LENGTHS), names)
            for name, n in zip(names, LENGTHS, strict=True):
                make = partial(setup.trie, mode=mode, decoding_length=n, branch_length=branch)
                cells.append(Cell(name, make, n))
    single = sorted(set(LENGTHS) | set(BRANCHES))
    names = [f"single branch (LLMA), branch {n}" for n in single]
    lines["single branch (LLMA)"] = (single, names)
    for name, n in zip(names, single, strict=True):
        cells.append(Cell(name, partial(setup.trie, mode="single", decoding_length=n, branch_length=n), n))
    found = compare(setup, cells, "Decoding and branch length", "paper")
    found.draw = lambda figure: _curves(figure, found.rows, lines, "guesses a step")
    found.size = (10, 4.2)
    return found


# ---------------------------------------------------------------- what they share


def compare(
    setup: LookaheadSetup, cells: Sequence[Cell], title: str, paper: str, *, size: int = 1, over: str = PLAIN
) -> Findings:
    """Run the cells beside plain decoding, `size` prompts together; a row for each, speeds over the way `over`."""
    setup.watcher.stage(title, batches(setup.tasks, size, len(cells) + 1))
    ways = [Way(PLAIN), *(cell.way() for cell in cells)]
    runs = run_all(setup.model, ways, setup.tasks, size, setup.new, setup.watcher)
    wrong = differing(runs, PLAIN)
    printed = {cell.name: cell.paper for cell in cells}
    rows = [_row(name, run, runs[PLAIN], runs[over], size, printed.get(name, "")) for name, run in runs.items()]
    table = _table(title if size == 1 else f"{title} (prompts together)", rows, over, paper)
    remark = (
        f"{title}: {len(setup.tasks) // size * size} prompts, answers that differ from the plain engine's: {wrong}."
    )
    return Findings(rows, [table], lambda figure: _bars(figure, rows), (9, 1.6 + 0.34 * len(rows)),
                    {"differing": wrong}, [remark])  # fmt: skip


def _row(name: str, run: Run, plain: Run, over: Run, size: int, paper: str) -> dict[str, Any]:
    steps = sum(run.steps)
    return {
        "way": name,
        "batch": size,
        "over_plain": _estimate(plain.per_token / run.per_token),
        "over": _estimate(over.per_token / run.per_token),
        "acceptance_length": _estimate(run.length),
        "guesses_a_step": run.size,
        "draft_ms": 1000 * sum(run.drafting) * size / steps if steps else 0.0,
        "tokens_a_second": 1 / run.per_token.value,
        "paper": paper,
    }


def _estimate(sampled: Sampled) -> list[float]:
    """Value, low, high; the value thrice where a single prompt leaves nothing to resample."""
    return [sampled.value, *bounds(sampled.estimate)]


def _said(estimate: Sequence[float]) -> str:
    value, low, high = estimate
    return shown(Estimate(value, low, high) if low < high else Estimate(value, None, None), "{:.2f}")


def _table(title: str, rows: Sequence[dict[str, Any]], over: str, paper: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold",
        caption="Acceptance length: 1 + accepted / steps. Draft: guessing and sizing, a step. \\[95 % bootstrap]",
        caption_justify="left",
    )  # fmt: skip
    columns = ["way", "tokens/s over\nplain", "acceptance\nlength", "guesses\na step", "draft, ms"]
    if over != PLAIN:
        columns.insert(2, f"over\n{over}")
    if any(row["paper"] for row in rows):
        columns.append(paper)
    for place, heading in enumerate(columns):
        table.add_column(heading, justify="right" if place else "left")
    for row in rows:
        cells = [row["way"], _said(row["over_plain"]), _said(row["acceptance_length"]), f"{row['guesses_a_step']:.1f}"]
        cells.append(f"{row['draft_ms']:.3f}" if row["way"] != PLAIN else "")
        if over != PLAIN:
            cells.insert(2, _said(row["over"]))
        table.add_row(*cells, *([row["paper"]] if len(columns) > len(cells) else []))
    return table


def joined(parts: Sequence[Findings]) -> Findings:
    """Several tables as one result, their rows in one picture."""
    rows = [row for part in parts for row in part.rows]
    remarks = [remark for part in parts for remark in part.remarks]
    more = {"differing": sum(part.more["differing"] for part in parts)}
    size = (9.0, 1.6 + 0.34 * len(rows))
    return Findings(rows, [t for p in parts for t in p.tables], lambda f: _bars(f, rows), size, more, remarks)


def _nodes_held(setup: LookaheadSetup) -> int:
    """Nodes of a forest that has seen all the answers, unbounded."""
    drafter = warm_trie(setup.texts, branch_length=BRANCH)
    return drafter.trie.nodes


def _bars(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    names = [row["way"] if row["batch"] == 1 else f"{row['way']}, batch {row['batch']}" for row in rows]
    for place, (key, title) in enumerate(PANELS):
        axis = figure.add_subplot(1, 2, place + 1)
        values = np.array([row[key] for row in rows])
        axis.barh(range(len(rows)), values[:, 0], color="#7aa874" if place else "#7f9fc4", height=0.66)
        axis.hlines(range(len(rows)), values[:, 1], values[:, 2], color="0.25", linewidth=1)
        axis.axvline(1.0, color="0.5", linewidth=0.8)
        axis.set_yticks(range(len(rows)), names if not place else [])
        axis.invert_yaxis()
        plain_axis(axis, title, "", "")


def _curves(figure: Any, rows: Sequence[dict[str, Any]], lines: dict[str, tuple[list[int], list[str]]], x: str) -> None:
    by_name = {row["way"]: row for row in rows}
    for place, (key, title) in enumerate(PANELS):
        axis = figure.add_subplot(1, 2, place + 1)
        for number, (line, (at, names)) in enumerate(lines.items()):
            style = ":" if "single" in line else "--" if "parallel" in line else "-"
            axis.plot(at, [by_name[name][key][0] for name in names], style, marker="o", color=f"C{number}", label=line)
        plain_axis(axis, title, x, "")
        if len(lines) > 1 and place:
            axis.legend(fontsize=7, frameon=False)
