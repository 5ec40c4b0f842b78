"""`draftree bench gpu`: without CUDA a sentence; all it measures on the CPU with a tiny shape; what trees would pay."""

import copy

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.harness.command import run
from benchmarks.harness.inputs import Texts
from benchmarks.inflate import sizes
from benchmarks.inflate.sizes import SIZES, check_memory
from benchmarks.machine import gpu
from benchmarks.machine import steps as timing
from benchmarks.machine.gpu import BATCHES, EXPERIMENT, FORM_ROWS, ROOM, ROWS, choices, other_forms
from benchmarks.machine.speed import EFFICIENCY, STEP_FLOOR
from benchmarks.machine.steps import HF, LOOP, time_rows
from draftree.cli import app
from draftree.prompts import Watcher, embedded_prompts
from draftree.runner import open_runner
from draftree.runner.step_cost import StepCost


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_says_so_before_any_work(tmp_path):
    done = CliRunner().invoke(app, ["bench", "gpu", "--out", str(tmp_path)])
    assert isinstance(done.exception, ValueError)
    assert "has no CUDA device" in str(done.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "llama7b"], "Did you mean 'llama-7b'"),
        (["--dtype", "int8"], "There is no dtype 'int8'"),
        (["--device", "cpu:x"], "no device 'cpu:x'"),
    ],
)
def test_refused_in_one_sentence(arguments, message, tmp_path):
    done = CliRunner().invoke(app, ["bench", "gpu", *arguments, "--out", str(tmp_path)])
    assert message in str(done.exception)


def test_device_and_type_of_bench_run_are_those_of_the_experiment(monkeypatch):
    """It makes a model of its own, which --device and --dtype meant as well; --set comes first."""
    given = []
    monkeypatch.setattr("benchmarks.cli._run", lambda name, options, *rest, **about: given.append(options))
    asked = ["bench", "run", "gpu", "--device", "cpu", "--dtype", "float16", "--set", "dtype=float32"]
    assert CliRunner().invoke(app, asked).exit_code == 0
    assert CliRunner().invoke(app, ["bench", "run", "kinds", "--device", "cpu"]).exit_code == 0
    assert given == [{"device": "cpu", "dtype": "float32"}, {}]


def test_memory_is_looked_at_first(monkeypatch):
    monkeypatch.setattr(sizes, "free_bytes", lambda device: 12 * 2**30)
    with pytest.raises(ValueError, match="GiB are free"):
        check_memory(SIZES["llama-7b"], torch.bfloat16, torch.device("cpu"), ROOM)
    check_memory(SIZES["llama-3.2-1b"], torch.bfloat16, torch.device("cpu"), ROOM)
    with pytest.raises(ValueError, match="GiB are free"):
        run(EXPERIMENT, {"device": "cpu"})


def test_all_of_it_runs_on_a_cpu_and_fills_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "BUFFER", 2**23)
    prompts = [p for p in embedded_prompts() if p.set == "wikisql"]
    chosen = [p for p in prompts if not p.warm][:3] + [p for p in prompts if p.warm][:3]
    given = {"per_set": 3, "max_new_tokens": 8, "rounds": 1, "context": 16, "warm_per_set": 3}
    given |= {"device": "cpu", "dtype": "float32", "compiled": False, "minutes": 0.0}
    report = run(EXPERIMENT, given, prompts=chosen, params="20M")
    facts = report.as_dict()
    assert facts["about"]["prompts"] == gpu.FEWEST, "a slow device answers few prompts"
    assert facts["about"]["model"] == "embedded chat-4m inflated to 20M"
    figures = {row["figure"]: row for row in facts["rows"]}
    assert figures[EFFICIENCY]["value"] > 0
    assert figures[STEP_FLOOR]["value"] > 0
    timed = {(m, n) for m in (HF, LOOP) for n in ROWS}
    timed |= {(m, n) for m in ("draftree-eager", "draftree-cuda-graphs") for n in FORM_ROWS}
    assert {(row["name"], row["rows"]) for row in facts["more"]["steps"]} == timed
    steps, answers, _, chosen = facts["tables"].values()
    assert len(steps) == len(timed)
    assert [row["batch"] for row in chosen] == list(BATCHES)
    assert all(row["differing"] == 0 for row in answers)
    assert len(answers) == 7, "Hugging Face's two ways, three runners and two drafters"
    data, picture, _ = report.write(tmp_path)
    assert (data.name, picture.name) == ("bench-run-gpu.json", "bench-run-gpu.png")
    assert list(report.printed())


def test_what_would_pay_goes_by_what_rows_are_worth():
    accepted = [0.8, 0.5, 0.2]
    free = choices(StepCost((1, 256), (1.0, 1.0)), accepted, packed=True)
    assert all(row["draft_tokens"] == 3 and row["tokens"] == pytest.approx(2.5) for row in free)
    assert all(row["speed_up"] == pytest.approx(2.5) for row in free)
    dear = choices(StepCost((1, 2), (1.0, 2.0)), accepted, packed=True)
    assert all(row["draft_tokens"] == 0 and row["speed_up"] == pytest.approx(1.0) for row in dear)
    # Rows are free up to 16: a batch of 64 has none to spare, one request has.
    bent = choices(StepCost((1, 16, 32), (1.0, 1.0, 2.0)), accepted, packed=True)
    assert bent[0]["draft_tokens"] == 3
    assert bent[-1]["draft_tokens"] == 0
    padded = choices(StepCost((1, 16, 32), (1.0, 1.0, 2.0)), accepted, packed=False)
    assert padded[2]["draft_tokens"] == 3, "four requests with three draft tokens each are 16 rows"
    assert choices(StepCost((1, 2), (1.0, 2.0)), [], packed=True)[0]["draft_tokens"] == 0


def test_every_form_that_is_not_the_runners_own_is_measured_as_well(demo):
    small = copy.deepcopy(demo.model)
    runners = {way: open_runner(small, way) for way in ("eager", "cuda_graphs")}
    assert set(other_forms(small, runners["cuda_graphs"])) == {"draftree-eager"}
    assert set(other_forms(small, runners["eager"])) == {"draftree-cuda-graphs"}
    others = other_forms(small, runners["cuda_graphs"])
    watcher = Watcher()
    timed = {LOOP: (runners["cuda_graphs"], (1, 2))} | {name: (other, (1,)) for name, other in others.items()}
    steps = time_rows(small, timed, 8, 1, watcher)
    assert [(row["method"], row["name"], row["rows"]) for row in steps.rows][-1:] == [
        ("draftree, eager", "draftree-eager", 1)
    ]


def test_a_few_of_many_are_spread():
    assert gpu.spread(Texts(list("abcdefghij"), []), 3).tasks == ["a", "d", "g"]
    assert gpu.spread(Texts(list("ab"), []), 5).tasks == ["a", "b"]
