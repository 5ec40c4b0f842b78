"""Answers by Ray Data's actor pool equal those of one process."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from draftree.training.answers import AnswerOptions, RayAnswers

RUN = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import draftree
from draftree.training.answers import AnswerOptions, make_data
from draftree.training.options import Question, Template
from draftree.training.answers import RayAnswers
if __name__ == "__main__":
    model, tokenizer = draftree.demo_model()
    template, options = Template("full", tokenizer), AnswerOptions(max_new_tokens=24, slots=2)
    questions = [Question(i, f"q-{i}", "s", (f"List {i + 1} files of folder {i}.", "And then?")) for i in range(40)]
    answer = RayAnswers(None, options, 2, 1) if sys.argv[2] == "ray" else None
    make_data(model, tokenizer, questions, Path(sys.argv[1]), template=template, options=options, answer=answer)
"""


def test_more_workers_need_ray(demo, monkeypatch):
    monkeypatch.setattr("draftree.training.answers.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[ray\]'"):
        RayAnswers(None, AnswerOptions(), 2)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_two_workers_make_the_data_of_one_process(tmp_path):
    script = tmp_path / "answer.py"
    script.write_text(RUN)
    for kind in ("ray", "alone"):
        command = [sys.executable, str(script), str(tmp_path / kind), kind]
        assert subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=280).returncode == 0
    ray, alone = ((tmp_path / name / "rows.jsonl").read_text(encoding="utf-8") for name in ("ray", "alone"))
    assert ray == alone
    assert len(ray.splitlines()) == 80
