"""What experiments train themselves: kept by all that it depends on, made once, and learned from what was named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.drafters import bild, bild_pair
from benchmarks.harness import Setup, on_demand
from benchmarks.harness.command import run
from benchmarks.harness.experiment import experiments
from draftree.prompts import embedded_prompts
from draftree.training.objectives import MedusaObjective

SETS = ("e2e", "wikisql")
OPTIONS = on_demand.OPTIONS | {
    "train_steps": 2,
    "train_questions": 40,
    "train_reference": "",
    "per_set": 1,
    "max_new_tokens": 10,
}


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Prompts of two sets, each with a reference of one and the same text."""
    rows = [{"id": p.id, "prompt": p.text, "answer": "So."} for p in embedded_prompts() if p.warm and p.set in SETS]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def setup_of(questions: Path, out: Path, **options: object) -> Setup:
    return Setup(OPTIONS | {"questions": str(questions)} | options, out=out)


def test_a_drafter_is_trained_once_for_the_same_settings(questions: Path, tmp_path: Path) -> None:
    first = on_demand.drafter(setup_of(questions, tmp_path), "medusa", {"heads": 1})
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("drafter.safetensors")}
    again = on_demand.drafter(setup_of(questions, tmp_path), "medusa", {"heads": 1})
    assert len(files) == 1
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("drafter.safetensors")}
    assert all((a == b).all() for a, b in zip(first.weights.parameters(), again.weights.parameters(), strict=True))
    assert recipe_of(tmp_path)["options"]["learning_rate"] == MedusaObjective.learning_rate
    (next(iter(files)).parent / "recipe.json").unlink()  # as a run that was killed leaves it
    on_demand.drafter(setup_of(questions, tmp_path), "medusa", {"heads": 1})
    on_demand.drafter(setup_of(questions, tmp_path, train_steps=3), "medusa", {"heads": 1})
    on_demand.drafter(setup_of(questions, tmp_path), "medusa", {"heads": 2})
    assert len(list(tmp_path.rglob("drafter.safetensors"))) == 3


def test_the_learning_rate_can_be_named(questions: Path, tmp_path: Path) -> None:
    setup = setup_of(questions, tmp_path, train_learning_rate=5e-4)
    on_demand.drafter(setup, "medusa", {"heads": 1})
    assert recipe_of(tmp_path)["options"]["learning_rate"] == 5e-4


def recipe_of(folder: Path) -> dict[str, Any]:
    """Of the one drafter below a folder."""
    (path,) = folder.rglob("recipe.json")
    recipe: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return recipe


def test_references_are_learned_where_they_are_named(questions: Path, tmp_path: Path) -> None:
    setup = setup_of(questions, tmp_path, train_reference="answer")
    rows = [json.loads(line) for line in (on_demand.answers(setup) / "rows.jsonl").read_text().splitlines()]
    assert {row["answer"] for row in rows} == {"So."}
    eos = setup.small.generation_config.eos_token_id
    assert all(row["answer_ids"][-1] in (eos if isinstance(eos, list) else [eos]) for row in rows)
    own = on_demand.answers(setup_of(questions, tmp_path))
    assert "So." not in {json.loads(line)["answer"] for line in (own / "rows.jsonl").read_text().splitlines()}


def test_without_questions_prompts_that_are_not_measured_are_learned(tmp_path: Path) -> None:
    setup = Setup(OPTIONS, out=tmp_path)
    measured = {task.prompt.id for task in setup.tasks}
    assert not measured & {question.id for question in on_demand.asked(setup)}
    assert "of the package" in on_demand.remark(setup)
    none = Setup(OPTIONS, prompts=[p for p in embedded_prompts() if not p.warm])
    with pytest.raises(ValueError, match="no prompts but the measured ones to train on"):
        on_demand.asked(none)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pair_dev": ""}, "name them by --set pair_dev="),
        ({"pair_minutes": 0.0}, "pair_minutes is 0.0"),
    ],
)
def test_a_pair_that_cannot_be_built_is_refused(options: dict, words: str, tmp_path: Path) -> None:
    given = bild.OPTIONS | {"pair_data": str(tmp_path / "a"), "pair_dev": str(tmp_path / "b")} | options
    with pytest.raises(ValueError, match=words):
        bild_pair.built(Setup(given))
    with pytest.raises(ValueError, match="leave --model"):
        bild_pair.built(Setup(given, name="model"))


@pytest.mark.slow
def test_a_pair_is_built_by_the_recipe_and_measured(tmp_path: Path) -> None:
    """Large, small and aligned small; a second run makes none of them anew."""
    nouns = [("Hund", "dog"), ("Mann", "man"), ("Ball", "ball"), ("Baum", "tree"), ("Vogel", "bird"), ("Fisch", "fish")]
    pairs = [(f"Der {a} sieht den {c}.", f"The {b} sees the {d}.") for a, b in nouns for c, d in nouns]
    for name, chosen in (("train", pairs * 3), ("dev", pairs[:4])):
        lines = [json.dumps({"id": f"{name}-{n}", "de": de, "en": en}) for n, (de, en) in enumerate(chosen)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    given = {"max_new_tokens": 10, "windows": (4,), "limit": 2, "timed": 2, "examples": 1, "rounds": 1}
    given |= {"thresholds": ("0.6:3",), "batch": 4, "pair_minutes": 0.05}
    given |= {"pair_data": str(tmp_path / "train.jsonl"), "pair_dev": str(tmp_path / "dev.jsonl")}
    table = run(experiments()["bild-table1"], given, out=tmp_path).table
    assert {"unaligned", "aligned"} <= set(table["pair"])
    recipes = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("recipe.json")}
    assert len(recipes) == 4
    run(experiments()["bild-table1"], given, out=tmp_path)
    assert recipes == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("recipe.json")}


@pytest.mark.slow
def test_a_small_model_of_the_embedded_one_is_built_by_the_recipe_and_measured(tmp_path: Path) -> None:
    """Unaligned by references, aligned by the model's own answers; a second run makes neither anew."""
    rows = [
        json.dumps({"id": str(n), "prompt": f"What is {n} and one?", "response": f"It is {n + 1}."}) for n in range(45)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(rows[:41]) + "\n", encoding="utf-8")
    (tmp_path / "dev.jsonl").write_text("\n".join(rows[41:]) + "\n", encoding="utf-8")
    given = {"max_new_tokens": 10, "windows": (4,), "limit": 2, "timed": 2, "examples": 1, "rounds": 1}
    given |= {"thresholds": ("0.6:3",), "batch": 4, "pair_minutes": 0.02, "field": "prompt", "reference": "response"}
    given |= {"pair_data": str(tmp_path / "train.jsonl"), "pair_dev": str(tmp_path / "dev.jsonl")}
    table = run(experiments()["bild-table1"], given, out=tmp_path).table
    assert {"unaligned", "aligned"} <= set(table["pair"])
    recipes = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("recipe.json")}
    assert len(recipes) == 2
    learned = next(tmp_path.rglob("references/rows.jsonl")).read_text(encoding="utf-8")
    assert json.loads(learned.splitlines()[0])["answer"] == "It is 1."
    run(experiments()["bild-table1"], given, out=tmp_path)
    assert recipes == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("recipe.json")}
