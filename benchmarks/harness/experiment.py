"""An experiment as it is declared, and how all of them are found.

Every module below `papers`, `drafters`, `shapes`, `machine` and `peers` may hold one `EXPERIMENT` or several
`EXPERIMENTS`. What an experiment takes is what its `options` name: anything else is refused, with the nearest name.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pandas as pd

from benchmarks.harness.claims import Claim, claims_of
from benchmarks.harness.setup import TRAINED
from draftree.errors import check_least, did_you_mean

if TYPE_CHECKING:
    from benchmarks.harness.setup import Setup

ROOMS = ("papers", "drafters", "shapes", "machine", "peers")
Run = Callable[["Setup"], Iterator[pd.DataFrame]]
COUNTS = {
    *("per_set", "max_new_tokens", "nodes", "batch", "batches", "sizes", "top_k", "pruned_top_k", "rounds", "limit"),
    *("timed", "train_steps", "train_questions", "train_max_length"),
}
SHORT = {"per_set": 1, "max_new_tokens": 64}  # of the papers' tables and figures


@dataclass(frozen=True, slots=True)
class Experiment:
    """One table or figure."""

    # Measures, and yields the table so far whenever a part of it is complete; the last one is the whole. Its
    # docstring's first line says what the table shows. The table's `attrs` may hold `remarks` (lines), `differing`
    # (number of answers that are not plain decoding's), `tables` (further ones by their titles), `more` (further facts
    # for the result file) and `examples` (texts for the page).
    run: Run
    # What a terminal and a page show, in order; where a table has X_low and X_high, X shows its interval.
    columns: tuple[str, ...]
    plot: Callable[[Any, pd.DataFrame], None]  # draws a table into a matplotlib figure
    # All that it takes, with their defaults; see `Setup` for those that every experiment shares.
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""  # by which `draftree bench run` knows it
    source: str = ""  # where the papers have it
    claim: Claim | None = None  # the paper's figures

    @property
    def says(self) -> str:
        """Return one line about the table."""
        run = self.run.func if isinstance(self.run, partial) else self.run
        return (run.__doc__ or "").strip().splitlines()[0]

    @property
    def needs(self) -> str:
        """Return what must be named or made before it is of use, in a few words; "" for nothing."""
        found = []
        if "train_steps" in self.options and self.options.get("early_layers") != ():
            found.append(f"the extra train: trains on demand ({self.options['train_steps']} steps; --set questions=)")
        if "pair_data" in self.options:
            found.append(
                "a pair (--model, --set small=, aligned=), or rows to build one (--set pair_data=); else the package's"
            )
        elif "small" in self.options:
            found.append("with --model a small model (--set small=)")
        if "engines" in self.options:
            found.append("the environments of make bench-peers")
        if set(self.options.get("drafters", ())) & set(TRAINED):
            found.append("with --model trained drafters (--drafter FOLDER)")
        if "early_heads" in self.options and not self.options.get("early_layers"):
            found.append("with --model an early head (--early-head FOLDER)")
        return "; ".join(found)

    def configured(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options, those in `given` in place of the defaults; texts become what the default is.

        Raises:
            ValueError: an option that this experiment does not have, a value of another kind, or a count below 1.
        """
        for name in given:
            if name not in self.options:
                held, near = ", ".join(self.options) or "none", did_you_mean(name, self.options)
                raise ValueError(f"{self.name} has no option {name!r}: it has {held}.{near}")
        read_ones = {name: read(name, value, self.options[name]) for name, value in given.items()}
        for name in COUNTS & set(read_ones):
            values = read_ones[name]
            check_least(1, sys.maxsize, **{name: min(values, default=1) if isinstance(values, tuple) else values})
        return {**self.options, **read_ones}

    def of_paper(self, paper: str, item: str, **options: Any) -> Experiment:
        """Return the same under the name of a paper's table or figure, such as "BiTA" and "Table 4": `bita-table4`.

        It answers few prompts shortly (`SHORT`), if `options` do not say otherwise.
        """
        name = f"{paper} {item.replace(' ', '')}".lower().replace(" ", "-")
        short = {option: value for option, value in SHORT.items() if option in self.options}
        chosen = {**self.options, **short, **options}
        return replace(self, name=name, source=f"{paper}, {item}", claim=claims_of(paper)[item], options=chosen)


def read(name: str, value: Any, default: Any) -> Any:
    """`value` of the kind that `default` is: several values, split at commas, where that is a tuple.

    A value that cannot be of that kind is a ValueError.
    """
    if isinstance(default, tuple):
        parts = value.split(",") if isinstance(value, str) else value if isinstance(value, Sequence) else [value]
        return tuple(read(name, part, default[0] if default else "") for part in parts)
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != 1:
            raise ValueError(f"{name} takes one value here: give it once.")
        value = value[0]
    if isinstance(default, bool):
        if str(value).lower() not in ("true", "false"):
            raise ValueError(f"{name} is {value!r}: give true or false.")
        return str(value).lower() == "true"
    if isinstance(default, int | float):
        try:
            return type(default)(value)
        except (TypeError, ValueError):
            kind = "a whole number" if isinstance(default, int) else "a number"
            raise ValueError(f"{name} is {value!r}: give {kind}.") from None
    return value


def experiments() -> dict[str, Experiment]:
    """Return all experiments by name, those of the papers first."""
    found: dict[str, Experiment] = {}
    for room in ROOMS:
        package = importlib.import_module(f"benchmarks.{room}")
        for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda one: one.name):
            held = importlib.import_module(f"benchmarks.{room}.{module.name}")
            own = getattr(held, "EXPERIMENTS", ()) or [getattr(held, "EXPERIMENT", None)]
            found |= {one.name: one for one in own if one is not None}
    return found


def find(name: str | None) -> Experiment:
    """Return the experiment of that name; raise a ValueError for an unknown name, or none."""
    known = experiments()
    if name in known:
        return known[name]
    if not name:
        raise ValueError("Name an experiment: draftree bench list shows all of them.")
    near = did_you_mean(name, known)
    raise ValueError(f"There is no experiment {name!r}: draftree bench list shows all of them.{near}")
