"""Tests of source files: one test looks at all files and names each that fails; one a file would be two thousand."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path


def of_every(files: Iterable[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Makes a check of one file a test of all `files`."""
    chosen = list(files)

    def made(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            failed = []
            for path in chosen:
                try:
                    check(path)
                except AssertionError as error:
                    failed.append(f"{path}: {error}")
            assert not failed, "\n".join(failed)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return made


@cache
def tree_of(path: Path) -> ast.Module:
    """The parsed source; tests leave it as it is."""
    return ast.parse(path.read_text(encoding="utf-8"))
