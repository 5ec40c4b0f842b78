"""Experiments by name, and their result files: JSON with where and how it was made in every row, and a picture."""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from draftree.bench.analysis_setup import Findings

E = TypeVar("E")

FEW = 12  # experiments that a sentence can name
LETTERS = 15  # an inch, in the heading of a picture


def experiment_named(experiments: Mapping[str, E], name: str | None, listed: str = "--list") -> E:
    """The experiment of that name; `listed` is what tells of them all.

    Raises:
        ValueError: no such experiment, or no name.
    """
    few = len(experiments) <= FEW
    if name is None:
        names = f": {', '.join(experiments)}" if few else ""
        raise ValueError(f"Name an experiment{names} ({listed} tells what each is).")
    if name not in experiments:
        near = difflib.get_close_matches(name, experiments, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        choice = f"choose {', '.join(experiments)}" if few else f"{listed} tells them all"
        raise ValueError(f"There is no experiment {name!r}: {choice}.{hint}")
    return experiments[name]


def write_json(findings: Findings, about: dict[str, Any], folder: Path, group: str) -> Path:
    """Write bench-GROUP-EXPERIMENT.json (bench-GROUP.json of a group that is one experiment) into `folder`; returns its
    path. Every row says where it was made.
    """
    made = {key: about[key] for key in ("commit", "device", "dtype", "threads", "command")}
    result = {"about": about, "rows": [row | made for row in findings.rows]} | findings.more
    path = folder / f"{_stem(group, about)}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def write_png(findings: Findings, about: dict[str, Any], folder: Path, group: str) -> Path:
    """Draw a picture of the same name, .png, into `folder`; returns its path. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=findings.size, layout="constrained")
    FigureCanvasAgg(figure)
    findings.draw(figure)
    figure.suptitle(textwrap.fill(heading(about), int(LETTERS * findings.size[0])), fontsize=8, color="0.35")
    path = folder / f"{_stem(group, about)}.png"
    figure.savefig(path, dpi=140)
    return path


def heading(about: dict[str, Any]) -> str:
    """Where and how a result was made, in a line."""
    return (
        f"{about['model']}, {about['dtype']}, {about['threads']} threads of {about['device']}; {about['prompts']} "
        f"prompts of {len(about['sets'])} sets; commit {about['commit'] or 'unknown'}"
    )


def _stem(group: str, about: dict[str, Any]) -> str:
    return "-".join(["bench", group, *filter(None, [about.get("experiment")])])
