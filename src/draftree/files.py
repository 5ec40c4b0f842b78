"""How files are written and read: a user's file is replaced whole or not at all, and a damaged one is refused.

Everything that draftree writes over a file of the user's goes through `replacing` or `replacing_files`, but for lines
that are written as they come (the answers of `generate --out`, journals): the new content is written to a temporary
folder, brought to the disk, and renamed. A full disk, an error or a kill leaves the old file as it was.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MOST_JSON = 16 << 20  # bytes of a configuration or a tuned choice
PREFIX = ".draftree-"  # of the folders in which new files are written; only a kill leaves one behind


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Where to write what replaces the file `path` when the block ends, and is removed where it raises.

    A link is followed. What is no regular file, such as /dev/null or a pipe, is written to directly.

    Raises:
        OSError: of the disk; then `path` is as it was.
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
    """An empty folder whose files and folders, when the block ends, replace those of the same names in `folder`.

    All of them are on the disk before the first one is renamed, in the order of their names. Where the block raises,
    none is.

    Raises:
        OSError: of the disk.
    """
    temporary = Path(tempfile.mkdtemp(dir=folder, prefix=PREFIX))
    try:
        yield temporary
        for found in [*temporary.rglob("*"), temporary]:
            _to_disk(found)
        for new in sorted(temporary.iterdir()):
            old = folder / new.name
            if old.is_file():
                new.chmod(stat.S_IMODE(old.stat().st_mode))
            elif new.is_dir():
                shutil.rmtree(old, ignore_errors=True)  # a folder takes the place of an empty one alone
            os.replace(new, old)
        _to_disk(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace the file `path` by `text`, in UTF-8; see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Replace the file `path` by plain values, for people to read too; see `replacing`."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file to read it; refuse pipes and devices, which may never end.

    Raises:
        ValueError: it is not a regular file.
        OSError: there is no such file, or it cannot be read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{os.fspath(path)} is not a regular file: give one on a disk.")
    return open(path, "rb")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the value of a small JSON file.

    Raises:
        ValueError: not a regular file, one of more than `MOST_JSON` bytes, or no JSON.
        OSError: there is no such file, or it cannot be read.
    """
    with open_regular(path) as file:
        data = file.read(MOST_JSON + 1)
    if len(data) > MOST_JSON:
        raise ValueError(f"{os.fspath(path)} has more than {MOST_JSON} bytes")
    return parse_json(data)


def parse_json(data: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, in whatever way: bytes that are no UTF-8, values nested deeper than Python can go,
            numbers that are infinite or none.
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


def is_whole(value: Any, low: int = 0, high: int = 2**63 - 1) -> bool:
    """Whether a value of a JSON file is a whole number from `low` to `high`."""
    return type(value) is int and low <= value <= high


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
