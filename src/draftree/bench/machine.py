"""Describe where and how a measurement was made, for every row of a result file."""

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

from draftree import __version__
from draftree.runner.step_cost import chip_name

MADE = ("commit", "device", "dtype", "threads", "command")  # Facts in every row of a result file.


def now() -> str:
    """Return the time in UTC, to the second, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit() -> str | None:
    """Return the commit of the sources, with '+changes' if tracked files differ from it; None outside a clone."""
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+changes"]
    try:
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip() or None
    except OSError:  # There is no git.
        return None


def describe(model: Any, name: str | None) -> dict[str, Any]:
    """Return commit, device, dtype, threads, command and versions for `model` called `name` (None: the embedded one).

    `model` None means that no model was run; the device is then the processor.
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
    """Return an argument with an absolute path shortened to its last part."""
    option, sign, value = argument.rpartition("=")  # Of --option=PATH, or NAME=PATH of --set and --drafter.
    return f"{option}{sign}{Path(value).name}" if value.startswith(("/", "~")) else argument
