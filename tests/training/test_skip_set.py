"""The search for what to leave out: replay counts what decoding accepts, and the best set tried is what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from few import crossed
from runner_driver import one_thread
from test_training import data_for
from zoo import MEMBERS, build, construct

import draftree
from draftree.drafting.folder import load_drafter
from draftree.files import write_json
from draftree.progress import Watcher
from draftree.runner import CpuRunner, HookedRunner, Runner, inspect_model
from draftree.runner.layout.skip import Skip
from draftree.runner.step_cost import StepCost
from draftree.shaping import Fixed
from draftree.training import skip_set
from draftree.training.options import SearchOptions
from draftree.training.rows import Row
from draftree.training.skip_replay import Prices, Replay, Score
from draftree.training.skip_set import search_skip_set, try_sets

__all__ = ["one_thread"]
STEPS = StepCost((1, 2, 8), (1.0, 1.0, 1.0))
NEW = 40


def answered(model: Any, prompts: list[list[int]]) -> list[Row]:
    rows = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = draftree.generate(model, ids, torch.ones_like(ids), max_new_tokens=NEW, eos_token_id=[])
        rows.append(Row(tuple(out.sequences[0].tolist()), len(prompt)))
    return rows


@pytest.mark.parametrize(
    ("kind", "name", "skip"),
    crossed([CpuRunner, HookedRunner], ["llama", "gemma3"], [Skip.behind(3, 4), Skip.of([2], [3])]),
)
def test_replay_accepts_what_decoding_accepts(kind: type[Runner], name: str, skip: Skip) -> None:
    """Steps, drafted rows and accepted tokens of a real run without any stop but the text's end."""
    model, depth = build(name), 3
    runner = kind(inspect_model(model))
    prompts = [[5, 9, 3, 0, 7, 11, 4], [8, 8, 2, 6, 13, 40, 41, 42, 43, 60]]
    rows = answered(model, prompts)
    replay = Replay(runner, rows, NEW, depth)
    free = Prices(0.0, 0.0, 0.0, STEPS)  # so that every row is worth it
    for row, (true, logp) in zip(rows, replay.chains(skip), strict=True):
        drafter = draftree.SelfSpeculative(
            skip_attention=skip.attention, skip_mlp=skip.mlp, num_draft_tokens=depth, branching=1, confidence=0
        )
        out = draftree.generate(
            model,
            torch.tensor([row.tokens[: row.start]]),
            torch.ones(1, row.start),  # the pad token is one of the prompt's
            drafter=drafter,
            shape=Fixed(depth),
            runner=runner,
            max_new_tokens=NEW,
            eos_token_id=[],
        )
        assert np.isfinite(logp[:, 0]).all()
        right = true.cumprod(1).sum(1)
        at, steps, accepted = 1, 1, 0  # the first step reads the prompt and drafts nothing
        while at < len(true):
            held = min(int(right[at]), len(true) - at - 1)  # the engine drafts no token for the last place
            at, steps, accepted = at + held + 1, steps + 1, accepted + held
        assert (out.stats.total.steps, out.stats.total.accepted) == (steps, accepted)
    assert depth - 0.2 < replay.score(skip, free).rows <= depth  # fewer at the end of the text


def test_speed_is_tokens_over_measured_times() -> None:
    model = build("llama")
    replay = Replay(CpuRunner(inspect_model(model)), answered(model, [[5, 9, 3, 0, 7]]), NEW, 4)
    assert replay.score(Skip(), Prices(0.0, 0.0, 0.0, STEPS)) == pytest.approx(Score(5.0, 1.0, 5.0, 4.0), rel=0.1)
    dear = replay.score(Skip(), Prices(1.0, 0.0, 0.0, STEPS))
    assert dear.rows == 1  # no chain promises enough for a second row
    assert dear.speed == pytest.approx(1.0)
    cheap = Prices(1.0, 0.2, 0.05, STEPS)
    assert cheap.of(Skip.of([1, 2], [3])) == pytest.approx(0.55)
    assert cheap.of(Skip.of(range(9), range(9))) == 0.01


class Table:
    """Scores by hand: every part costs agreement, but leaving attention 1 and MLP 2 out together pays."""

    def score(self, skip: Skip, prices: Prices) -> Score:
        speed = 1.0 - 0.1 * (len(skip.attention) + len(skip.mlp))
        speed += 0.5 * (1 in skip.attention) + 0.5 * (1 in skip.attention and 2 in skip.mlp)
        return Score(speed, 0.5, 1.0, 1.0)


def test_sets_grow_by_what_has_done_best() -> None:
    runner = HookedRunner(inspect_model(build("llama")))
    prices, calls = Prices(1, 0, 0, STEPS), []

    class Counting(Watcher):
        def step(self) -> None:
            calls.append(1)

    def search(**options: Any) -> dict[Skip, Score]:
        return try_sets(runner, Table(), prices, SearchOptions(**options), Counting())  # type: ignore[arg-type]

    tried = search(width=8)
    assert list(tried.items())[:3] == [(s, Table().score(s, prices)) for s in (Skip.behind(n, 4) for n in (1, 2, 3))]
    assert max(tried, key=lambda skip: tried[skip].speed) == Skip.of([1], [2])
    assert len(calls) == len(tried), "no set is tried twice"
    assert len(search(seconds=1e-9)) == 1
    assert len(search(width=1)) < len(tried)


def test_a_search_leaves_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr(
        skip_set, "write_json", lambda path, value: (written.append(path.name), write_json(path, value))
    )
    model = construct(MEMBERS["llama"])
    data = data_for(model, tmp_path / "data", count=50, lengths=12)
    options = SearchOptions(texts=4, places=8, num_draft_tokens=3, width=2)
    told = search_skip_set(model, data, tmp_path / "out", options=options)
    assert written[-1] == "recipe.json", "by which the folder counts as whole"
    drafter = load_drafter(tmp_path / "out", model)
    assert drafter.settings == told["settings"]
    assert told == json.loads((tmp_path / "out" / "recipe.json").read_text())
    tried = json.loads((tmp_path / "out" / "search.json").read_text())
    assert len(tried) == told["sets"] > 11
    best = max(tried, key=lambda one: one["speed"])
    for part in ("skip_attention", "skip_mlp"):
        assert best[part] == drafter.settings[part]
    assert drafter.recipe["predicted_on_dev"]["rows"] >= 1
    assert told["predicted"]["speed"] == best["speed"]
    ids = torch.tensor([[5, 9, 3, 0, 7]])
    expected = draftree.generate(model, ids, torch.ones_like(ids), max_new_tokens=12).sequences
    out = draftree.generate(model, ids, torch.ones_like(ids), drafter=drafter, shape=Fixed(6), max_new_tokens=12)
    assert out.sequences.tolist() == expected.tolist()


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    for options in ({"texts": 0}, {"width": 0}, {"seconds": 0}):
        with pytest.raises(ValueError, match="give more than 0"):
            SearchOptions(**options)
    with pytest.raises(ValueError, match="num_draft_tokens is 5000: give at most 4096"):
        SearchOptions(num_draft_tokens=5000)
    with pytest.raises(ValueError, match="is no data set"):
        search_skip_set(build("llama"), tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match="nothing can be left out"):
        search_skip_set(construct(MEMBERS["llama"], num_hidden_layers=1), tmp_path, tmp_path / "out")
