"""The compiled layers as on a processor with narrower registers than this one's."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftree import native
from draftree.native import load_library


def limited_to(widest: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a fixture: a copy of the library, which computes with registers of at most so many floats meanwhile."""
    other = shutil.copy(native.LIBRARY, folder)  # under another name it has statics of its own
    monkeypatch.setattr(native, "library", lambda: ctypes.CDLL(os.fspath(other)))
    monkeypatch.setattr(native, "WIDEST", widest)
    load_library.cache_clear()
    yield
    load_library.cache_clear()
