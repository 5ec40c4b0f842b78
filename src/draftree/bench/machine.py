"""Where and how a measurement was made: what every row of a result file has to say about itself."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers

from draftree.runner.step_cost import chip_name
from draftree.version import __version__

MADE = ("commit", "device", "dtype", "threads", "command")  # what every row of a result file says


def now() -> str:
    """The time, UTC, to the second, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit() -> str | None:
    """The commit of the sources in use, with '+changes' where files differ from it; None outside a clone."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        found = git("rev-parse", "--short=12", "HEAD")
        if not found:
            return None
        return found + ("+changes" if git("status", "--porcelain", "--untracked-files=no", "--", ":/src") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def describe(model: Any, name: str | None) -> dict[str, Any]:
    """Commit, device, dtype, threads, command and versions, for `model` called `name` (None: the embedded one).

    Where `model` is None, nothing was run on one, and the device is the processor.
    """
    device = torch.device("cpu") if model is None else model.device
    return {
        "commit": commit(),
        "command": shlex.join(["draftree", *(_shown(argument) for argument in sys.argv[1:])]),
        "model": "no model" if model is None else _shown(name) if name else "embedded chat-4m",
        "device": chip_name(device),
        "device_type": device.type,
        "dtype": "" if model is None else str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": {
            "draftree": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": numpy.__version__,
        },
    }


def _shown(argument: str) -> str:
    """An argument as a result file shows it: the last part of an absolute path, which says nothing elsewhere."""
    option, sign, value = argument.rpartition("=")  # --option=PATH, and the NAME=PATH of --set and --drafter
    return f"{option}{sign}{Path(value).name}" if value.startswith(("/", "~")) else argument
