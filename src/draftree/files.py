"""Write and read small files: a user's file is replaced whole, or stays as it was."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PREFIX = ".draftree-"  # Of the temporary folders.


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path, which replaces the file `path` at the end of the block unless that raises.

    Devices and pipes are written to directly.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        yield path
        return
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent} for {path.name}: make it, or name another.")
    with replacing_files(path.parent) as temporary:
        yield temporary / path.name


@contextlib.contextmanager
def replacing_files(folder: Path) -> Iterator[Path]:
    """Yield an empty folder, whose files and folders replace those in `folder` at the end unless the block raises."""
    temporary = Path(tempfile.mkdtemp(dir=folder, prefix=PREFIX))
    try:
        yield temporary
        for new in sorted(temporary.iterdir()):
            if new.is_dir():
                shutil.rmtree(folder / new.name, ignore_errors=True)
            os.replace(new, folder / new.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace the file `path` by `text`, in UTF-8."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Replace the file `path` by JSON."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the value of a JSON file.

    Raises:
        ValueError: the file is not JSON.
        OSError: there is no such file, or it cannot be read.
    """
    return parse_json(Path(path).read_bytes())


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, or has infinite numbers or NaN.
    """
    try:
        return json.loads(data.decode("utf-8"), parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no number")
    return value
