"""Tables as pandas holds them, as a terminal, a page and Markdown show them, and as JSON keeps them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from rich import box
from rich.table import Table

from draftree.bench.report import number as plain_number


def table_of(rows: Iterable[Mapping[str, Any]], **attrs: Any) -> pd.DataFrame:
    """A table of rows; `attrs` is what else there is to say (see `Experiment.run`)."""
    held = list(rows)
    made = pd.DataFrame(held)
    for name in made:  # whole numbers stay whole where a row has none
        values = [row[name] for row in held if row.get(name) is not None and not pd.isna(row[name])]
        if made[name].isna().any() and values and all(isinstance(value, int) for value in values):
            made[name] = made[name].astype("Int64")
    made.attrs.update({name: value for name, value in attrs.items() if value is not None})
    return made


def shown(table: pd.DataFrame, columns: Sequence[str] = ()) -> pd.DataFrame:
    """The cells as texts, intervals in brackets; columns without any value are left out."""
    names = [name for name in columns or table.columns if name in table.columns]
    names = [name for name in names if columns or not name.endswith(("_low", "_high"))]
    made = {}
    for name in names:
        cells = table[name]
        if cells.isna().all():
            continue
        sides = [table[f"{name}_{side}"] for side in ("low", "high") if f"{name}_{side}" in table]
        if len(sides) < 2:
            made[name.replace("_", " ")] = [number(value) for value in cells]
        else:
            made[name.replace("_", " ")] = [
                number(v) if pd.isna(low) else f"{number(v)} [{number(low)}, {number(high)}]"
                for v, low, high in zip(cells, *sides, strict=True)
            ]
    return pd.DataFrame(made)


def number(value: Any) -> str:
    """A cell as people read it."""
    if value is pd.NA:
        return ""
    return plain_number(value.item() if isinstance(value, np.integer | np.floating) else value)


def counted(number: int, noun: str) -> str:
    """Such as "1 thread" and "2 threads"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def rich_table(table: pd.DataFrame, title: str, columns: Sequence[str] = ()) -> Table:
    """For a terminal."""
    cells = shown(table, columns)
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for place, name in enumerate(cells.columns):
        left = not place or not pd.api.types.is_numeric_dtype(table.get(name.replace(" ", "_"), table.iloc[:, 0]))
        made.add_column(name, justify="left" if left else "right")
    for row in cells.itertuples(index=False):
        made.add_row(*(str(cell).replace("[", "\\[") for cell in row))
    return made


def markdown(table: pd.DataFrame, columns: Sequence[str] = ()) -> list[str]:
    """Lines of a Markdown table."""
    cells = shown(table, columns)
    head = [f"| {' | '.join(cells.columns)} |", f"|{'---|' * len(cells.columns)}"]
    return head + [f"| {' | '.join(map(str, row))} |" for row in cells.itertuples(index=False)]


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Plain values, for JSON; NaN is null, and a column that a row does not have is left out of it."""
    rows: list[dict[str, Any]] = json.loads(table.to_json(orient="records", double_precision=15))
    return rows
