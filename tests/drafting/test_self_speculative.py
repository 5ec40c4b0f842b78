"""SelfSpeculative: what it drafts, that nothing of it stays, what it refuses; equal texts are in the one matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from generate_driver import LENGTHS, left_pad, prompts, same
from runner_driver import one_thread
from zoo import MEMBERS, build, construct

import draftree
from draftree.drafting import SelfSpeculative, self_speculative
from draftree.drafting.base import Place, RequestState
from draftree.drafting.folder import base_of, load_drafter
from draftree.drafting.self_speculative import run_chains
from draftree.engine.engine import Engine
from draftree.engine.request import SamplingParams
from draftree.runner import CpuRunner, EagerRunner, HookedRunner, Runner, inspect_model
from draftree.runner.base import note_preparation
from draftree.runner.layout.skip import Skip
from draftree.runner.plan import Plan
from draftree.shaping import Fixed

__all__ = ["one_thread"]
SKIP = {"skip_attention": [2], "skip_mlp": [2, 3]}


def engine(model: Any, drafter: Any, runner: str, slots: int = 3) -> Engine:
    return Engine(model, drafter=drafter, shape=None if drafter is None else Fixed(12), runner=runner, slots=slots)


@pytest.mark.parametrize("runner", ["cpu", "hooked"])
@pytest.mark.parametrize("options", [{"exit_layer": 2}, SKIP], ids=["exit", "skip"])
def test_nothing_drafted_stays_in_the_cache(runner: str, options: dict[str, Any]) -> None:
    """After as many tokens all columns of texts are those of an engine that never drafted, in every layer."""
    model = build("llama")
    caches, engines = [], []  # an engine that is dropped lets its requests go
    for drafter in (None, SelfSpeculative(confidence=0, branching=3, **options)):
        made = engine(model, drafter, runner)
        engines.append(made)
        requests = [made.add(row, SamplingParams(max_new_tokens=100)) for row in prompts(LENGTHS)]
        while min(len(r.output) for r in requests) < 24:
            made.step()
        assert [n == len(r.context.tokens) - 1 for n, r in zip(made.cache.lengths, requests, strict=True)]
        caches.append((made.cache, [r.context.tokens[:] for r in requests]))
        assert drafter is None or min(r.stats.accepted for r in requests) + max(r.stats.accepted for r in requests) > 0
    (plain, said), (drafted, also) = caches
    for slot, (one, other) in enumerate(zip(said, also, strict=True)):
        n = min(len(one), len(other)) - 1
        assert one[:n] == other[:n]
        for layer in range(4):
            for store in ("_keys", "_values"):
                ours, theirs = (getattr(c, store)[layer][slot, :, :n] for c in (drafted, plain))
                if runner == "cpu":
                    assert torch.equal(ours, theirs), (slot, layer, store)
                else:
                    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("runner", ["cpu", "hooked"])
def test_requests_that_come_and_go(runner: str) -> None:
    """Five requests of different lengths in two slots: slots move, texts stay those of each alone."""
    model = build("qwen3")
    made = engine(model, SelfSpeculative(confidence=0, exit_layer=3), runner, slots=2)
    rows = prompts((5, 21, 9, 13, 7))
    requests = [made.add(row, SamplingParams(max_new_tokens=8 + 5 * i)) for i, row in enumerate(rows)]
    made.run()
    for i, (row, request) in enumerate(zip(rows, requests, strict=True)):
        alone = draftree.generate(model, torch.tensor([row]), max_new_tokens=8 + 5 * i, runner=runner, eos_token_id=[])
        assert request.tokens == alone.sequences[0, len(row) :].tolist()
        assert request.context.place is None
    assert sum(r.stats.accepted for r in requests) > 0


def in_cache(runner: Runner, texts: list[list[int]]) -> list[RequestState]:
    """Requests whose texts but for the newest token are in a cache."""
    cache = runner.new_cache(len(texts))
    contexts = []
    for slot, text in enumerate(texts):
        n = len(text) - 1
        plan = Plan(torch.tensor([text[:-1]]), torch.arange(n)[None], torch.ones(1, n, n).tril().bool())
        result = runner.run(plan, cache, slot)
        cache.commit([list(range(n))], result.segments)
        contexts.append(RequestState(slot, text, n, 50, place=Place(runner, cache, None, slot)))
    return contexts


@pytest.mark.parametrize("options", [{"exit_layer": 2}, SKIP], ids=["exit", "skip"])
def test_all_runners_draft_the_same(options: dict[str, Any]) -> None:
    trees = []
    for kind in (CpuRunner, HookedRunner, EagerRunner):
        runner = kind(inspect_model(build("llama")))
        drafter = SelfSpeculative(confidence=0, num_draft_tokens=5, branching=3, **options)
        drafter.bind(runner.target)
        contexts = in_cache(runner, prompts((21, 13, 17)))
        with runner.guard():
            trees.append(drafter.draft(contexts, [12, 0, 4]))
        assert contexts[0].place is not None
        assert contexts[0].place.cache.lengths == [20, 12, 16]
    for tree in trees:
        assert tree.sizes == (13, 1, 5)
        for name in ("tokens", "parents", "logp"):
            torch.testing.assert_close(getattr(tree, name), getattr(trees[0], name), rtol=0, atol=1e-4)


def test_the_chain_is_what_the_rest_of_the_model_says() -> None:
    """Token by token, the whole model's keys and values before the newest token and the rest's own behind it."""
    runner = HookedRunner(inspect_model(build("llama")))
    (context,) = in_cache(runner, prompts((21,)))
    drafter = SelfSpeculative(exit_layer=2, confidence=0, num_draft_tokens=4, branching=1)
    drafter.bind(runner.target)
    chain = drafter.draft([context], [9]).tokens[0].tolist()
    (again,) = in_cache(runner, prompts((21,)))
    assert again.place is not None
    cache, said = again.place.cache, [context.tokens[-1]]
    for _ in range(4):
        n = len(said)
        plan = Plan(
            torch.tensor([said]), 20 + torch.arange(n)[None], torch.ones(1, n, n).tril().bool(), skip=Skip.behind(2, 4)
        )
        said.append(int(runner.run(plan, cache).logits[0, -1].argmax()))
    assert chain == said


def test_nothing_is_looked_for_beyond_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def run(place: Place, last: list[int], reaches: list[int], *rest: Any, **options: Any) -> Any:
        asked.append(max(reaches))
        return run_chains(place, last, reaches, *rest, **options)

    monkeypatch.setattr(self_speculative, "run_chains", run)
    drafter = SelfSpeculative(exit_layer=2, confidence=0, num_draft_tokens=6)
    ids = torch.tensor(prompts((12,)))
    draftree.generate(build("llama"), ids, drafter=drafter, shape=Fixed(2), max_new_tokens=16)
    assert set(asked) == {1, 2}


@pytest.mark.parametrize("prepares", [False, True])
def test_passes_that_prepare_later_ones_are_not_timed(prepares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the recording of a pass, which takes many times as long."""
    model, timed = build("llama"), list[float]()
    drafters = SelfSpeculative(exit_layer=2, confidence=0), draftree.DraftModel(build("llama"), confidence=0)
    run = HookedRunner.run

    def running(self: HookedRunner, *given: Any) -> Any:
        if prepares:
            note_preparation()
        return run(self, *given)

    monkeypatch.setattr(HookedRunner, "run", running)
    for drafter in drafters:
        monkeypatch.setattr(drafter._times, "passed", timed.append)
        drafter._choice = "hooked"
        ids = torch.tensor(prompts((12,)))
        draftree.generate(model, ids, drafter=drafter, shape=Fixed(4), max_new_tokens=8, runner="hooked")
        assert bool(timed) is not prepares


