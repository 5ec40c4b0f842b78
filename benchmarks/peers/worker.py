"""The engine's end of the pipe: a process that loads a model and answers prompts, a line of JSON each way.

Needs nothing but Python, as every engine has an environment of its own. The first line that comes is a `Job`; the first
one that goes back is {"version", "ways", "left_out": {way: why}, "batches"}. Then {"way", "prompts"} is answered by
{"answers", "seconds", "peak_bytes"}, or by {"error"}. A way is made ready when it is first named; that is not timed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COLD = "lookahead-cold"  # the way with a trie that has seen nothing yet
Ids = list[int]
Ask = Callable[[list[Ids]], list[Ids]]  # prompts to new tokens, one answer for each


@dataclass(frozen=True)
class Job:
    """What an engine is given."""

    folder: str  # of the model, as Hugging Face saved it
    gguf: str  # the file that the model was loaded from; "" for none
    draft: str  # folder of a small model that drafts; "" for none
    dtype: str  # "float32" or "bfloat16"
    int8: bool  # whether weights are kept in 8 bits, by the engine's own means
    threads: int  # of the CPU
    new: int  # most tokens of an answer
    ends: tuple[int, ...]  # EOS tokens
    work: str  # folder for converted weights
    drafters: dict[str, str] = field(default_factory=dict)  # folders of trained drafters by name, for draftree
    texts: list[Ids] = field(default_factory=list)  # answers to other prompts, for a trie to have seen


@dataclass
class Peer:
    """An engine that has loaded its model."""

    version: str  # of the engine
    ways: Mapping[str, Callable[[], Ask]]  # what makes each way of decoding ready, by its name; "plain" comes first
    left_out: dict[str, str] = field(default_factory=dict)  # why others cannot be measured
    batches: bool = False  # whether it answers several prompts together


def serve(make: Callable[[Job], Peer]) -> None:
    """Answer what comes on standard input until it ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints is no reply

    def reply(**facts: Any) -> None:
        replies.write(json.dumps(facts) + "\n")
        replies.flush()

    given = json.loads(sys.stdin.readline())
    job = Job(**{**given, "ends": tuple(given["ends"])})
    Path(job.work).mkdir(parents=True, exist_ok=True)
    peer = make(job)
    reply(version=peer.version, ways=list(peer.ways), left_out=peer.left_out, batches=peer.batches)
    ready: dict[str, Ask] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        way = asked["way"]
        try:
            if way not in ready:
                ready[way] = peer.ways[way]()
            begin = time.perf_counter()
            answers = ready[way](asked["prompts"]) if asked["prompts"] else []
            seconds = time.perf_counter() - begin
        except Exception as error:  # an engine of others: whatever it raises is told, and the others go on
            reply(error=f"{type(error).__name__}: {error}".splitlines()[0])
            continue
        reply(answers=[cut(ids, job) for ids in answers], seconds=seconds, peak_bytes=peak_bytes())


def cut(ids: Ids, job: Job) -> Ids:
    """Return an answer up to its EOS, and no longer than asked."""
    ids = list(ids)[: job.new]
    end = next((i for i, token in enumerate(ids) if token in job.ends), len(ids) - 1)
    return ids[: end + 1]


def convert_apart(module: str, *arguments: str) -> None:
    """Run a module that converts weights in a process of its own, whose memory is not that of decoding.

    Where it fails, a RuntimeError has the last line that it said.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"its weights could not be converted: {(done.stderr.strip().splitlines() or ['?'])[-1]}")


def asking(method: Any) -> Ask:
    """Return a function that asks one of `draftree.bench.methods`."""
    return lambda prompts: [answer.ids for answer in method.answers(prompts)]


def peak_bytes() -> int:
    """Return the most memory that this process has had resident; 0 where the system does not say."""
    try:  # a process begins with the peak of the one that started it, by `getrusage`
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    except OSError:
        return 0
    return int(status["VmHWM"].split()[0]) * 1024


def leave(make: Callable[[Job], Peer]) -> None:
    """`serve`, and one line on standard error for what goes wrong before the first reply."""
    try:
        serve(make)
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
