"""`draftree bench quick` and `compare`: result files that parse, equal ids, plain errors."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.compare import Plan, report_of, run_compare
from benchmarks.harness.inputs import Settings, Subject, encode_all
from benchmarks.harness.kit import Kit, LeftOutError, check_name, make_kit
from benchmarks.report import block_of
from draftree.bench import quick
from draftree.bench.quick import run_quick, warmed
from draftree.cli import app, bench
from draftree.drafting.folder import demo_drafter
from draftree.models import encode_prompt
from draftree.prompts import Prompt, Watcher, embedded_prompts


def few_prompts(name: str = "wikisql") -> list[Prompt]:
    rows = [p for p in embedded_prompts() if p.set == name]
    return [p for p in rows if not p.warm][:2] + [p for p in rows if p.warm][:3]


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": p.text, "set": p.set, "split": "warm" if p.warm else "test"} for p in few_prompts()]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_quick_writes_a_result_file_with_equal_answers(prompts_file: Path, tmp_path: Path) -> None:
    arguments = ["bench", "quick", "--max-new-tokens", "6", "--per-set", "2", "--prompts", str(prompts_file)]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "made" / "here")])
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    assert "All answers are equal." in done.output
    result = json.loads((tmp_path / "made" / "here" / "bench-quick.json").read_text())
    rows = {row["method"]: row for row in result["rows"]}
    assert {"HF generate", "DraftModel", "Lookahead, warm trie"} < set(rows)
    for row in rows.values():
        assert row["tokens/s"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["differing"] == 0, "greedy fp32 answers equal Hugging Face's"
        assert {"commit", "device", "dtype", "threads", "command"} <= set(row)
    assert rows["Lookahead, all rejected"]["accepted"] == 0
    assert rows[quick.PLAIN]["drafted"] == 0
    assert str(tmp_path) not in json.dumps(result), "no machine paths in a result file"
    _, _, head, _, *lines = block_of(result, {})
    assert head.startswith("| method | tokens per second | times plain decoding | times Hugging Face | ")
    assert len(lines) == len(rows), "the docs can show a file as it is"


def test_quick_measures_what_there_is(demo: Any) -> None:
    report = run_quick(*demo, [few_prompts()[0]], quick.Settings(1, 4, 1, 5))
    methods = [row["method"] for row in report.tables[0].rows]
    assert "Lookahead, empty trie" in methods
    assert "Lookahead, warm trie" not in methods, "there is no prompt to warm it with"
    assert "DraftModel" not in methods, "there is no small model"
    with pytest.raises(ValueError, match=r"Prompt '.*': .*context"):
        run_quick(*demo, few_prompts("squad")[:1], quick.Settings(max_new_tokens=2000))


def test_a_warm_trie_knows_other_answers_and_a_copy_learns_alone(demo: Any) -> None:
    prompts = [encode_prompt(demo.tokenizer, p.text) for p in few_prompts("e2e")]
    warm = warmed(demo.model, prompts, 8, Watcher())
    first, second = (copy.deepcopy(warm.drafter) for _ in range(2))
    before = second.trie.nodes
    assert first.trie.nodes == before > 0
    first.trie.warm(list(range(100, 120)))
    assert second.trie.nodes == warm.drafter.trie.nodes == before


# ---------------------------------------------------------------- compare


def test_a_comparison_has_a_case_for_each_batch_and_temperature() -> None:
    methods = ("hf-generate", "hf-compiled", "hf-assisted", "draftree", "lookahead-warm+medusa", "draft-model")
    plan = Plan(Settings(2, 6, 1, 3, compiled=False), methods, (1, 2), (0.0, 0.8))
    cases = run_compare([None], few_prompts(), plan, Watcher())
    assert [case.about["case"] for case in cases] == [
        *("batch 1, greedy", "batch 2, greedy"),
        *(f"batch {n}, sampled at temperature 0.8" for n in (1, 2)),
    ]
    first, pair = cases[:2]
    assert set(first.rows) == set(methods) - {"hf-compiled"}
    assert first.unmeasured == {"hf-compiled": "--no-compile"}
    assert pair.unmeasured["hf-assisted"].endswith("at a time")
    assert not any(row.differing for case in cases for row in case.rows.values())
    assert "hf-assisted" in cases[2].notes, "its draws are its own"
    facts = report_of(cases).as_dict()
    assert len(facts["rows"]) == sum(len(case.rows) for case in cases)
    assert {row["case"] for row in facts["rows"]} == {case.about["case"] for case in cases}


def test_an_inflated_model_takes_the_packages_drafters(demo: Any) -> None:
    subject = Subject(*demo).inflated("20M")
    settings = Settings(1, 4, 1, 2, compiled=False)
    kit = make_kit(subject, encode_all(Subject(*demo), few_prompts(), settings).lessons, settings, Watcher())
    methods, left_out = kit.methods(["medusa", "lookahead-rejected", "hf-prompt-lookup"])
    assert not left_out
    ids = encode_prompt(demo.tokenizer, few_prompts()[0].text)
    assert len({tuple(method.answer(ids).ids) for method in methods}) == 1
    with pytest.raises(ValueError, match="inflated already"):
        subject.inflated("40M")


def test_what_cannot_be_compared_is_a_sentence(demo: Any, tmp_path: Path) -> None:
    for name, words in (("lookahed-warm", "Did you mean 'lookahead-warm'"), ("draftree+bita", "no drafter")):
        with pytest.raises(ValueError, match=words):
            check_name(name)
    settings = Settings(1, 4, 1, 0, compiled=False)
    with pytest.raises(LeftOutError, match="no prompts to warm"):
        Kit(Subject(*demo), settings).maker("lookahead-warm")
    with pytest.raises(ValueError, match="No --method uses the small model"):
        run_compare([None], few_prompts(), Plan(settings, ("draftree",), (1,), (0.0,), assistant="x"), Watcher())
    with pytest.raises(ValueError, match="do not fill a batch of 9"):
        run_compare([None], few_prompts(), Plan(settings, ("draftree",), (9,), (0.0,)), Watcher())
    other = demo_drafter("draft-model", demo.model).model
    with pytest.raises(LeftOutError, match="embedded model alone"):
        Kit(Subject(other, demo.tokenizer), settings).maker("medusa")


@pytest.mark.parametrize("verb", [["compare"], ["gpu"], ["run", "gate"], ["list"]])
def test_without_a_checkout_a_sentence_says_what_is_missing(
    verb: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "MARK", "no/such/file")
    done = CliRunner().invoke(app, ["bench", *verb])
    assert "needs a checkout: clone draftree's repository" in str(done.exception)


def test_a_missing_package_of_the_benchmarks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("benchmarks.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pandas", None)
    done = CliRunner().invoke(app, ["bench", "list"])
    assert "The benchmarks need pandas" in str(done.exception)


def test_compare_takes_several_models(refused: Any) -> None:
    several = ["--model", "embedded", "--model", "chat-hybrid"]
    refused(["bench", "compare", *several, "--method", "novel"], "no method 'novel'")
