"""Answers by Ray Data's actor pool: two workers, one of them killed midway, and every question is there once."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

from draftree.training.answers import AnswerOptions
from draftree.training.questions import Template
from draftree.training.ray_answers import RayAnswers

RUN = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import draftree
from draftree.training.answers import AnswerOptions, make_data
from draftree.training.questions import Question, Template
from draftree.training.ray_answers import RayAnswers
if __name__ == "__main__":
    model, tokenizer = draftree.demo_model()
    template, options = Template("full", tokenizer), AnswerOptions(max_new_tokens=24, slots=2)
    questions = [Question(i, f"q-{i}", "s", (f"List {i + 1} files of folder {i}.", "And then?")) for i in range(40)]
    answer = RayAnswers(None, template, options, 2, 1) if sys.argv[2] == "ray" else None
    make_data(model, tokenizer, questions, Path(sys.argv[1]), template=template, options=options, answer=answer,
              progress=lambda done, total, tokens: print(done, flush=True))
"""


def test_more_workers_need_ray(demo, monkeypatch):
    monkeypatch.setattr("draftree.training.ray_answers.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[ray\]'"):
        RayAnswers(None, Template("short", demo.tokenizer), AnswerOptions(), 2)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_a_killed_worker_loses_and_doubles_nothing(tmp_path):
    script = tmp_path / "answer.py"
    script.write_text(RUN)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "ray"), "ray"], env=env, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()  # the first handful has come back, so workers are at work
    killed = _kill_one_worker(process.pid)
    out, _ = process.communicate(timeout=280)
    assert process.returncode == 0, out[-2000:]
    assert killed, "there was a worker to kill"
    alone = subprocess.run([sys.executable, str(script), str(tmp_path / "alone"), "alone"], env=env, timeout=200)
    assert alone.returncode == 0
    ray, plain = (
        [json.loads(line) for line in (tmp_path / name / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("ray", "alone")
    )
    assert ray == plain
    assert len(ray) == 80


def _kill_one_worker(driver: int) -> bool:
    """SIGKILL one worker process of the pool below `driver`; False where none was found in time."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for pid in _descendants(driver):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as line:
                    name = line.read()
            except OSError:
                continue
            if b"MapWorker" in name or b"_Worker" in name:
                os.kill(pid, signal.SIGKILL)
                return True
        time.sleep(0.02)
    return False


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as stat:
                    parents.setdefault(int(stat.read().rsplit(")", 1)[1].split()[1]), []).append(int(entry))
            except OSError:
                continue
    found, open_ids = [], [pid]
    while open_ids:
        children = parents.get(open_ids.pop(), [])
        found += children
        open_ids += children
    return found
