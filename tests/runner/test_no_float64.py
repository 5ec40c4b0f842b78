"""Devices without float64, as the GPUs of Macs are: on one that is not there."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import far_device
import pytest
import torch
from far_device import FAR, FarDevice, FarTensor, moved
from in_model_driver import make
from torch.utils._pytree import tree_flatten
from zoo import build

from draftree.engine import Engine, SamplingParams
from draftree.runner import HookedRunner, inspect_model
from draftree.runner.hooked.check import check_trees
from draftree.shaping import Fixed
from draftree.training.objective import RANKS
from draftree.training.trainer import DrafterTrainer


@pytest.fixture(autouse=True)
def _no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftree.runner.target.alteration", lambda model: None)  # see test_far_device
    done = far_device._do

    def refusing(func: Any, args: Any, kwargs: dict[str, Any], seen: Any) -> Any:
        leaves = tree_flatten((args, kwargs))[0]
        wide = getattr(func, "__name__", "") == "double" or any(leaf is torch.float64 for leaf in leaves)
        if wide and any(leaf is FAR or isinstance(leaf, FarTensor) for leaf in leaves):
            raise TypeError("the device has no float64")
        return done(func, args, kwargs, seen)

    monkeypatch.setattr(far_device, "_do", refusing)


def test_a_drafter_that_reads_the_head() -> None:
    drafter = make("medusa", build("llama"))
    with FarDevice():
        engine = Engine(moved(copy.deepcopy(build("llama"))), runner="eager", drafter=drafter, slots=1, shape=Fixed(9))
        request = engine.add([5, 9, 20], SamplingParams(max_new_tokens=4))
        engine.run()
    assert request.error is None
    assert len(request.tokens) == 4


def test_a_model_that_nobody_has_tried() -> None:
    with FarDevice():
        model = moved(copy.deepcopy(build("llama")))
        assert check_trees(HookedRunner(inspect_model(model))) < 1e-4


def test_dev_scores() -> None:
    """Of two batches, whose cases count alike."""
    with FarDevice():

        class Objective:
            places = (1,)

            def eval(self) -> Objective:
                return self

            def train(self) -> None: ...

            def __call__(self, loss: float, cases: int) -> dict[str, torch.Tensor]:
                hits, seen = torch.full((1, len(RANKS)), cases // 2), torch.full((1,), cases)
                return {"loss": torch.tensor(loss).to(FAR), "hits": hits.to(FAR), "seen": seen.to(FAR)}

        batches = [{"loss": 1.0, "cases": 2}, {"loss": 4.0, "cases": 4}]
        trainer: Any = SimpleNamespace(
            learner=Objective(),
            dev=batches,
            args=SimpleNamespace(device=FAR, world_size=1, process_index=0, eval_batch_size=1),
            data_collator=lambda picked: picked[0][0],
            compute_loss_context_manager=nullcontext,
            _prepare_inputs=lambda inputs: inputs,
            log=lambda scores: None,
            state=None,
            control=None,
            callback_handler=SimpleNamespace(on_evaluate=lambda *given: None),
        )
        scores = DrafterTrainer.evaluate(trainer)
    assert scores == {"eval_loss": 3.0, "eval_accuracy": [[0.5] * len(RANKS)], "eval_cases": [6]}
