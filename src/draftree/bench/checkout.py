"""Finds what lies in the folder `benchmarks` of a checkout of draftree and not in its wheel."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

# Files that a checkout has and other folders lack.
MARKS = ("benchmarks/harness/command.py", "src/draftree/__init__.py")
EXPERIMENTS = "The experiments are not part of the installed package: clone draftree's repository and call this there."
INFLATION = (
    "Inflating a model is not part of the installed package: clone draftree's repository and call this there, or "
    "measure the model as it is."
)
AGREEMENT = "Comparing results is not part of the installed package: clone draftree's repository and call this there."


def find_checkout(*starts: Path) -> Path | None:
    """The nearest folder at or above one of `starts` that is a checkout of draftree; None where there is none."""
    folders = (folder for start in starts for folder in (start, *start.parents))
    return next((folder for folder in folders if all((folder / mark).is_file() for mark in MARKS)), None)


def experiments() -> ModuleType:
    """`benchmarks.harness.command`.

    Raises:
        ValueError: there is no checkout, or a package that the experiments need is missing.
    """
    return _load("benchmarks.harness.command", EXPERIMENTS)


def inflation() -> ModuleType:
    """`benchmarks.inflate`.

    Raises:
        ValueError: there is no checkout.
    """
    return _load("benchmarks.inflate", INFLATION)


def agreement() -> ModuleType:
    """`benchmarks.agree`.

    Raises:
        ValueError: there is no checkout.
    """
    return _load("benchmarks.agree", AGREEMENT)


def _load(name: str, missing: str) -> ModuleType:
    """A module of the checkout that the working folder or the package lies in; without one `missing` is raised."""
    root = find_checkout(Path.cwd().absolute(), Path(__file__).absolute().parent)
    if root is None:
        raise ValueError(missing)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("benchmarks", "draftree"):
            raise
        raise ValueError(f"The experiments need {error.name}: pip install 'draftree[bench]'.") from error
