"""The results page is what the result files say, every one of them names where it was made, and a run's file becomes
one."""

from __future__ import annotations

import json

import pytest

from benchmarks import report
from benchmarks.harness.command import run
from benchmarks.harness.experiment import find


def test_the_page_is_made_of_the_files_and_short():
    text = report.PAGE.read_text(encoding="utf-8")
    assert text == report.page(report.read()), "make results"
    assert text.count("\n") <= 200
    for facts in report.read():
        assert facts["about"]["commit"] in text


def test_every_result_says_where_it_was_made():
    for path in report.RESULTS.glob("*.json"):
        about = json.loads(path.read_text(encoding="utf-8"))["about"]
        assert all(about[name] for name in report.ABOUT), path.name


def test_a_result_without_a_commit_is_refused(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"order": 1, "about": {"command": "make"}}))
    with pytest.raises(ValueError, match=r"x\.json does not tell its commit, device"):
        report.read(tmp_path)


def test_what_a_run_wrote_is_kept_off_the_page_at_first(tmp_path):
    experiment = find("trie")
    tiny = {"prompts": 2, "prompt_tokens": 9, "answer_tokens": 4, "vocabulary": 50}
    data = run(experiment, tiny).write(tmp_path)[0]
    kept = report.kept(data)
    assert kept["order"] is None
    assert kept["columns"] == list(experiment.columns)
    assert kept["about"]["command"].startswith("draftree")
    assert "commit" not in kept["rows"][0]
