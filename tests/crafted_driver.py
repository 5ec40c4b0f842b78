"""Loads crafted files, each in a process of its own under limits; for tests/models/test_crafted_files.py.

Each case is a fork, so that a crash, an endless loop or too much memory is the end of that case alone. The files come
from crafted_formats.py.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import tempfile
from pathlib import Path

from crafted_formats import FORMATS

SECONDS = 20  # of a case, at most
MEMORY = 500 << 20  # bytes that a case may map more than there were before


def outcome(use, folder):
    """What became of one case, in this process: "loaded", "refused" with the sentence, or what went wrong."""
    try:
        use(folder)
    except ValueError as error:
        text = str(error)
        fine = str(folder) in text and "\n" not in text and text.endswith((".", "?")) and len(text) < 1000
        return "refused" if fine else "not a sentence on the file", text[:400]
    except MemoryError:
        return "memory", ""
    except BaseException as error:
        return type(error).__name__, str(error)[:400]
    return "loaded", ""


def case(format_name, made, seed):
    """One case in a fork of this process; (outcome, what was said)."""
    _, change, use = FORMATS[format_name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "files")
        shutil.copytree(made, folder)
        change(random.Random(seed), folder)
        answer = Path(scratch, "answer")
        child = os.fork()
        if child == 0:
            try:
                mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
                for shown in (1, 2):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), shown)  # what is shown is of no interest
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's own limit of time has a handler
                signal.alarm(SECONDS)
                answer.write_text(json.dumps(outcome(use, folder)))
            finally:
                os._exit(0)  # a fork of a test must never go on as one
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return "hung" if number == signal.SIGALRM else "crashed", signal.Signals(number).name
        return json.loads(answer.read_text()) if answer.exists() else ("no answer", "")


def outcomes(format_name, seed, cases):
    """(outcome, what was said) of each case."""
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch)
        FORMATS[format_name][0](made)
        return [case(format_name, made, f"{format_name} {seed} {number}") for number in range(cases)]
