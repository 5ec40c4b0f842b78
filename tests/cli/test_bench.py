"""`draftree bench` through its own door: result files that parse, equal ids, plain errors."""

import copy
import json
import subprocess

import pytest
from few import few
from typer.testing import CliRunner

from benchmarks.report import block_of
from draftree.bench import checkout, pictures, quick
from draftree.bench.inputs import Settings, Subject
from draftree.bench.kit import WarmTrie
from draftree.bench.memory import compare_memory
from draftree.bench.quick import METHODS, run_quick
from draftree.cli import app
from draftree.drafting import DraftModel
from draftree.drafting.folder import demo_drafter
from draftree.models import encode_prompt
from draftree.progress import Watcher
from draftree.prompts import embedded_prompts

TINY = ["bench", "quick", "--no-compile", "--rounds", "2", "--max-new-tokens", "6", "--per-set", "2"]


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [p for p in embedded_prompts() if p.set in ("e2e", "wikisql")]
    chosen = [p for p in rows if not p.warm][::7] + [p for p in rows if p.warm][::15]
    path.write_text(
        "".join(
            json.dumps({"prompt": p.text, "set": p.set, "split": "warm" if p.warm else "test"}) + "\n" for p in chosen
        )
    )
    return path


@pytest.mark.slow
def test_quick_writes_a_picture_and_figures_that_agree_with_its_samples(prompts_file, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "made" / "here"
    done = CliRunner().invoke(app, [*TINY, "--prompts", str(prompts_file), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    assert "HF static + compile" in done.output
    assert "was not measured:" in done.output
    result = json.loads((out / "bench-quick.json").read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert set(rows) == set(METHODS) - {"hf-compiled"}
    assert result["more"]["not_measured"] == {"hf-compiled": "--no-compile"}
    for row in rows.values():
        samples = [s for s in result["more"]["samples"] if s["method"] == row["name"]]
        assert len(samples) == 2 * result["about"]["prompts"]
        assert row["tokens"] == sum(s["tokens"] for s in samples)
        speed = row["tokens"] / sum(s["seconds"] for s in samples)
        assert row["tokens/s"] == pytest.approx(speed)
        assert row["differing_prompts"] == [], "greedy fp32 answers equal Hugging Face's"
        for fact in ("commit", "device", "dtype", "threads", "command"):
            assert fact in row
    assert rows["lookahead-rejected"]["stats"]["accepted"] == 0
    assert rows["draftree"]["stats"]["drafted"] == 0
    assert result["about"]["versions"]["transformers"]
    assert result["more"]["memory"]["plain_bytes"] > 0
    assert str(tmp_path) not in json.dumps(result), "no machine paths in a result file"
    for entry in ({"columns": ["method", "tokens/s", "over plain", "over HF generate", "acceptance length"]}, {}):
        _, _, head, _, *lines = block_of(result, entry)
        assert head.startswith("| method | tokens/s | over plain | over HF generate | ")
        assert len(lines) == len(rows), "the docs can show a file as it is"
    assert (out / "bench-quick.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def no_memory(monkeypatch):
    """Leaves out the two processes that weigh memory: seconds that a test of something else need not wait."""
    monkeypatch.setattr(quick, "compare_memory", lambda *_, **__: {"why": "left out"})


def test_quick_without_matplotlib_names_the_extra_and_still_writes_figures(
    prompts_file, tmp_path, monkeypatch, no_memory
):
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    least = ["--rounds", "1", "--per-set", "1", "--max-new-tokens", "2"]
    done = CliRunner().invoke(app, [*TINY, *least, "--prompts", str(prompts_file), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "[bench]" in done.output
    assert "Peak memory: not measured: left out" in done.output
    assert (tmp_path / "out" / "bench-quick.json").exists()
    assert not (tmp_path / "out" / "bench-quick.png").exists()


def test_a_warm_trie_starts_every_round_from_the_same_state(demo):
    prompts = [encode_prompt(demo.tokenizer, p.text) for p in embedded_prompts() if p.set == "e2e"][:3]
    warm = WarmTrie.learn(demo.model, prompts, 8, Watcher())
    first, second = warm.drafter(), warm.drafter()
    one, other = warm.shape(), warm.shape()
    assert first.trie.nodes == second.trie.nodes > 0
    assert one is not other
    assert one.max_nodes == other.max_nodes
    before = second.trie.nodes
    first.trie.warm(list(range(100, 120)))
    assert second.trie.nodes == before
    assert warm.drafter().trie.nodes == before


def test_quick_without_prompts_to_warm_with_says_so(demo, no_memory):
    prompts = [p for p in embedded_prompts() if p.set == "tldr_shell" and not p.warm][:1]
    report = run_quick(Subject(*demo), prompts, Settings(1, 4, 1, 5, compiled=False))
    assert report.more["not_measured"]["lookahead-warm"] == "no prompts to warm the trie with"
    assert "lookahead-cold" in {row["name"] for row in report.tables[0].rows}


def test_quick_drafts_with_the_small_model_that_it_is_given(demo, no_memory, monkeypatch):
    small, met = copy.deepcopy(demo_drafter("draft-model", demo.model).model), []
    own = DraftModel.__init__

    def note(self, model, **given):
        met.append(model)
        own(self, model, **given)

    monkeypatch.setattr(DraftModel, "__init__", note)
    prompts = [p for p in embedded_prompts() if p.set == "tldr_shell" and not p.warm][:1]
    run_quick(Subject(*demo), prompts, Settings(1, 4, 1, 0, compiled=False), assistant=small)
    assert met
    assert all(model is small for model in met)


@pytest.mark.parametrize(
    "verb",
    [*([verb, "--params", "20M"] for verb in ("quick", "compare", "speed")), ["compare", "--against", "x"], ["gpu"]],
)
def test_without_a_checkout_a_sentence_says_what_is_missing(verb, monkeypatch, tmp_path):
    monkeypatch.setattr(checkout, "find_checkout", lambda *starts: None)
    done = CliRunner().invoke(app, ["bench", *verb, "--out", str(tmp_path)])
    assert isinstance(done.exception, ValueError)
    assert "not part of the installed package: clone draftree's repository" in str(done.exception)
    assert "\n" not in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_a_prompt_beyond_the_context_is_named_before_any_work(demo):
    prompts = [p for p in embedded_prompts() if p.set == "squad" and not p.warm][:1]
    with pytest.raises(ValueError, match=f"Prompt '{prompts[0].id}': .*context"):
        run_quick(Subject(*demo), prompts, Settings(max_new_tokens=2000, compiled=False))


@pytest.mark.parametrize("child", few(["real", "brief"], ["brief"]))
def test_memory_that_cannot_be_measured_says_why(child, monkeypatch):
    """The real process imports torch before it finds no model; the brief one ends with its last words at once."""
    if child == "brief":
        words = "raise ValueError('There is no model folder ./no-such-model.')"
        run = subprocess.run
        brief = lambda command, **options: run([command[0], "-S", "-c", words], **options)  # noqa: E731
        monkeypatch.setattr("draftree.bench.memory.subprocess.run", brief)
    told = compare_memory([[1, 2, 3]], 4, 1, "./no-such-model")
    assert "no-such-model" in told["why"]
    assert "\n" not in told["why"]


@pytest.mark.slow
def test_quick_measures_hugging_face_compiled_where_a_compiler_is(prompts_file, tmp_path):
    arguments = [a for a in TINY if a != "--no-compile"]
    done = CliRunner().invoke(app, [*arguments, "--prompts", str(prompts_file), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "bench-quick.json").read_text())
    row = next((row for row in result["rows"] if row["name"] == "hf-compiled"), None)
    if row is None:
        assert result["more"]["not_measured"]["hf-compiled"], "a reason is given"
    else:
        assert row["differing_prompts"] == []
        assert "compiling took" in result["more"]["notes"]["hf-compiled"]
