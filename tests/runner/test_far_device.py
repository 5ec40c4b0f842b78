"""Steps on a simulated device: copies and waits are counted, and tensors of the CPU must not be mixed in."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
from drafters_for_tests import RandomTree
from far_device import FAR, FarDevice, moved
from few import crossed
from generate_driver import LENGTHS, NEW, drafters, hf, left_pad, prompts, references_of
from in_model_driver import MAKERS, make
from runner_driver import one_thread  # noqa: F401
from zoo import build

from draftree.drafting import Drafter
from draftree.engine import Engine, SamplingParams
from draftree.runner import choose, inspect_model
from draftree.shaping import Fixed

FORMS = ("cuda_graphs", "eager")


@pytest.fixture(autouse=True)
def _class_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights of the simulated device's class count as stock weights."""
    monkeypatch.setattr("draftree.runner.target.alteration", lambda model: None)


def far_engine(form: str, drafter: Drafter | None, **options: Any) -> Engine:
    """Return an engine on a copy of the model that lies on the device; to be called in it."""
    model = moved(copy.deepcopy(build("llama")))
    assert model.device == FAR
    target = inspect_model(model)
    runner = choose(target, form)(target)
    return Engine(
        model, runner=runner, drafter=drafter, slots=3, shape=None if drafter is None else Fixed(9), **options
    )


def answers(batch: int) -> tuple[list[list[int]], list[list[int]], Any]:
    rows = prompts(LENGTHS[:batch])
    ids, mask = left_pad(rows)
    expected = hf(build("llama"), ids, mask)
    return rows, [text[ids.shape[1] :].tolist() for text in expected], references_of(rows, expected)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("drafting", [False, True], ids=["plain", "drafted"])
def test_a_step_waits_once(batch: int, drafting: bool) -> None:
    """One copy brings the pass's inputs, one copy back the best tokens; moved rows take another."""
    rows, texts, references = answers(batch)
    with FarDevice() as device:
        engine = far_engine("cuda_graphs", RandomTree(references, 1) if drafting else None)
        requests = [engine.add(row, SamplingParams(max_new_tokens=NEW, eos_token_ids=(2,))) for row in rows]
        engine.step()  # prompts are read
        moves = 0
        while engine.busy:
            device.seen.clear()
            engine.step()
            to_device = device.seen.pop("to device")
            moves += to_device - 1
            assert dict(device.seen) == {"to_cpu": 1}
            assert to_device <= 1 + batch
    assert [r.tokens for r in requests] == [text[: len(r.tokens)] for r, text in zip(requests, texts, strict=True)]
    assert sum(r.stats.accepted for r in requests) > 5 * drafting - 1
    assert (moves > 0) == drafting


ROWS, TEXTS, REFERENCES = answers(3)
KINDS = drafters(REFERENCES) | {name: partial(make, name, build("llama")) for name in MAKERS}
ELSEWHERE = (
    "draft-model",
    "bild-lossless",
    "draft-model-ahead",
    "in-model",
)  # models or tensors of their own on the CPU


@pytest.mark.parametrize(("form", "kind"), crossed([*FORMS], [kind for kind in KINDS if kind not in ELSEWHERE]))
def test_a_drafter_keeps_to_its_device(form: str, kind: str) -> None:
    with FarDevice():
        engine = far_engine(form, KINDS[kind]())
        requests = [engine.add(row, SamplingParams(max_new_tokens=NEW // 2, eos_token_ids=(2,))) for row in ROWS]
        engine.run()
    for request, text in zip(requests, TEXTS, strict=True):
        assert request.error is None
        assert request.tokens == text[: len(request.tokens)]