def test_where_a_chain_ends() -> None:
    runner = EagerRunner(inspect_model(build("llama")))

    def drafted(texts: list[list[int]], eos: tuple[int, ...] = (), room: int = 50, **options: Any) -> list[int]:
        drafter = SelfSpeculative(exit_layer=2, branching=1, **{"confidence": 0.0, "num_draft_tokens": 6} | options)
        drafter.bind(runner.target)
        contexts = in_cache(runner, texts)
        for context in contexts:
            context.room, context.eos_token_ids = room, eos
        with torch.inference_mode():
            return drafter.draft(contexts, [9] * len(texts)).tokens[0].tolist()[1:]

    (text,) = prompts((21,))
    whole = drafted([text])
    assert len(whole) == 6
    assert drafted([text], room=4) == whole[:3]
    assert drafted([text], room=1) == []
    assert drafted([text], confidence=1.0) == whole[:1]
    assert drafted([text], num_draft_tokens=2) == whole[:2]
    end = next(i for i, token in enumerate(whole) if i and token not in whole[:i])
    assert drafted([text], eos=(whole[end],)) == whole[: end + 1]
    drafter = SelfSpeculative(exit_layer=2)
    drafter.bind(runner.target)
    (context,) = in_cache(runner, [text])
    context.tokens = [*context.tokens, 5]  # not read yet: nothing to draft from
    assert drafter.draft([context], [9]).sizes == (1,)
    assert drafter.draft([RequestState(7, text, 3, 50)], [9]).sizes == (1,)


