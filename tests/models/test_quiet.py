"""Figures of speed on a machine that is not quiet: fewer threads, and no ratios."""

import json
import re
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from draftree import showcase
from draftree.cli import app
from draftree.quiet import Quiet, busy_seconds, time_products


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("several", "left"), [(0.5, 2), (1.05, 2), (1.3, 1), (20.0, 1)])
def test_fewer_threads_where_several_are_slower(two_threads, several, left):
    quiet = Quiet(lambda count: [several if torch.get_num_threads() > 1 else 1.0] * count, lambda: 0.0)
    said = quiet.choose_threads()
    assert torch.get_num_threads() == left
    assert said == (
        None if left == 2 else "2 threads are slower than one here, as on a busy machine: the demo uses one."
    )


def judged(products, others):
    """The sentence after ten seconds with these products' times and these seconds of other processes."""
    clock, busy = iter([0.0, 10.0]), iter([5.0, None if others is None else 5.0 + others])
    quiet = Quiet(lambda count: products, lambda: next(busy), lambda: next(clock))
    quiet.look()
    return quiet.trouble()


def test_what_is_quiet():
    assert judged([1.0, 1.1, 1.2, 9.0, 1.3], 0.5) is None  # one interruption
    assert (
        judged([1.0, 1.7, 1.7, 1.8], 0.5)
        == "The machine is not quiet: the same work took 1.7 times as long as at best."
    )
    assert judged([1.0, 1.7, 1.6, 1.8], None) is not None
    assert judged([1.0] * 4, None) is None
    assert judged([1.0] * 4, 9.0) == "The machine is not quiet: other processes took 0.9 of its cores."


@pytest.mark.skipif(busy_seconds() is None, reason="the system does not say what other processes do")
def test_a_busy_process_is_seen():
    quiet = Quiet(lambda count: [1.0] * count)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        time.sleep(1.0)
        other.kill()
    assert "other processes took" in (quiet.trouble() or "")


def test_products_take_little_time():
    times = time_products(6)
    assert len(times) == 6
    assert all(seconds > 0 for seconds in times)


def test_a_demo_on_a_busy_machine_compares_nothing(demo, monkeypatch):
    monkeypatch.setattr(showcase, "KINDS", {"tldr_shell": "shell"})
    monkeypatch.setattr("draftree.quiet.Quiet", lambda: Quiet(lambda count: [1.0, 2.0, 2.0], lambda: None))
    told = json.loads(CliRunner().invoke(app, ["demo", "--cold", "--max-new-tokens", "8", "--json"]).output)
    assert (told["quiet"], told["trouble"][:24]) == (False, "The machine is not quiet")
    for row in (told["total"], *told["prompts"]):
        assert [row[name] for name in ("speed_up", "speed_up_over_hf_generate", "overhead_efficiency")] == [None] * 3
        assert row["drafted_tokens_per_second"] > 0
    shown = CliRunner().invoke(app, ["demo", "--cold", "--max-new-tokens", "8"]).output
    assert "The machine is not quiet: the same work took 2.0 times as long as at best." in shown
    assert "All answers are equal" in shown
    assert not re.search(r"\d\.\d\dx", shown)
