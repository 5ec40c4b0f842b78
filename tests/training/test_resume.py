"""A training that was stopped goes on as if nothing had been, and refuses what it cannot go on with."""

from __future__ import annotations

import pytest
from few import few
from training_driver import data_for, run, same, weights_of
from zoo import MEMBERS, construct

from draftree.training.session import Session
from draftree.training.trainer import DrafterTrainer


@pytest.fixture(scope="module")
def zoo_data(tmp_path_factory):
    """A tiny llama and data it made."""
    model = construct(MEMBERS["llama"])
    return model, data_for(model, tmp_path_factory.mktemp("data") / "made")


@pytest.mark.parametrize("method", few(["bita", "medusa"], ["bita"]))
def test_resume_gives_what_a_run_in_one_piece_gives(zoo_data, tmp_path, monkeypatch, method):
    """Killed in its second epoch; the rows, split windows, dropout and learning rate go on as if nothing had been.

    Also where what accelerate wraps around the order of rows does not tell it the epoch, as in several processes.
    """
    settings = {"steps": None, "epochs": 2, "batch": 8, "checkpoints": 7, "splits": 3}
    whole = run(zoo_data, tmp_path / "whole", method, **settings)
    real = DrafterTrainer.training_step

    def stop(self, *args, **kwargs):
        if self.state.global_step == whole["steps"] - 2:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(DrafterTrainer, "training_step", stop)
    with pytest.raises(KeyboardInterrupt):
        run(zoo_data, tmp_path / "cut", method, **settings)
    monkeypatch.undo()
    assert not (tmp_path / "cut" / "recipe.json").exists()
    with pytest.raises(ValueError, match="unfinished run: add --resume"):
        run(zoo_data, tmp_path / "cut", method, **settings)
    monkeypatch.setattr("accelerate.data_loader.DataLoaderShard.set_epoch", lambda self, epoch: None)
    recipe = run(zoo_data, tmp_path / "cut", method, **settings, resume=True)
    assert recipe["steps"] == whole["steps"]
    assert recipe["accuracy"] == whole["accuracy"]
    assert same(weights_of(tmp_path / "cut"), weights_of(tmp_path / "whole"))


def test_a_run_that_had_done_all_its_steps_is_not_trained_further(zoo_data, tmp_path, monkeypatch):
    def failing(*args):
        raise OSError("no space left")

    whole = run(zoo_data, tmp_path / "whole", steps=7)
    monkeypatch.setattr(Session, "finish", failing)
    with pytest.raises(OSError, match="no space"):
        run(zoo_data, tmp_path / "cut", steps=7)
    monkeypatch.undo()
    again = run(zoo_data, tmp_path / "cut", steps=7, resume=True)
    assert again["steps"] == whole["steps"] == 7
    assert same(weights_of(tmp_path / "cut"), weights_of(tmp_path / "whole"))
    with pytest.raises(ValueError, match="holds a finished run, which cannot go on: leave --resume out"):
        run(zoo_data, tmp_path / "cut", steps=7, resume=True)


def test_resume_needs_a_checkpoint(zoo_data, tmp_path):
    with pytest.raises(ValueError, match=r"no checkpoint in .* leave --resume out"):
        run(zoo_data, tmp_path, resume=True)
