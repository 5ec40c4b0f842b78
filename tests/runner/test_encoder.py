"""The encoder's side: sources padded against each other, requests that join, move and leave, one run a request."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo
from runner_driver import Tree, difference, one_thread, random_ids, runners_for, stock_logits  # noqa: F401
from torch import Tensor

from draftree.runner import HookedRunner, T5Runner, open_runner
from draftree.runner.base import Runner
from draftree.runner.kv.encoder import EncoderState
from draftree.runner.plan import Plan
from draftree.runner.target import inspect_model

FAMILIES = ("t5", "umt5", "bart", "m2m_100")


class Scheduler:
    """Requests in slots, each with a source, as the engine keeps them: live slots are contiguous."""

    def __init__(self, runner: Runner, slots: int) -> None:
        self.runner, self.cache = runner, runner.new_cache(slots)
        self.encoder = runner.new_encoder(slots)
        self.texts: list[Tensor] = []
        self.sources: list[Tensor] = []

    def join(self, source: Tensor, text: Tensor) -> None:
        slot = len(self.texts)
        self.encoder.admit(slot, source)
        self.texts.append(text)
        self.sources.append(source)
        causal = torch.ones(1, len(text), len(text), dtype=torch.bool).tril()
        result = self.runner.run(
            Plan(text[None], torch.arange(len(text))[None], causal), self.cache, slot, self.encoder
        )
        self.cache.commit([list(range(len(text)))], result.segments)

    def leave(self, slot: int) -> None:
        last = len(self.texts) - 1
        if slot != last:
            self.cache.move(last, slot)
            self.encoder.move(last, slot)
            self.texts[slot], self.sources[slot] = self.texts[last], self.sources[last]
        self.cache.clear(last)
        self.encoder.clear(last)
        self.texts.pop(), self.sources.pop()

    def step(self, trees: list[Tree]) -> float:
        """One pass over all requests; commits each one's deepest branch; returns the largest difference."""
        width = max(t.size for t in trees)
        tokens = torch.stack([torch.nn.functional.pad(t.tokens, (0, width - t.size)) for t in trees])
        depths = torch.tensor([t.depths + [0] * (width - t.size) for t in trees])
        positions = depths + torch.tensor([len(t) for t in self.texts])[:, None]
        seen = torch.stack([t.visible(width) for t in trees])
        result = self.runner.run(Plan(tokens, positions, seen), self.cache, 0, self.encoder)
        worst, rows = 0.0, [max(t.branches, key=len) for t in trees]
        for b, tree in enumerate(trees):
            sequences = [torch.cat([self.texts[b], tree.tokens[branch]]) for branch in tree.branches]
            stock = stock_logits(self.runner.target.model, sequences, self.sources[b])
            worst = max(worst, difference(result.logits[b, : tree.size], stock))
        self.cache.commit(rows, result.segments)
        self.texts = [torch.cat([x, t.tokens[r]]) for x, t, r in zip(self.texts, trees, rows, strict=True)]
        return worst


@pytest.mark.parametrize(("name", "which"), [(name, which) for name in FAMILIES for which in (0, -1)])
def test_requests_join_move_and_leave(name: str, which: int) -> None:
    runner = runners_for(zoo.build(name))[which]
    generator = torch.Generator().manual_seed(4)
    slots = Scheduler(runner, 3)
    slots.join(random_ids(5, generator), random_ids(4, generator))
    assert slots.step([Tree.random(6, 1)]) < 1e-4
    slots.join(random_ids(90, generator), random_ids(1, generator))  # a longer source: the store grows
    slots.join(random_ids(9, generator), random_ids(7, generator))
    assert slots.step([Tree.random(6, 2), Tree.random(4, 3), Tree.random(7, 4)]) < 1e-4
    slots.leave(0)
    assert slots.step([Tree.random(5, 5), Tree.random(5, 6)]) < 1e-4
    slots.leave(1)
    slots.join(random_ids(3, generator), random_ids(2, generator))  # in a slot that held more
    assert slots.step([Tree.random(5, 7), Tree.random(6, 8)]) < 1e-4


def test_two_threads_share_a_compiled_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftree.runner.cpu.layers.WORTH_THREADS", 0)
    torch.set_num_threads(2)
    try:
        test_requests_join_move_and_leave("t5", -1)
    finally:
        torch.set_num_threads(1)


def test_the_source_matters() -> None:
    """Another request's source gives other logits, so the comparisons above could fail."""
    for runner in [runner for name in FAMILIES for runner in runners_for(zoo.build(name))]:
        generator = torch.Generator().manual_seed(4)
        slots = Scheduler(runner, 1)
        slots.join(random_ids(6, generator), random_ids(4, generator))
        slots.sources[0] = random_ids(6, generator)
        assert slots.step([Tree.random(6, 2)]) > 1e-3


def test_known_encoder_states_take_the_encoders_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("bart")
    runner = runners_for(model)[0]
    source = torch.tensor([5, 9, 11, 12])
    with torch.no_grad():
        states = model.get_encoder()(input_ids=source[None])[0][0]
    given, ran = EncoderState(runner.target, 1), EncoderState(runner.target, 1)
    ran.admit(0, source)
    monkeypatch.setattr(type(model.get_encoder()), "forward", None)  # it must not run again
    given.admit(0, None, states=states)
    for ours, theirs in zip(given.keys + given.values, ran.keys + ran.values, strict=True):
        assert torch.equal(ours, theirs)


def test_encoder_and_cross_projections_run_once_a_request() -> None:
    model = zoo.build("t5")
    runner = runners_for(model)[0]
    calls: list[str] = []
    cross: Any = model.decoder.block[1].layer[1].EncDecAttention.k
    handles = [
        model.encoder.register_forward_hook(lambda *_: calls.append("encoder")),
        cross.register_forward_hook(lambda *_: calls.append("cross")),
    ]
    try:
        run = Scheduler(runner, 1)
        run.join(torch.tensor([5, 6, 7]), torch.tensor([3, 4]))
        assert calls == ["encoder", "cross"]
        text = torch.tensor([[8]])
        for _ in range(3):
            runner.run(Plan(text, text * 0 + 2, torch.ones(1, 1, 1, dtype=torch.bool)), run.cache, 0, run.encoder)
        assert calls == ["encoder", "cross"]
    finally:
        for handle in handles:
            handle.remove()


def test_decoders_that_are_not_compiled() -> None:
    hooked = copy.deepcopy(zoo.build("t5"))
    hooked.decoder.block[1].register_forward_hook(lambda *_: None)
    other = copy.deepcopy(zoo.build("t5"))
    dense = other.decoder.block[0].layer[2].DenseReluDense
    dense.wo = type("OtherLinear", (torch.nn.Linear,), {})(dense.wo.in_features, dense.wo.out_features, bias=False)
    near = zoo.construct(zoo.MEMBERS["t5"], relative_attention_max_distance=3)  # below half of its buckets
    bart, umt5, halves = zoo.build("bart"), zoo.build("umt5"), copy.deepcopy(zoo.build("t5")).bfloat16()
    for model in (bart, umt5, halves, hooked, other, near):
        assert not T5Runner.qualifies(inspect_model(model))
        assert type(open_runner(model)) is HookedRunner
    assert type(open_runner(zoo.build("t5"))) is T5Runner
    assert type(open_runner(zoo.build("t5"), "hooked")) is HookedRunner
