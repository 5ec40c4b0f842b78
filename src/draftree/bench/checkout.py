"""Finds the experiments: the folder `benchmarks` of a checkout of draftree, which is not in the wheel."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

MARKS = (
    "benchmarks/harness/command.py",
    "src/draftree/__init__.py",
)  # files that a checkout has and other folders lack


def find_checkout(*starts: Path) -> Path | None:
    """The nearest folder at or above one of `starts` that is a checkout of draftree; None where there is none."""
    folders = (folder for start in starts for folder in (start, *start.parents))
    return next((folder for folder in folders if all((folder / mark).is_file() for mark in MARKS)), None)


def experiments() -> ModuleType:
    """`benchmarks.harness.command` of the checkout that the working folder or the package lies in.

    Raises:
        ValueError: there is no checkout, or a package that the experiments need is missing.
    """
    root = find_checkout(Path.cwd().absolute(), Path(__file__).absolute().parent)
    if root is None:
        raise ValueError(
            "The experiments are not part of the installed package: clone draftree's repository and call draftree "
            "bench run from there."
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        return importlib.import_module("benchmarks.harness.command")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("benchmarks", "draftree"):
            raise
        raise ValueError(f"The experiments need {error.name}: pip install 'draftree[bench]'.") from error
