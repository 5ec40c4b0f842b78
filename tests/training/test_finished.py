"""Test that a finished result is replaced on request only, and the options that begin a run."""

import json

import pytest
import torch
from training_driver import run, same, weights_of
from typer.testing import CliRunner

from draftree.cli import app
from draftree.training.objectives import MedusaObjective
from draftree.training.options import TrainOptions, check_out
from draftree.training.rows import spread


def test_a_finished_run_is_replaced_on_request_alone(zoo_data, tmp_path):
    first = run(zoo_data, tmp_path / "o", seed=1)
    held = weights_of(tmp_path / "o")
    with pytest.raises(ValueError, match="holds a finished result: give another folder, or --force to replace it"):
        run(zoo_data, tmp_path / "o", seed=2)
    assert json.loads((tmp_path / "o" / "recipe.json").read_text()) == json.loads(json.dumps(first))
    assert all(torch.equal(a, b) for a, b in zip(held.values(), weights_of(tmp_path / "o").values(), strict=True))
    again = run(zoo_data, tmp_path / "o", seed=2, force=True)
    assert again["options"]["seed"] == 2
    assert not same(held, weights_of(tmp_path / "o"))
    assert "force" not in again["options"]


@pytest.mark.parametrize("verb", ["bita", "hidden-transfer", "medusa", "early-head", "align"])
def test_the_command_line_asks_before_it_loads_anything(verb, tmp_path):
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "recipe.json").write_text("{}")
    own = ["--small", "nowhere"] if verb == "align" else []
    arguments = ["train", verb, "--data", "nowhere", "--model", "./nowhere", "--out", str(tmp_path / "o"), *own]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, ValueError)
    assert "holds a finished result: give another folder, or --force to replace it" in str(done.exception)
    done = CliRunner().invoke(app, [*arguments, "--force"])
    assert "holds a finished result" not in str(done.exception)


@pytest.mark.parametrize(
    ("before", "verb"),
    [("medusa", "align"), ("align", "medusa")],
)
def test_a_model_never_comes_to_lie_beside_a_drafter(before, verb, tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps({"method": before}))
    own = ["--small", "nowhere"] if verb == "align" else []
    arguments = ["train", verb, "--data", "nowhere", "--model", "./nowhere", "--out", str(tmp_path), "--force", *own]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, ValueError)
    assert f"holds a result of {before}, whose files" in str(done.exception)


@pytest.mark.parametrize(("bf16", "mixed"), [(False, False), (True, True), (None, True)])
def test_the_option_of_mixed_precision_comes_before_accelerates(bf16, mixed, zoo_data, tmp_path, monkeypatch):
    found = set()
    measure = MedusaObjective.measure

    def seen(self, batch):
        found.add(torch.is_autocast_enabled("cpu"))
        return measure(self, batch)

    monkeypatch.setattr(MedusaObjective, "measure", seen)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    recipe = run(zoo_data, tmp_path, bf16=bf16)
    assert (found, recipe["machine"]["bf16"]) == ({mixed}, mixed)


def test_one_length_and_one_way_to_begin():
    assert (TrainOptions().passes, TrainOptions(epochs=2).passes) == (4, 2)
    with pytest.raises(ValueError, match="steps and epochs both say how long a training is: give one of them"):
        TrainOptions(steps=10, epochs=1)
    with pytest.raises(ValueError, match="resume goes on with what is there, and force replaces it"):
        TrainOptions(resume=True, force=True)


@pytest.mark.parametrize("name", ["config.json", "draftree_config.json"])
def test_what_comes_from_elsewhere_is_not_replaced(name, tmp_path):
    (tmp_path / name).write_text("{}")
    for force in (False, True):
        with pytest.raises(ValueError, match="holds a model or drafter that no training here has left"):
            check_out(tmp_path, "medusa", force=force)


def test_a_share_of_rows_is_of_all_sets():
    assert spread([*"aaabbbccc"], 3) == [*"abc"]
    assert spread([*"ab"], 5) == [*"ab"]
    assert spread([], 5) == []