def test_an_error_in_a_draft_leaves_lengths_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = HookedRunner(inspect_model(build("llama")))
    (context,) = in_cache(runner, prompts((21,)))
    drafter = SelfSpeculative(exit_layer=2, confidence=0)
    drafter.bind(runner.target)
    runs, run = [], HookedRunner.run

    def failing(*args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        if len(runs) == 3:
            raise RuntimeError("no more")
        return run(*args, **kwargs)

    monkeypatch.setattr(HookedRunner, "run", failing)
    with pytest.raises(RuntimeError, match="no more"):
        drafter.draft([context], [9])
    assert context.place is not None
    assert context.place.cache.lengths == [20]


def test_beside_a_trie_and_under_sampling() -> None:
    ids, mask = left_pad(prompts())
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.7, "seed": 3}
    expected = draftree.generate(build("llama"), ids, mask, **options).sequences
    merged = draftree.Merge([draftree.Lookahead(), SelfSpeculative(confidence=0, **SKIP)])
    out = draftree.generate(build("llama"), ids, mask, drafter=merged, shape=Fixed(16), **options)
    same(out.sequences, expected)
    assert any("self-speculative" in source for source in out.stats.total.accepted_by_source)


def test_a_folder_keeps_it(tmp_path: Path) -> None:
    model = build("llama")
    drafter = SelfSpeculative.fresh(model, num_draft_tokens=3, **SKIP)
    drafter.base = base_of(model)
    drafter.save_pretrained(tmp_path)
    held = load_drafter(tmp_path, model)
    assert isinstance(held, SelfSpeculative)
    assert held.shapes() == {"hidden_size": 64, "layers": 4}
    assert held.settings == drafter.settings
    with pytest.raises(ValueError, match="for a layers of 4, and this model has 6"):
        load_drafter(tmp_path, construct(MEMBERS["llama"], num_hidden_layers=6))
    with pytest.raises(ValueError, match="trained for 'llama' with other weights"):
        load_drafter(tmp_path, construct(MEMBERS["llama-tied"]))


def test_one_made_for_no_model_is_not_saved(tmp_path: Path) -> None:
    drafter = SelfSpeculative(exit_layer=2)
    for base in (None, base_of(build("llama"))):
        drafter.base = base
        with pytest.raises(ValueError, match="made for no model: make it by SelfSpeculative"):
            drafter.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give exit_layer, or skip_attention and skip_mlp"),
        ({"exit_layer": 2, "skip_mlp": [1]}, "not both"),
        ({"exit_layer": 0}, "exit_layer is 0: give at least 1"),
        ({"exit_layer": 2.5}, r"exit_layer is 2\.5: give a whole number"),
        ({"exit_layer": 2, "num_draft_tokens": 0}, "num_draft_tokens is 0"),
        ({"exit_layer": 2, "branching": 0}, "branching is 0"),
        ({"exit_layer": 2, "confidence": 1.5}, "give a probability"),
    ],
)
def test_bad_options_are_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SelfSpeculative(**options)


@pytest.mark.parametrize(
    ("layers", "message"),
    [(3, "skip_mlp is 3: give a list"), ("12", "skip_mlp is '12': give a list"), ([1, 1.5], r"skip_mlp lists 1\.5")],
)
def test_layers_are_a_list_of_whole_numbers(layers: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        SelfSpeculative(skip_mlp=layers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit_layer": 4}, "the model has 4 layers: give 1 to 3"),
        ({"skip_attention": [4]}, "skip_attention names layer 4: this model has layers 0 to 3"),
        ({"skip_mlp": [-1]}, "skip_mlp names layer -1"),
        ({"skip_attention": range(4), "skip_mlp": range(4)}, "keep a layer or more"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_any_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draftree.generate(build("llama"), torch.tensor([[5, 6]]), drafter=SelfSpeculative(**options))
