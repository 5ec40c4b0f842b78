"""`draftree bench run` and `draftree bench list`, as the command line calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.harness.experiment import Experiment, experiments, find
from benchmarks.harness.report import Report
from benchmarks.harness.setup import Setup
from draftree.bench.report import Table, describe, now
from draftree.checkpoints import Placement
from draftree.prompts import Prompt, Watcher, embedded_prompts


def listed(name: str | None = None) -> Table:
    """Return all experiments; or the options of one and their defaults, as `draftree bench list` shows them."""
    if name is None:
        rows = [
            {"name": e.name, "in the papers": ": ".join(filter(None, [e.source, e.claim.of if e.claim else ""]))}
            | {"what runs": e.says, "what it needs": e.needs}
            for e in experiments().values()
        ]
        return Table("", rows, ("name", "in the papers", "what runs", "what it needs"))
    options = []
    for option, value in find(name).options.items():
        given = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        options.append({"option": option, "default": given})
    return Table("", options, ("option", "default"))


def given_options(settings: Sequence[str], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options: those of NAME=VALUE, and those with a name of their own on the command line.

    Raises:
        ValueError: a setting without a name or value.
    """
    found = {name: value for name, value in named.items() if value not in (None, (), [])}
    for setting in settings:
        name, sign, value = setting.partition("=")
        if not name or not sign:
            raise ValueError(f"--set is {setting!r}: give NAME=VALUE.")
        found[name.replace("-", "_")] = value
    return found


def run(
    experiment: Experiment,
    given: Mapping[str, Any],
    *,
    model: str | None = None,
    params: str | None = None,
    placement: Placement | None = None,
    prompts: Sequence[Prompt] | None = None,
    watcher: Watcher | None = None,
    out: Path | None = None,
) -> Report:
    """Run an experiment.

    Args:
        experiment: which.
        given: options in place of its defaults.
        model: folder or hub name; None for the embedded one.
        params: inflate it to about so many parameters; None for the model itself.
        placement: device and type of the model; None for the defaults.
        prompts: to measure on; the package's where there are none.
        watcher: shows progress.
        out: folder for what an experiment trains or makes; None for a temporary one.

    Raises:
        ValueError: an option, model or drafter that does not fit, before any work.
    """
    options = experiment.configured(given)
    given_prompts = embedded_prompts() if prompts is None else prompts
    setup = Setup(options, model, params, given_prompts, watcher or Watcher(), out, placement)
    started, table = now(), pd.DataFrame()
    for made in experiment.run(setup):
        table = made
    return Report(experiment, table, _about(experiment, setup, table) | {"started": started, "finished": now()})


def _about(experiment: Experiment, setup: Setup, table: pd.DataFrame) -> dict[str, Any]:
    """Return where and how a table was made."""
    used = vars(setup).get("inflated") or vars(setup).get("subject")  # some experiments need no model
    about = (describe(None, setup.name) if used is None else used.about()) | {"options": _plain(setup.options)}
    if "encoded" in vars(setup):
        about |= {"prompts": len(setup.tasks), "sets": setup.sets}
    return about | table.attrs.get("about", {})


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as a result file shows them: of drafters their names, and not where they lie."""
    shown = dict(options)
    if shown.get("drafters"):
        shown["drafters"] = [Path(entry.partition("=")[0]).name for entry in shown["drafters"]]
    return {name: Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value
            for name, value in shown.items()}  # fmt: skip
