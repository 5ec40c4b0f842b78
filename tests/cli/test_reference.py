"""docs/cli.md is up to date, and does not depend on the terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("settings", [{"COLUMNS": "30", "TERM": "dumb"}, {"COLUMNS": "300", "FORCE_COLOR": "1"}])
def test_the_page_is_up_to_date(settings: dict[str, str]) -> None:
    """The width and the colours of the terminal change nothing."""
    code = "import sys; from cli_reference import page; sys.stdout.buffer.write(page().encode())"
    environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join([str(DOCS), *sys.path])}
    written = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout
    assert written.decode() == (DOCS / "cli.md").read_text(encoding="utf-8"), "run `make docs`"
