"""draftree and the engines that people would pick instead, taking turns prompt by prompt: ids in, ids out.

Each engine is a process in an environment of its own (`environments`), which loads the same weights from one folder and
decodes in all its ways. An engine that does not install, load or answer is left out, and the table says why. Whole
answers are measured, prompts and first calls included; every answer is compared with Hugging Face's.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.harness import PLAIN, Experiment, Setup, Share, Way, bars, table_of
from benchmarks.harness.comparisons import ANSWERS, CLAIMED, rows_of
from benchmarks.harness.measure import measure, of, whole
from benchmarks.peers.environments import EIGHT_BITS, ENVIRONMENTS, ROOT, python_of
from benchmarks.peers.worker import COLD, Ids, Job
from draftree.bench.methods import Answer
from draftree.checkpoints import free_bytes, is_gguf
from draftree.drafting import DraftModel
from draftree.drafting.folder import base_of
from draftree.engine.limits import eos_token_ids

GRACE = 60.0  # seconds for a process to end
ROOM = 4  # times the model's weights that must be free before one more way is made ready: a machine that swaps is none
NO_ROOM = "too little memory is left beside the other engines (give fewer: --set engines=)"
OWN, REFERENCE = "draftree", "hugging_face"


class Process:
    """An engine in a process of its own."""

    def __init__(self, engine: str, job: Job, stack: ExitStack) -> None:
        self.engine, self._work = engine, Path(job.work).parent
        self.plain_peak = 0  # bytes, the most memory that it had had resident after its first plain answers
        said = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))  # noqa: SIM115 -- the stack closes it
        environment = EIGHT_BITS if job.int8 and engine in (OWN, REFERENCE) else engine
        command = [str(python_of(environment)), "-m", f"benchmarks.peers.engines.{engine}"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": said}
        alike = {**os.environ, "OMP_NUM_THREADS": str(job.threads)}
        self._process = stack.enter_context(subprocess.Popen(command, cwd=ROOT, env=alike, text=True, **pipes))
        stack.callback(self._process.kill)
        try:
            self.facts = self._ask(asdict(job))  # "version", "ways", "left_out", "batches"
        except EOFError:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)  # it closes its end of the pipe before it says why
            said.seek(0)
            lines = [line for line in said.read().strip().splitlines() if line.strip()]
            raise RuntimeError(lines[-1].strip() if lines else "it ended without a word") from None
        self.troubles: dict[str, str] = self.facts["left_out"]  # why a way is left out, by name

    def ask(self, way: str, prompts: Sequence[Ids]) -> list[Answer]:
        """Answer prompts together; nothing, from then on, where it cannot."""
        if way in self.troubles:
            return []
        try:
            reply = self.reply(way, prompts)
        except RuntimeError as why:
            self.troubles[way] = str(why).replace(f"{self._work}/", "")  # a folder that is gone with the run
            return []
        return [Answer(ids, reply["seconds"] / len(prompts)) for ids in reply["answers"]]

    def reply(self, way: str, prompts: Sequence[Ids]) -> dict[str, Any]:
        """Return the answers to prompts together; raise a RuntimeError if it cannot answer."""
        try:
            reply = self._ask({"way": way, "prompts": [list(ids) for ids in prompts]})
        except (EOFError, BrokenPipeError):
            raise RuntimeError("its process has ended") from None
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply

    def _ask(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Return a line of JSON there and one back; raise a EOFError if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(facts) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise EOFError
        return json.loads(line)


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Tokens a second of whole answers by draftree and by other engines, in all their ways of decoding."""
    known = PEERS.options["engines"]
    unknown = [engine for engine in setup["engines"] if engine not in known]
    if unknown:
        raise ValueError(f"There is no engine {unknown[0]!r}: choose from {', '.join(known)}.")
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        job = job_of(setup, work, left_out)
        processes = []
        setup.watcher.stage("loading engines", len(setup["engines"]))
        for engine in setup["engines"]:
            try:
                process = Process(engine, job, stack)
                if setup["batch"] > 1 and not process.facts["batches"]:
                    raise RuntimeError("it answers one prompt at a time")
                process.plain_peak = process.reply(PLAIN, setup.lessons[: setup["batch"]])["peak_bytes"]
                processes.append(process)
            except RuntimeError as why:
                left_out[engine] = str(why)
            setup.watcher.step()
        need = ROOM * sum(weight.nbytes for weight in setup.model.parameters())
        for process in processes:
            for way in process.facts["ways"]:
                free = free_bytes(torch.device("cpu"))
                if free is not None and free < need and way != PLAIN:
                    process.troubles[way] = NO_ROOM
                process.ask(way, [])  # what cannot be made ready is found before anything is measured
        ways = {
            f"{process.engine} {way}": Way(f"{process.engine} {way}", ask=partial(process.ask, way))
            for process in processes
            for way in process.facts["ways"]
        }
        if not ways:
            reasons = "; ".join(f"{engine}: {reason}" for engine, reason in left_out.items())
            raise ValueError(f"No engine can be measured. {reasons}.")
        runs = measure(setup, list(ways.values()), batch=setup["batch"])
        yield table(runs, processes, left_out)


