"""Tables of experiments, which pandas holds, as JSON keeps them and as `draftree.bench.report` shows them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from draftree.bench.report import Table


def table_of(rows: Iterable[Mapping[str, Any]], **attrs: Any) -> pd.DataFrame:
    """Return a table of rows; `attrs` is what else there is to say (see `Experiment.run`)."""
    held = list(rows)
    made = pd.DataFrame(held)
    for name in made:  # whole numbers stay whole where a row has none, and ends of intervals are numbers where all lack
        if str(name).endswith(("_low", "_high")):
            made[name] = pd.to_numeric(made[name])
        values = [row[name] for row in held if not _missing(row.get(name))]
        if made[name].isna().any() and values and all(isinstance(value, int) for value in values):
            made[name] = made[name].astype("Int64")
    made.attrs.update({name: value for name, value in attrs.items() if value is not None})
    return made


def _missing(value: Any) -> bool:
    """Return whether a cell has nothing in it; a list of samples never has."""
    return value is None or (pd.api.types.is_scalar(value) and bool(pd.isna(value)))


def shown(table: pd.DataFrame, title: str = "", columns: Sequence[str] = ()) -> Table:
    """Return the table for people: these columns, or all of them, those with an interval in one cell with it."""
    return Table(title, records(table), columns or [n for n in table if not str(n).endswith(("_low", "_high"))])


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return plain values, for JSON; NaN is null, and a column that a row does not have is left out of it."""
    return json.loads(table.to_json(orient="records", double_precision=15))


def markdown(table: Table) -> list[str]:
    """Return the lines of a Markdown table."""
    headings, *lines = table.texts()
    under = f"|{'---|' * len(headings)}"
    return [f"| {' | '.join(headings)} |", under, *(f"| {' | '.join(line)} |" for line in lines)]
