"""A call in a fork of the test, for what needs a process of its own: a new one would import torch for seconds."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

SECONDS = 120  # that a fork may take


class Done(NamedTuple):
    status: int  # below 0 where a signal ended it
    out: str
    err: str


def forked(call: Callable[[], Any]) -> Done:
    """What becomes of `call` in a fork whose standard output and error are pipes."""
    pipes = [os.pipe(), os.pipe()]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's own limit of time has a handler
            signal.alarm(SECONDS)
            for number, (_, end) in enumerate(pipes, 1):
                os.dup2(end, number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            try:
                call()
                status = 0
            except SystemExit as done:
                status = done.code if isinstance(done.code, int) else int(done.code is not None)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)  # a fork of a test must never go on as one
    told = []
    for _, end in pipes:
        os.close(end)
    for begin, _ in pipes:  # one after the other, as neither is long enough to fill its pipe
        with os.fdopen(begin) as pipe:
            told.append(pipe.read())
    _, status = os.waitpid(child, 0)
    return Done(os.waitstatus_to_exitcode(status), *told)
