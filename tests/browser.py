"""A headless Chromium, where one is installed: what a page says on its console, what it holds, a picture."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


@dataclass(frozen=True)
class Look:
    """What a browser found: messages on the console, the document as it stands after loading, a PNG file."""

    console: list[str]
    dom: str
    picture: Path


def look_at(page: Path, folder: Path, width: int = 1280, height: int = 900) -> Look:
    """Load the file `page` in a window of `width` x `height`; the picture goes into `folder`."""
    picture = folder / f"{page.stem}-{width}.png"
    shot = _run(folder, width, height, f"--screenshot={picture}", page.as_uri())
    dom = _run(folder, width, height, "--dump-dom", page.as_uri())
    console = re.findall(r"CONSOLE[^\]]*\] (.*)", shot.stderr + dom.stderr)
    return Look(console, dom.stdout, picture)


def _run(folder: Path, width: int, height: int, *arguments: str) -> subprocess.CompletedProcess:
    command = [
        CHROMIUM,
        *FLAGS,
        "--enable-logging=stderr",
        "--virtual-time-budget=2000",
        f"--user-data-dir={folder / 'chromium'}",
        f"--window-size={width},{height}",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
