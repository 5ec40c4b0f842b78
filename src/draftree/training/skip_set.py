"""Search for what SelfSpeculative may leave out: the set with the best predicted speed on recorded texts.

"Draft & Verify" (Zhang et al., 2024) searches by Bayesian optimisation over decoding runs. Here a set costs a replay of
recorded texts (`draftree.training.skip_replay`), and sets grow greedily by the parts that have done best so far: one
part more in each round, a few parts tried in it. That is bounded, repeatable, and leaves a path to look at.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from draftree.drafting.folder import base_of
from draftree.drafting.self_speculative import SelfSpeculative
from draftree.files import write_json
from draftree.progress import Watcher
from draftree.runner import Runner, open_runner
from draftree.runner.layout.skip import Skip
from draftree.training.options import RECIPE, SearchOptions, check_out
from draftree.training.rows import read_data, spread
from draftree.training.session import command
from draftree.training.skip_replay import ROUNDS, Prices, Replay, Score, measure_prices, parted

PATIENCE = 4  # rounds without a better set, after which the search ends


def _with(skip: Skip, part: Skip) -> Skip:
    return Skip(skip.attention | part.attention, skip.mlp | part.mlp)


def try_sets(
    runner: Runner, replay: Replay, prices: Prices, options: SearchOptions, watcher: Watcher
) -> dict[Skip, Score]:
    """Every set that was tried, in order, and its score.

    First every exit layer and every single part; then, round by round, the set grows by the part of the most
    promising ones that makes the fastest set. `replay` is of the texts to search on.
    """
    layers = len(runner.target.layers)
    deadline = time.monotonic() + options.seconds
    tried: dict[Skip, Score] = {}

    def attempt(skip: Skip) -> Score:
        tried[skip] = replay.score(skip, prices)
        watcher.step()
        return tried[skip]

    if parted(runner):
        parts = [Skip.of([i]) for i in range(layers)] + [Skip.of((), [i]) for i in range(layers)]
    else:
        parts = [Skip.of([i], [i]) for i in range(layers)]
    watcher.stage("trying sets", None)
    for skip in (*(Skip.behind(n, layers) for n in range(1, layers)), *parts):
        if time.monotonic() < deadline or not tried:
            attempt(skip)
    worth = {part: tried[part].speed for part in parts if part in tried}
    grown, best, stale = Skip(), -math.inf, 0
    while worth and stale < PATIENCE and time.monotonic() < deadline:
        promising = sorted(worth, key=worth.__getitem__, reverse=True)[: options.width]
        for part in promising:
            larger = _with(grown, part)
            if larger.kept(layers) and time.monotonic() < deadline:
                worth[part] = (tried.get(larger) or attempt(larger)).speed
            else:
                worth[part] = -math.inf
        chosen = max(promising, key=worth.__getitem__)
        speed = worth.pop(chosen)
        if not math.isfinite(speed):
            break
        grown = _with(grown, chosen)
        stale = 0 if speed > best else stale + 1
        best = max(best, speed)
    return tried


def search_skip_set(
    model: Any,
    data: Path,
    out: Path,
    *,
    options: SearchOptions | None = None,
    runner: str = "auto",
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Search what SelfSpeculative leaves out of `model`, and write the drafter's folder; returns its recipe.

    Args:
        model: the target.
        data: a data set of `draftree train data`, made by this model.
        out: folder to write: the drafter's, recipe.json (everything that made it, and its predicted speed), and
            search.json with every set tried.
        options: see there.
        runner: that decoding will use, as times are its: auto, hooked, eager, cpu, cuda_graphs or in_place.
        watcher: shows how far it is.

    Raises:
        ValueError: bad data or options, or a folder with a finished result that is not to be replaced.
    """
    options = options or SearchOptions()
    check_out(out, SelfSpeculative.method, force=options.force)
    driver = open_runner(model, runner)
    layers = len(driver.target.layers)
    if layers < 2:
        raise ValueError("The model has one layer, so nothing can be left out: use another drafter.")
    rows = read_data(data, driver.target, options.max_length)
    watcher = watcher or Watcher()
    watcher.stage("reading texts and timing rows", None)
    replay = Replay(driver, spread(rows.train, options.texts), options.places, options.num_draft_tokens)
    prices = measure_prices(driver, replay)
    begin = time.monotonic()
    tried = try_sets(driver, replay, prices, options, watcher)
    best = max(tried, key=lambda skip: tried[skip].speed)
    timed = min(replay.time_row(best) for _ in range(ROUNDS))
    dev = Replay(driver, spread(rows.dev, options.texts), options.places, options.num_draft_tokens)
    held_out, whole = dev.score(best, prices), dev.score(Skip(), prices)
    settings = {"num_draft_tokens": options.num_draft_tokens}
    drafter = SelfSpeculative.fresh(
        driver.target.model, skip_attention=sorted(best.attention), skip_mlp=sorted(best.mlp), **settings
    )
    drafter.base = base_of(driver.target.model)
    recipe = {
        "method": drafter.method,
        "base_model": asdict(drafter.base),
        "settings": drafter.settings,
        "search": options.recorded(),
        "seconds": round(time.monotonic() - begin, 1),
        "sets": len(tried),
        "runner": driver.form,
        "row_seconds": {"whole": prices.row, "attention": prices.attention, "mlp": prices.mlp, "best": timed},
        "step_seconds": float(prices.steps.of(1)),
        "predicted": tried[best]._asdict(),
        "predicted_on_dev": held_out._asdict(),
        "predicted_with_nothing_left_out": whole._asdict(),
        "data": rows.about,
        "threads": torch.get_num_threads(),
        "command": command(),
    }
    drafter.recipe = {name: recipe[name] for name in ("search", "sets", "predicted_on_dev")}
    drafter.save_pretrained(out)
    sets = [
        {"skip_attention": sorted(skip.attention), "skip_mlp": sorted(skip.mlp), **score._asdict()}
        for skip, score in tried.items()
    ]
    write_json(out / "search.json", sets)
    write_json(out / RECIPE, recipe)
    return recipe
