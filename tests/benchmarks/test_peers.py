"""Comparing with other engines: one that does not install, load or answer is named with its reason."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness import Share
from benchmarks.harness.command import run
from benchmarks.harness.comparisons import CLAIMED
from benchmarks.harness.experiment import experiments
from benchmarks.peers import __main__ as series
from benchmarks.peers import environments, peers
from benchmarks.peers.worker import COLD, Job, convert_apart, cut
from draftree.checkpoints import Placement
from draftree.drafting.folder import demo_drafter
from draftree.prompts import embedded_prompts

ROOT = Path(__file__).parents[2]
JOB = Job("model", "", "", "float32", False, 1, 4, (9,), "")
HEAD = "import os\nfrom benchmarks.peers.worker import Peer, leave\n"
# Engines in a few lines: what each of them does when it is asked.
ENGINES = {
    "counts": (
        "def answer(prompts):\n    return [[1, 2, 9, 4]] * len(prompts)\n"
        "def make(job):\n    return Peer('1', {'plain': lambda: answer})\n"
    ),
    "missing": "import a_package_that_does_not_exist\n",
    "refuses": "def make(job):\n    raise ValueError('no such weights')\n",
    "stumbles": (
        "def make(job):\n    def fail():\n        raise KeyError(f'nothing in {job.work}')\n"
        "    return Peer('1', {'plain': lambda: lambda prompts: prompts, 'drafted': fail})\n"
    ),
    "dies": "def make(job):\n    return Peer('1', {'plain': lambda: lambda prompts: os._exit(1)})\n",
    "chatters": (
        "def make(job):\n    print('loading')\n    os.system('echo loading')\n"
        "    return Peer('1', {'plain': lambda: lambda prompts: [print('hm') or [5]]})\n"
    ),
}


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Engines of `ENGINES` instead of real ones."""

    def python_of(engine):
        if engine not in ENGINES:
            raise RuntimeError("its environment could not be made: no such wheel")
        source, program = tmp_path / f"{engine}.py", tmp_path / engine
        source.write_text(f"{HEAD}{ENGINES[engine]}\nif __name__ == '__main__':\n    leave(make)\n")
        program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" "{source}"\n')
        program.chmod(0o755)
        return program

    monkeypatch.setattr(peers, "python_of", python_of)
    return replace(JOB, work=str(tmp_path / "converted"))


def test_an_engine_answers_and_its_answers_end_at_eos(fake):
    with ExitStack() as stack:
        process = peers.Process("counts", fake, stack)
        assert process.facts["ways"] == ["plain"]
        assert process.reply("plain", [[1]])["peak_bytes"] > 2**20
        assert [answer.ids for answer in process.ask("plain", [[1], [2]])] == [[1, 2, 9], [1, 2, 9]]


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ("missing", "ModuleNotFoundError: No module named 'a_package_that_does_not_exist'"),
        ("refuses", "ValueError: no such weights"),
        ("absent", "its environment could not be made: no such wheel"),
    ],
)
def test_an_engine_that_does_not_start_says_why(engine, why, fake):
    with ExitStack() as stack, pytest.raises(RuntimeError) as told:
        peers.Process(engine, fake, stack)
    assert str(told.value) == why


def test_a_way_that_fails_is_left_out_and_the_others_answer(fake):
    with ExitStack() as stack:
        process = peers.Process("stumbles", fake, stack)
        assert process.ask("drafted", [[3]]) == []
        assert process.troubles == {"drafted": "KeyError: 'nothing in converted'"}
        assert process.ask("plain", [[3]])[0].ids == [3]


def test_a_process_that_ends_leaves_its_way_out(fake):
    with ExitStack() as stack:
        process = peers.Process("dies", fake, stack)
        assert process.ask("plain", [[3]]) == []
        assert process.troubles == {"plain": "its process has ended"}


def test_what_an_engine_prints_is_no_answer(fake):
    with ExitStack() as stack:
        assert peers.Process("chatters", fake, stack).ask("plain", [[3]])[0].ids == [5]


def test_answers_are_cut_as_asked():
    assert cut([1, 2, 3, 4, 5], JOB) == [1, 2, 3, 4]
    assert cut([9, 1], JOB) == [9]
    assert cut([], JOB) == []


def test_an_engine_that_is_not_known_is_refused_before_any_work():
    with pytest.raises(ValueError, match="There is no engine 'onnx': choose from draftree, hugging_face"):
        run(experiments()["peers"], {"engines": ("onnx",)})


def test_what_cannot_be_measured_stands_below_the_table(monkeypatch):
    """An engine that cannot be installed, and ways for which memory is left no more."""

    def python_of(engine):
        if engine == "openvino":
            raise RuntimeError("its environment could not be made: no such wheel")
        return environments.python_of(engine)

    monkeypatch.setattr(peers, "python_of", python_of)
    monkeypatch.setattr(peers, "free_bytes", lambda device: 1000)
    prompts = [next(p for p in embedded_prompts() if p.set == "wikisql" and p.warm is warm) for warm in (False, True)]
    given = {"engines": ("openvino", "hugging_face"), "max_new_tokens": 4, "warm_per_set": 1}
    table = run(experiments()["peers"], given, prompts=prompts).table
    assert list(zip(table["engine"], table["way"], strict=True)) == [("hugging_face", "plain")]
    assert "openvino is left out: its environment could not be made: no such wheel." in table.attrs["remarks"]
    assert any("too little memory is left" in remark for remark in table.attrs["remarks"])
    assert CLAIMED not in table.attrs.get("tables", {}), "nothing was claimed of these engines"


