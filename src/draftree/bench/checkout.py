"""Finds what lies in the folder `benchmarks` of a checkout of draftree and not in its wheel."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from draftree.errors import install

# Files that a checkout has and other folders lack.
MARKS = ("benchmarks/harness/command.py", "src/draftree/__init__.py")
WHAT = {"harness.command": "The experiments are", "inflate": "Inflating a model is", "agree": "Comparing results is"}


def find_checkout(*starts: Path) -> Path | None:
    """The nearest folder at or above one of `starts` that is a checkout of draftree; None where there is none."""
    folders = (folder for start in starts for folder in (start, *start.parents))
    return next((folder for folder in folders if all((folder / mark).is_file() for mark in MARKS)), None)


def from_checkout(name: str) -> ModuleType:
    """The module `name` of `WHAT`, in `benchmarks` of the checkout that the working folder or the package lies in.

    Raises:
        ValueError: there is no checkout, or a package that the experiments need is missing.
    """
    root = find_checkout(Path.cwd().absolute(), Path(__file__).absolute().parent)
    if root is None:
        raise ValueError(
            f"{WHAT[name]} not part of the installed package: clone draftree's repository and call this there."
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        return importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("benchmarks", "draftree"):
            raise
        raise ValueError(f"The experiments need {error.name}: {install('bench')}.") from error