def table(runs: pd.DataFrame, processes: Sequence[Process], left_out: dict[str, str]) -> pd.DataFrame:
    """Return a row for each way that has answered everything."""
    remarks = [f"{engine} is left out: {why}." for engine, why in left_out.items()]
    answered = []
    for process in processes:
        answered += [(process, way) for way in process.facts["ways"] if way not in process.troubles]
        remarks += [f"{process.engine} {way} is left out: {why}." for way, why in process.troubles.items()]
    times = {(one.engine, way): whole(of(runs, f"{one.engine} {way}")) for one, way in answered}
    base = next(name for name in ((REFERENCE, PLAIN), (OWN, PLAIN), *times) if name in times)
    expected = answers_of(runs, base)
    rows = []
    for process, way in answered:
        name = (process.engine, way)
        speed = Share(times[name].under, times[name].over)
        row = {"engine": process.engine, "version": process.facts["version"], "way": way}
        row |= speed.columns("tokens_a_second")
        if base[0] == REFERENCE:
            row |= (times[base] / times[name]).columns("over_hf")
        peers = [peer for peer in times if peer[0] != OWN and (way != PLAIN or peer[1].startswith(PLAIN))]
        if process.engine == OWN and peers:
            best = min(peers, key=lambda peer: times[peer].value)
            row |= (times[best] / times[name]).columns("over_best_peer") | {"best_peer": " ".join(best)}
        row["differing"] = sum(a != b for a, b in zip(answers_of(runs, name), expected, strict=True))
        row["answers"] = len(expected)
        if way == PLAIN:
            row["peak_gb"] = process.plain_peak / 1e9
        rows.append(row)
    claims = _claims(times)
    return table_of(rows, remarks=remarks, tables={CLAIMED: rows_of(claims)} if claims else {})


def _claims(times: Mapping[tuple[str, str], Share]) -> list[tuple[str, str, str, str, Share]]:
    """Return the claims of Lookahead's Table 8: vLLM with a trie's drafts over vLLM without."""
    above, below = ("vllm", COLD), ("vllm", PLAIN)
    if not {above, below} <= set(times):
        return []
    return [("lookahead-vllm", " ".join(above), " ".join(below), ANSWERS, times[below] / times[above])]


def answers_of(runs: pd.DataFrame, name: tuple[str, str]) -> list[Ids]:
    """Return all answers of one way, in the order of the prompts."""
    return [ids for group in runs[runs["way"] == " ".join(name)]["ids"] for ids in group]


def job_of(setup: Setup, work: Path, left_out: dict[str, str]) -> Job:
    """Return the job of every engine; the model, its small model and its drafters are saved below `work`.

    A drafter that does not fit the model is put into `left_out`.
    """
    model = setup.model
    folder = work / "model"
    setup.save(model, folder)
    drafters, draft = {}, ""
    for name in setup["drafters"]:
        try:
            drafter = setup.trained(name)
        except ValueError as why:
            left_out[f"drafter {name}"] = str(why).rstrip(".").replace(f"{ROOT}/", "")
            continue
        if isinstance(drafter, DraftModel):
            setup.save(drafter.model.to(model.dtype), work / name)
            draft = str(work / name)
        else:
            drafters[name] = str(work / name)
            drafter.base = base_of(model)  # an inflated one belongs to none yet
            drafter.save_pretrained(drafters[name])
    return Job(
        folder=str(folder),
        gguf=setup.name if setup.name and is_gguf(setup.name) else "",
        draft=draft,
        dtype=str(model.dtype).removeprefix("torch."),
        int8=setup["int8"],
        threads=torch.get_num_threads(),
        new=setup["max_new_tokens"],
        ends=tuple(eos_token_ids(model)),
        work=str(work / "converted"),
        drafters=drafters,
        texts=setup.texts,
    )


PEERS = Experiment(
    run,
    (*("engine", "version", "way", "tokens_a_second", "over_hf", "over_best_peer"), *("differing", "peak_gb")),
    bars("tokens_a_second", label=("engine", "way"), mark=None),
    {
        **{"per_set": 1, "max_new_tokens": 48, "warm_per_set": 4, "sets": (), "batch": 1, "int8": False},
        **{
            "engines": tuple(name for name in ENVIRONMENTS if name != EIGHT_BITS),
            "drafters": ("draft-model", "medusa"),
        },
    },
    name="peers",
)
EXPERIMENTS = (PEERS, PEERS.of_paper("Lookahead", "Table 8", engines=("hugging_face", "vllm", "draftree")))