def test_without_hugging_face_others_are_measured_all_the_same(fake, monkeypatch):
    known = peers.python_of
    monkeypatch.setattr(peers, "python_of", lambda engine: known("counts" if engine == "ctranslate2" else "none"))
    prompts = [next(p for p in embedded_prompts() if p.set == "wikisql" and p.warm is warm) for warm in (False, True)]
    given = {"engines": ("hugging_face", "ctranslate2"), "drafters": (), "max_new_tokens": 4, "warm_per_set": 1}
    (row,) = run(experiments()["peers"], given, prompts=prompts).table.to_dict("records")
    assert (row["engine"], row["way"]) == ("ctranslate2", "plain")
    assert "over_hf" not in row
    with pytest.raises(ValueError, match=r"No engine can be measured. hugging_face: its environment could not"):
        run(experiments()["peers"], given | {"engines": ("hugging_face",)}, prompts=prompts)


def test_a_drafter_that_does_not_fit_is_left_out_and_the_others_measured(demo, tmp_path):
    """In bfloat16, of which the package's own drafters are taken too."""
    other = demo_drafter("medusa", demo.model)
    other.base = replace(other.base, hash="0" * 64)
    other.save_pretrained(tmp_path)
    prompts = [next(p for p in embedded_prompts() if p.set == "wikisql" and p.warm is warm) for warm in (False, True)]
    drafters = "draft-model", str(tmp_path)
    given = {"engines": ("hugging_face",), "drafters": drafters, "max_new_tokens": 4, "warm_per_set": 1}
    placed = Placement(device="cpu", dtype="bfloat16")
    table = run(experiments()["peers"], given, prompts=prompts, placement=placed).table
    assert list(table["way"]) == ["plain", "prompt-lookup", "draft-model"]
    assert any(remark.startswith(f"drafter {tmp_path} is left out: ") for remark in table.attrs["remarks"])


def test_weights_of_eight_bits_have_an_environment_of_their_own(fake, monkeypatch):
    asked = []
    monkeypatch.setattr(peers, "python_of", lambda engine: asked.append(engine) or fail())

    def fail():
        raise RuntimeError("none here")

    for engine, int8 in (("draftree", False), ("draftree", True), ("hugging_face", True), ("llama_cpp", True)):
        with ExitStack() as stack, pytest.raises(RuntimeError):
            peers.Process(engine, replace(JOB, int8=int8), stack)
    assert asked == ["draftree", "torchao", "torchao", "llama_cpp"]


def test_weights_are_converted_apart_and_a_failure_says_why():
    with pytest.raises(RuntimeError, match=r"could not be converted: .*No module named .*no_such_engine"):
        convert_apart("benchmarks.peers.engines.no_such_engine", "model", "folder")


def test_vllm_with_a_trie_is_set_against_vllm_alone():
    times = {("vllm", "plain"): Share([4.0, 4.0], [2, 2]), ("vllm", COLD): Share([2.0, 2.0], [2, 2])}
    ((claim, above, below, _, ratio),) = peers._claims(times)
    assert (claim, above, below) == ("lookahead-vllm", "vllm lookahead-cold", "vllm plain")
    assert ratio.value == 2


def test_an_environment_is_made_once_and_anew_when_it_asks_for_more(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(environments, "PLACE", tmp_path)
    monkeypatch.setattr(environments, "_run", lambda command: ran.append(command[1:]) or None)
    monkeypatch.setitem(environments.ENVIRONMENTS, "some", environments.Environment(("torch", "some==1"), ("cuda",)))
    (tmp_path / "some").mkdir()
    for _ in range(2):
        assert environments.python_of("some") == tmp_path / "some" / "bin" / "python"
    assert [command[:3] for command in ran] == [
        ["-m", "venv", "--clear"],
        ["-m", "pip", "install"],
        ["-m", "pip", "install"],
        ["-m", "pip", "uninstall"],
    ]
    monkeypatch.setitem(environments.ENVIRONMENTS, "some", environments.Environment(("torch", "some==2")))
    environments.python_of("some")
    assert len(ran) == 7


def test_what_is_optional_may_fail_to_install(monkeypatch, tmp_path):
    tried = []

    def run(command):
        if "rare==1" in command:
            tried.append(command)
            raise RuntimeError("no compiler")

    monkeypatch.setattr(environments, "PLACE", tmp_path)
    monkeypatch.setattr(environments, "_run", run)
    expected = environments.Environment(("torch", "some==1"), optional=("rare==1",))
    monkeypatch.setitem(environments.ENVIRONMENTS, "some", expected)
    (tmp_path / "some").mkdir()
    assert environments.python_of("some").parent.parent == tmp_path / "some"
    assert len(tried) == 1


def test_an_environment_that_cannot_be_made_says_what_pip_said():
    with pytest.raises(RuntimeError, match=r"could not be made: .*no_such_module"):
        environments._run([sys.executable, "-m", "no_such_module"])


def test_the_series_goes_on_where_it_was(monkeypatch, tmp_path, capsys):
    ran = []
    done = type("Done", (), {"returncode": 0})
    monkeypatch.setattr(series, "PLACE", tmp_path)
    monkeypatch.setattr(series, "ROOT", tmp_path)
    monkeypatch.setattr(series.subprocess, "run", lambda command, **_: ran.append(command[-1]) or done())
    (tmp_path / "peers-4m").mkdir()
    (tmp_path / "peers-4m" / "bench-run-peers.json").write_text("{}")
    series.main([])
    assert [Path(out).name for out in ran] == ["peers-60m", "peers-400m", "peers-400m-bfloat16"]
    assert "peers-4m is complete" in capsys.readouterr().out
    series.main(["--quick"])
    assert [Path(out).name for out in ran[3:]] == ["peers-60m"]
    with pytest.raises(SystemExit, match="There is no option '--fast'"):
        series.main(["--fast"])
