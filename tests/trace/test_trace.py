"""Traces: what is recorded adds up to the statistics to the last bit, for every drafter; files that are refused."""

from __future__ import annotations

import itertools
import json
from dataclasses import fields
from typing import Any

import pytest
import torch
from drafters_for_tests import RandomTree
from generate_driver import NEW, left_pad, prompts
from timed_shape import Timed
from trace_driver import CASES, record, references
from typer.testing import CliRunner
from zoo import build

import draftree
from draftree.acceptance.base import AcceptedPath
from draftree.cli import app
from draftree.drafting import PromptLookup
from draftree.engine import Engine, Recorder, SamplingParams, generate
from draftree.engine.recorder import Track
from draftree.engine.request import Request, RequestStats
from draftree.shaping import Fixed
from draftree.trace.file import Trace, label, pieces, read_trace, write_trace
from draftree.tree import TokenTree


@pytest.mark.parametrize("case", CASES)
def test_counts_of_the_file_are_those_of_the_run_to_the_last_bit(case, tmp_path):
    recorder, out = record(case, "hooked" if case == "in-model" else "auto")
    trace = read_trace(write_trace(recorder, tmp_path / "run.jsonl"))
    found = trace.statistics().requests
    assert len(found) == len(out.stats.requests)
    for mine, theirs in zip(found, out.stats.requests, strict=True):
        for counted in fields(RequestStats):
            assert getattr(mine, counted.name) == getattr(theirs, counted.name), counted.name
    for b, request in enumerate(trace.requests):
        emitted = [token for _, member in trace.of(request) for token in member["emitted"]]
        width = out.sequences.shape[1] - NEW
        assert out.sequences[b, width : width + len(emitted)].tolist() == emitted
        assert trace.requests[request]["prompt"] == prompts()[b]
    if "pruned" in case:
        assert 0 < out.stats.total.pruned < out.stats.total.drafted


@pytest.mark.parametrize("case", ["trie-pruned", "merged-pruned", "typical"])
def test_trees_are_as_they_were_and_walks_lie_in_them(case, tmp_path, monkeypatch):
    """Nothing that was kept by reference changes afterwards."""
    seen: list[tuple[list[list[int]], list[list[float]]]] = []
    honest = Track.step

    def copying(self: Track, requests: Any, trees: Any, *rest: Any) -> None:
        seen.append((trees.tokens.tolist(), trees.logp.tolist()))
        honest(self, requests, trees, *rest)

    monkeypatch.setattr(Track, "step", copying)
    recorder, _ = record(case)
    trace = read_trace(write_trace(recorder, tmp_path / "run.jsonl"))
    assert len(seen) == len(trace.steps)
    sources = set()
    for (tokens, logp), step in zip(seen, trace.steps, strict=True):
        names = trace.runs[step["run"]]["sources"]
        for b, member in enumerate(step["members"]):
            size = len(member["tokens"])
            assert member["tokens"] == tokens[b][:size]
            assert member["logp"] == pytest.approx(logp[b][:size], abs=1e-4)
            sources |= {names[source] for source in member["sources"][1:]}
            assert len(member["emitted"]) == len(member["accepted"]) == len(member["path"])
            for node, token, child in zip(member["path"], member["emitted"], member["accepted"], strict=True):
                assert child is None or (member["parents"][child], member["tokens"][child]) == (node, token)
                assert node not in member["pruned"]
                assert child not in member["pruned"]
            for node in range(1, size):
                if member["parents"][node] in member["pruned"]:
                    assert node in member["pruned"], "pruning takes all below"
            assert size - 1 <= member["drafted"] <= (member["budget"] or 0)
    assert (
        sources
        >= {"trie-pruned": {"lookahead/output"}, "merged-pruned": {"lookahead", "medusa"}, "typical": {"medusa"}}[case]
    )


def test_requests_that_join_and_leave_and_engines_that_share_a_recorder(tmp_path):
    model, recorder = build("llama"), Recorder()
    requests = []
    for _ in range(2):
        engine = Engine(
            model, drafter=RandomTree(references()), shape=Fixed(8), slots=2, recorder=recorder
        )  # two slots for three prompts of different lengths
        requests += [engine.add(p, SamplingParams(max_new_tokens=6 + 5 * i)) for i, p in enumerate(prompts())]
        engine.run()
    trace = read_trace(write_trace(recorder, tmp_path / "run.jsonl"))
    assert sorted(trace.runs) == [0, 1]
    assert list(trace.requests) == [r.id for r in requests]
    assert trace.statistics().requests == [r.stats for r in requests]
    sizes = [len(step["members"]) for step in trace.steps]
    assert set(sizes) == {1, 2}
    assert {request["finish_reason"] for request in trace.requests.values()} <= {"eos", "length"}
    for number in (0, 1):
        times = [step["at"] for step in trace.steps if step["run"] == number]
        assert times[0] == 0
        assert times == sorted(times)
        assert all(0 <= s["shape_seconds"] <= s["seconds"]["draft"] for s in trace.steps)


