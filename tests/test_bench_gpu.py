"""`draftree bench gpu`: without CUDA a sentence; all it measures on the CPU with a tiny shape; what trees would pay."""

import copy

import pytest
import torch
from typer.testing import CliRunner

from draftree.bench import gpu
from draftree.bench import steps as timing
from draftree.bench.figures import EFFICIENCY, STEP_FLOOR, TARGETS, step_table
from draftree.bench.gpu import BATCHES, FORM_ROWS, ROOM, ROWS, choices, other_forms, run_gpu
from draftree.bench.inflate import sizes
from draftree.bench.inflate.sizes import SIZES, Size, check_memory
from draftree.bench.inputs import Subject
from draftree.bench.speed import SpeedSettings
from draftree.bench.steps import HF, LOOP, time_rows
from draftree.cli import app
from draftree.progress import Watcher
from draftree.prompts import embedded_prompts
from draftree.runner import open_runner
from draftree.runner.step_cost import StepCost


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_says_so_before_any_work(tmp_path):
    done = CliRunner().invoke(app, ["bench", "gpu", "--out", str(tmp_path / "out")])
    assert done.exit_code != 0
    assert "has no CUDA device" in str(done.exception)
    assert "draftree bench speed" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_device_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpu.check_device("cuda:1")
    with pytest.raises(ValueError, match="choose one of cuda, cuda:0, cuda:1"):
        gpu.check_device("cuda:2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--shape", "llama7b"], "Did you mean 'llama-7b'"), (["--dtype", "int8"], "There is no dtype 'int8'")],
)
def test_refused_in_one_sentence(arguments, message, tmp_path):
    done = CliRunner().invoke(app, ["bench", "gpu", *arguments, "--out", str(tmp_path)])
    assert message in str(done.exception)


def test_memory_is_looked_at_first(demo, monkeypatch):
    monkeypatch.setattr(sizes, "free_bytes", lambda device: 12 * 2**30)
    with pytest.raises(ValueError, match="GiB are free"):
        check_memory(SIZES["llama-7b"], torch.bfloat16, torch.device("cpu"), ROOM)
    check_memory(SIZES["llama-3.2-1b"], torch.bfloat16, torch.device("cpu"), ROOM)
    with pytest.raises(ValueError, match="GiB are free"):
        run_gpu(Subject(*demo), embedded_prompts(), SpeedSettings(context=256), device="cpu")


def test_all_of_it_runs_on_a_cpu_and_fills_one_file(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "BUFFER", 2**23)
    small = Size.of(demo.model.config)
    shape = Size(2 * small.hidden_size, small.layers, 2 * small.heads, 2 * small.kv_heads, small.head_dim, 1024, 4200)
    prompts = [p for p in embedded_prompts() if p.set == "wikisql"]
    chosen = [p for p in prompts if not p.warm][:3] + [p for p in prompts if p.warm][:3]
    settings = SpeedSettings(3, 8, 1, 16, 3, compiled=False, seconds=0.0)
    report = run_gpu(Subject(*demo), chosen, settings, shape=shape, dtype=torch.float32, device="cpu")
    assert report.facts["about"]["prompts"] == gpu.FEWEST, "a slow device answers few prompts"
    by_kind = {
        kind: [row for row in report.facts["rows"] if row["kind"] == kind] for kind in ("figure", "step", "choice")
    }
    figures = {row["name"]: row for row in by_kind["figure"]}
    assert {name for name, row in figures.items() if row["target"] is not None} == set(TARGETS["gpu"])
    assert figures[EFFICIENCY]["estimate"]["value"] > 0
    assert figures[STEP_FLOOR]["target"] == pytest.approx(0.833, abs=0.001)
    timed = {(m, n) for m in (HF, LOOP) for n in ROWS}
    timed |= {(m, n) for m in ("draftree_tensors", "draftree_captured") for n in FORM_ROWS}
    assert {(row["method"], row["rows"]) for row in by_kind["step"]} == timed
    assert [row["batch"] for row in by_kind["choice"]] == list(BATCHES)
    answers = {row["method"]: row for row in report.facts["answers"]["rows"]}
    assert all(row["differing_prompts"] == [] for row in answers.values())
    drafted = {"lookahead_warm", "lookahead_16"}
    plain = {"draftree_loop", "draftree_tensors", "draftree_captured"}
    assert {"hf_generate", "hf_prompt_lookup", *plain, *drafted} == set(answers)
    pytest.importorskip("matplotlib")
    data, picture = report.write(tmp_path)
    assert (data.name, picture.name) == ("bench-gpu.json", "bench-gpu.png")
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
    assert set(other_forms(small, runners["cuda_graphs"])) == {"draftree_tensors"}
    assert set(other_forms(small, runners["eager"])) == {"draftree_captured"}
    others = other_forms(small, runners["cuda_graphs"])
    watcher = Watcher()
    timed = {name: (other, (1,)) for name, other in others.items()}
    steps = time_rows(small, runners["cuda_graphs"], (1, 2), 8, 1, watcher, timed)
    assert [(row["method"], row["rows"]) for row in steps.rows][-1:] == [("draftree_tensors", 1)]
    headings = step_table("small", steps).headings
    assert headings[-2] == "draftree, eager"
