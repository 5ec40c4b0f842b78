"""The figures of `bench speed` and `bench gpu`: ratios of timed steps and timed answers, each beside the wanted one.

A figure that nothing is asked of is shown without a wish. Those of an inflated model on a CPU are asked of one of 400M
parameters in float32 on two cores, those of a GPU of llama-7b's shape in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from draftree.bench.analysis_setup import shown
from draftree.bench.compare_case import Result
from draftree.bench.compare_methods import (
    COMPILED,
    NO_LESSONS,
    PLAIN,
    REFERENCE,
    SMALL,
    WARM,
    Kit,
    LeftOutError,
    WarmTrie,
    label_of,
)  # fmt: skip
from draftree.bench.harness import Sample
from draftree.bench.inflate_measure import FORM_LABELS, HF, LOOP
from draftree.bench.methods import Draftree, Method
from draftree.bench.summary import Estimate
from draftree.drafting import Drafter, Lookahead
from draftree.runner import Runner, open_runner
from draftree.shaping import DynamicTree

TENSORS, CAPTURED = FORM_LABELS  # plain decoding by the eager runner in one form or another
NODES = 16  # most rows of the trees whose overhead is told: the root, and guesses
LIMITED = "lookahead_16"
LIMITED_LABEL = f"Lookahead, warm trie, up to {NODES - 1} guesses"
PROMPT_LOOKUP, ASSISTED = "hf_prompt_lookup", "hf_assisted"
DRAFTING = (SMALL, WARM, f"{WARM}+{SMALL}", LIMITED)
METHODS = (REFERENCE, COMPILED, PROMPT_LOOKUP, ASSISTED, PLAIN, *DRAFTING)
OUTSIDE = ("draft", "accept", "commit")  # stages of a step that are no pass; the shape's work is in the first

OVER_HF, OVER_COMPILED = "plain decoding / HF generate", "plain decoding / HF static + compile"
STEP_FLOOR, TOKEN_FLOOR = "memory floor / plain step", "memory floor / plain token"
EFFICIENCY = f"overhead efficiency, trees of up to {NODES} nodes"
EFFICIENCY_BEHIND = "the same, without prompts' passes"
SHARE = "draft + shape + accept + commit, share of a step"
BEST = "best drafter / HF generate"
WANTED: dict[str, dict[str, tuple[str, float]]] = {
    "embedded": {OVER_HF: (">=", 2.0), OVER_COMPILED: (">=", 1.2), BEST: (">=", 4.0)},
    "inflated": {
        **{STEP_FLOOR: (">=", 0.9), TOKEN_FLOOR: (">=", 0.9), "16-row step / 1-row step": ("<=", 1.6)},
        **{EFFICIENCY: (">=", 0.85), EFFICIENCY_BEHIND: (">=", 0.85), SHARE: ("<=", 0.05), BEST: (">=", 2.2)},
    },
    "gpu": {
        **{STEP_FLOOR: (">=", 1 / 1.2), "64-row step / 1-row step": ("<=", 1.15)},
        **{EFFICIENCY: (">=", 0.9), EFFICIENCY_BEHIND: (">=", 0.9)},
    },
}


class SpeedKit(Kit):
    """`Kit` with one method more, a warm trie with trees of at most `NODES` nodes.

    All tries here keep what the warmed one knows of how often its guesses hold, and begin with a governor that has seen
    nothing: one trie is warmed for models of several sizes, whose steps it knows nothing of.
    """

    __slots__ = ()

    def method(self, name: str) -> Method:
        """See `Kit.method`."""
        if name in FORM_LABELS:
            runner = runner_in(self.model, name)
            return Draftree(name, named(name), self.model, self.max_new_tokens, runner=runner)
        if name == LIMITED:
            return Draftree(LIMITED, LIMITED_LABEL, self.model, self.max_new_tokens, self._trie(NODES - 1))
        return super().method(name)

    def maker(self, name: str) -> Any:
        """See `Kit.maker`."""
        return self._trie() if name == WARM else super().maker(name)

    def _trie(self, most: int = 64) -> Any:
        if self.warm is None:
            raise LeftOutError(NO_LESSONS)
        warm = self.warm
        return lambda: _fresh(warm, most)


def _fresh(warm: WarmTrie, most: int) -> Drafter:
    trie: Lookahead = warm.drafter()
    taught, trie.shape = trie.shape, DynamicTree(most)
    if isinstance(taught, DynamicTree):
        trie.shape.calibration = taught.calibration
    return trie


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a model.

    Attributes:
        model: its name in tables.
        name: of the figure.
        estimate: value and interval.
        sense, wanted: ">=" or "<=", and what is asked for; "" and None where nothing is.
        of: what the figure is of, where that is not in its name.
    """

    model: str
    name: str
    estimate: Estimate
    sense: str = ""
    wanted: float | None = None
    of: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether it is what is asked for; None where nothing is."""
        if self.wanted is None:
            return None
        value = self.estimate.value
        return value >= self.wanted if self.sense == ">=" else value <= self.wanted

    @property
    def part_of_wanted(self) -> float | None:
        """How much of what is asked for is reached: 1 and more where it is; None where nothing is asked."""
        if self.wanted is None:
            return None
        value = self.estimate.value
        return value / self.wanted if self.sense == ">=" else self.wanted / max(value, 1e-9)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"kind": "figure", "reached": self.reached}


def figures_of(
    kind: str, model: str, steps: Sequence[dict[str, Any]], floor: dict[str, float], case: Result
) -> list[Figure]:
    """All figures of one model.

    Args:
        kind: "embedded", "inflated" or "gpu": what is wanted of it.
        model: its name in tables.
        steps: by method and number of rows, as `inflate_measure` makes them.
        floor: of a step; its `seconds` are used.
        case: the answers, of one interleaved run.
    """
    found: list[tuple[str, Estimate, str]] = []
    rows = case.rows
    plain, over = rows[PLAIN], {name: row.over[REFERENCE] for name, row in rows.items()}
    found.append((OVER_HF, over[PLAIN], ""))
    if COMPILED in rows:
        found.append((OVER_COMPILED, _inverse(rows[COMPILED].over[PLAIN]), ""))
    held = {(row["method"], row["rows"]): row for row in steps}
    found.append((STEP_FLOOR, _alone(held[LOOP, 1]["floor_share"]), ""))
    found.append((TOKEN_FLOOR, _alone(floor["seconds"] * _rate(case.samples, PLAIN)), ""))
    for method, whose in ((LOOP, ""), (HF, ", HF forward")):
        found += [
            (f"{n}-row step / 1-row step{whose}", _alone(row["over_one_row"]), "")
            for (name, n), row in held.items()
            if name == method and n > 1
        ]
    if LIMITED in rows:
        row, stats = rows[LIMITED], rows[LIMITED].stats
        assert stats is not None
        length = stats.acceptance_length
        efficiency = _scaled(row.over[plain.method], 1 / length)
        found.append((EFFICIENCY, efficiency, f"acceptance length {length:.2f}"))
        behind = _rate(case.samples, LIMITED) / _rate(case.samples, PLAIN) / length
        found.append((EFFICIENCY_BEHIND, _alone(behind), ""))
        read = sum(sample.answer.prompt_verify for sample in case.samples if sample.method == LIMITED)
        aside = sum(stats.seconds[stage] for stage in OUTSIDE)
        found.append((SHARE, _alone(aside / (aside + stats.seconds["verify"] - read)), ""))
    for name in (PROMPT_LOOKUP, ASSISTED):
        if name in rows:
            found.append((f"{label_of(name)} / HF generate", over[name], ""))
    best = max((name for name in DRAFTING if name in rows), key=lambda name: over[name].value, default=None)
    if best is not None:
        found.append((BEST, over[best], named(best)))
    wanted = WANTED[kind]
    figures = []
    for name, estimate, of in found:
        sense, value = wanted.get(name, ("", None))
        figures.append(Figure(model, name, estimate, sense, value, of))
    return figures


def named(method: str) -> str:
    """What tables call a method of these benchmarks."""
    if method in FORM_LABELS:
        return FORM_LABELS[method].replace("draftree", "plain")
    return LIMITED_LABEL if method == LIMITED else label_of(method)


def runner_in(model: Any, name: str) -> Runner:
    """The eager runner in the form that `FORM_LABELS` calls `name`."""
    form = name.removeprefix("draftree_")
    choices = {"tensors": "eager", "captured": "cuda_graphs"}
    return open_runner(model, choices[form])


def figure_table(figures: Sequence[Figure], title: str) -> Table:
    """A table of figures."""
    table = Table("model", "figure", "value", "wanted", "", title=title, title_justify="left")
    last = ""
    for figure in figures:
        wish = "" if figure.wanted is None else f"{figure.sense} {figure.wanted:.3g}"
        told = {None: "", True: "reached", False: "short"}[figure.reached]
        name = f"{figure.name} ({figure.of})" if figure.of else figure.name
        table.add_row(figure.model if figure.model != last else "", name, shown(figure.estimate, "{:.2f}"), wish, told)
        last = figure.model
    return table


def step_table(model: str, steps: Sequence[dict[str, Any]], floor: dict[str, float]) -> Table:
    """A table of timed steps."""
    title = f"Milliseconds of a step, {model} (over one row)"
    held = {(row["method"], row["rows"]): row for row in steps}
    forms = [name for name in FORM_LABELS if (name, 1) in held]
    labels = [FORM_LABELS[name] for name in forms]
    table = Table("rows", "HF forward", "draftree", "floor / draftree", *labels, title=title, title_justify="left")
    for rows in sorted({row["rows"] for row in steps}):
        theirs, ours = held[HF, rows], held[LOOP, rows]
        cells = [f"{1000 * r['seconds']:.2f} ({r['over_one_row']:.2f})" for r in (theirs, ours)]
        others = [held.get((name, rows)) for name in forms]
        more = ["" if r is None else f"{1000 * r['seconds']:.2f} ({r['over_one_row']:.2f})" for r in others]
        table.add_row(str(rows), *cells, f"{ours['floor_share']:.2f}", *more)
    table.caption = (
        f"Floor: {floor['weight_bytes'] / 1e9:.3f} GB of weights at {floor['bandwidth'] / 1e9:.1f} GB/s, "
        f"{1000 * floor['seconds']:.2f} ms"
    )
    table.caption_justify = "left"
    return table


def case_table(model: str, case: Result) -> Table:
    """A table of the answers' speeds."""
    table = Table(
        "method", "tokens/s", "over HF generate", "acceptance length",
        title=f"Answers, {model}", title_justify="left",
    )  # fmt: skip
    for name in case.names:
        row = case.rows.get(name)
        if row is None:
            table.add_row(named(name), f"not measured: {case.unmeasured.get(name, '')}", "", "")
            continue
        length = "" if row.stats is None else f"{row.stats.acceptance_length:.2f}"
        table.add_row(named(name), shown(row.speed, "{:.1f}"), shown(row.over[REFERENCE], "{:.2f}"), length)
    return table


def differing(model: str, case: Result) -> str:
    """A line that says whether all answers were Hugging Face's."""
    parted = {name: len(row.parted) for name, row in case.rows.items() if row.parted}
    if not parted:
        return f"{model}: all answers equal HF generate's."
    told = ", ".join(f"{named(name)} {count} of {case.about['prompts']}" for name, count in parted.items())
    return f"{model}: answers that part from HF generate's: {told}."


def _rate(samples: Sequence[Sample], method: str) -> float:
    """Tokens a second of a method of ours, the prompt's pass and the token that it gives left out."""
    own = [sample.answer for sample in samples if sample.method == method]
    tokens = sum(len(answer.ids) - 1 for answer in own)
    return tokens / sum(answer.seconds - answer.prompt_verify for answer in own)


def _alone(value: float) -> Estimate:
    return Estimate(float(value), None, None)


def _scaled(e: Estimate, factor: float) -> Estimate:
    low, high = e.low, e.high
    return Estimate(e.value * factor, None if low is None else low * factor, None if high is None else high * factor)


def _inverse(e: Estimate) -> Estimate:
    return Estimate(1 / e.value, None if e.high is None else 1 / e.high, None if e.low is None else 1 / e.low)