def test_encoder_decoders_tell_what_was_asked(tmp_path):
    ids, mask = (part.flip(1) for part in left_pad(prompts()))
    recorder, options = Recorder(), {"no_repeat_ngram_size": 3, "max_new_tokens": NEW}
    out = generate(build("bart"), ids, mask, drafter=draftree.Lookahead(), recorder=recorder, **options)
    trace = read_trace(write_trace(recorder, tmp_path / "run.jsonl"))
    assert trace.statistics().requests == out.stats.requests
    told = list(trace.requests.values())
    assert [row["source"] for row in told] == [row[::-1] for row in prompts()]
    assert told[1]["prompt_text"] == " ".join(map(str, prompts()[1][::-1]))


class Far:
    """A tensor that says it lies on another device."""

    is_cpu = False

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.tolist = tensor.shape, tensor.tolist


def test_trees_of_other_devices_and_trees_with_gaps_are_told_alike():
    roots = torch.tensor([5, 1])
    tree = TokenTree.from_choices(roots, torch.tensor([[[2, 3]], [[4, 6]]]), [(0,), (1,)], torch.zeros(2, 1, 2))
    assert not tree.parents.is_contiguous(), "one row for all requests"
    requests = [Request([5], SamplingParams(), device=tree.device), Request([1], SamplingParams(), device=tree.device)]
    paths = [AcceptedPath([0, 2], [3, 8], [2, None]), AcceptedPath([0], [4], [1])]
    held = (tree.tokens, tree.parents, tree.logp, tree.source)
    far = TokenTree(*map(Far, held), tree.sizes)  # type: ignore[arg-type]
    told = []
    for trees in (tree, far):
        track = Track({}, None)
        track.drafted([2, 3], trees, 1.5, 1.75)
        track.step(requests, trees, None, paths, [1.0, 2.0, 3.0, 3.5, 4.0])
        *_, step = track.records(0)
        told.append(step)
    assert told[0]["members"] == told[1]["members"]
    first, second = told[0]["members"]
    assert (first["tokens"], first["parents"]) == ([5, 2, 3], [-1, 0, 0])
    assert (first["path"], first["emitted"], first["accepted"]) == ([0, 2], [3, 8], [2, None])
    assert (second["path"], second["emitted"], second["accepted"]) == ([0], [4], [1])
    assert (second["request"], second["budget"], second["drafted"]) == (requests[1].id, 3, 2)
    assert told[0]["shape_seconds"] == 0.75, "before 1.5, and behind 1.75"


# ---------------------------------------------------------------- the file, its texts, its errors


def test_pieces_join_to_the_text_and_labels_show_bytes(demo):
    text = "naïve 中文 🙂 \u2028 </script> tab\tend\n"
    ids = demo.tokenizer(text, add_special_tokens=False).input_ids
    cut = pieces(demo.tokenizer, ids)
    assert len(cut) == len(ids)
    assert "".join(cut) == text
    labels = [label(demo.tokenizer, token) for token in ids]
    assert any(shown.startswith("\\x") for shown in labels), "some tokens are parts of characters"
    assert "\ufffd" not in "".join(labels)
    assert "</script>" in "".join(labels)
    torn = pieces(demo.tokenizer, demo.tokenizer("🙂", add_special_tokens=False).input_ids[:-1])
    assert torn[-1] == "\ufffd", "half a character at the end is shown, not lost"
    assert label(None, 7) == "7"
    assert pieces(None, [7, 8]) == ["7 ", "8 "]


def test_a_file_that_is_no_trace_is_refused_in_a_sentence(tmp_path):
    recorder, _ = record("trie")
    whole = write_trace(recorder, tmp_path / "run.jsonl").read_text().splitlines(keepends=True)
    first = json.loads(whole[0])
    for name, content, words in (
        ("empty", "", "is no trace"),
        ("other", '{"prompt": "x"}\n', "is no trace"),
        ("later", json.dumps(first | {"format": 99}) + "\n", "trace of format 99"),
    ):
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(ValueError, match=words):
            read_trace(path)
    with pytest.raises(ValueError, match="holds no step"):
        write_trace(Recorder(), tmp_path / "none.jsonl")
    with pytest.raises(TypeError, match=r"pass draftree\.Recorder\(\)"):
        Engine(build("llama"), recorder="run.jsonl")  # type: ignore[arg-type]
    assert isinstance(read_trace(tmp_path / "run.jsonl"), Trace)


# ---------------------------------------------------------------- the command


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


def test_command_records_replays_and_writes_a_page(tmp_path):
    out, page = tmp_path / "run.jsonl", tmp_path / "run.html"
    done = run(
        "Write a shell command using git: Undo the last commit.", "List the numbers from one to ten.", "--drafter",
        "lookahead+medusa", "--early-head", "demo", "--nodes", "12", "--max-new-tokens", "24", "--out", out, "--html",
        page, "--slots", 10**11,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    assert page.read_text().startswith("<!doctype html>")
    trace = read_trace(out)
    assert len(trace.requests) == 2
    shown = run("--replay", out)
    assert shown.exit_code == 0, shown.output
    for request in trace.requests.values():
        assert "".join(request["pieces"]).splitlines()[0] in shown.output
    assert "Request 1: Write a shell command us…\n" in shown.output
    assert "Request 2: List the numbers from on…\n" in shown.output
    again = tmp_path / "again.html"
    assert "again.html" in run("--replay", out, "--html", again).output
    assert again.read_text().startswith("<!doctype html>")


def test_command_says_what_ended_an_answer(monkeypatch, tmp_path):
    def fails(*_):
        raise ValueError("No drafts today.")

    monkeypatch.setattr("draftree.Lookahead.begin", fails)
    done = CliRunner().invoke(app, ["trace", "The sea", "--max-new-tokens", "4", "--out", str(tmp_path / "t.jsonl")])
    assert str(done.exception) == "No drafts today."
    assert not list(tmp_path.iterdir())


def test_command_records_lossy_runs_and_says_so(tmp_path):
    out = tmp_path / "run.jsonl"
    done = run("Describe the restaurant: name[Aromi]", "--bild", "demo", "--max-new-tokens", "16", "--out", out)
    assert done.exit_code == 0, done.output
    assert read_trace(out).runs[0]["acceptance"] == "LossyBiLD"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["hi", "--bild", "demo", "--nodes", "4"], "leave --nodes out"),
        (["hi", "--lossless"], "belongs to --bild"),
        ([], "Give a prompt, or --replay"),
        (["hi", "--replay", "x.jsonl"], "leave out the prompt"),
        (["--replay", "x.jsonl", "--drafter", "medusa"], "leave out --drafter"),
        (["--replay", "x.jsonl", "--max-new-tokens", "8"], "leave out --max-new-tokens"),
        (["--replay", "x.jsonl", "--html", "nowhere/run.html"], "There is no folder nowhere"),
        (["--replay", "nowhere.jsonl"], "nowhere.jsonl"),
        (["hi", "--drafter", "none", "--nodes", "4"], "name a drafter"),
        (["hi", "--drafter", "none", "--early-head", "demo"], "name a drafter"),
        (["hi", "--out", "no/such/folder/run.jsonl"], "There is no folder"),
        (["hi", "--trie", "nowhere.trie"], "There is no trie"),
        (["hi", "--top-k", "4"], "add --sample"),
        ([" "], "The prompt is empty"),
    ],
)
def test_command_refuses_in_a_sentence(arguments, words):
    done = run(*arguments)
    assert done.exit_code != 0
    assert words in str(done.exception)


def test_all_times_are_of_the_engines_clock() -> None:
    """A clock that ticks when it is looked at: the cost of steps, and what drafting and sizing took."""
    ticks, recorder, shape = itertools.count(), Recorder(), Timed(Fixed(4))
    engine = Engine(build("llama"), drafter=PromptLookup(), shape=shape, recorder=recorder, clock=lambda: next(ticks))
    engine.add([5, 6, 7, 5, 6], max_new_tokens=6)
    engine.run()
    assert set(shape.cost.seconds.tolist()) == {1.0}
    drafted = [r for r in recorder.records() if r["kind"] == "step" and any(m["drafted"] for m in r["members"])]
    assert drafted
    for step in drafted:  # looks before and behind the drafter, which the stage of drafting includes
        assert (step["shape_seconds"], step["seconds"]["draft"]) == (2, 3)
