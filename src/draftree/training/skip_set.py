"""Search for what SelfSpeculative may leave out: the set with the best predicted speed on recorded texts.

"Draft & Verify" (Zhang et al., 2024, section 3.3) searches by decoding; here texts that the model has written are
replayed. A chain of guesses is accepted as far as it is the text, so the rows of all chains are known beforehand: those
from every place go through the model in a few wide passes, each seeing the whole model's keys and values before its
place and its own chain's behind it, as in drafting. That gives acceptance exactly (greedy), without decoding. Times are
measured: of rows with and without attentions and MLPs, and of verifying passes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from draftree.drafting.base import Seat
from draftree.drafting.folder import base_of
from draftree.drafting.self_speculative import WORTH, SelfSpeculative, run_chains
from draftree.host import Host, open_host
from draftree.host.bypass import omitted_modules
from draftree.host.cost import StepCost, cached_cost
from draftree.host.encoder import EncoderState
from draftree.host.plan import Plan
from draftree.host.skip import Omitted, Skip
from draftree.training.rows import Row, read_data

if TYPE_CHECKING:
    from draftree.bench.harness import Watcher

CHUNK = 512  # rows of a pass
TIMED = 8  # rows in a timing
ROUNDS = 12  # timings of each kind; the fastest counts
PATIENCE = 4  # rounds without a better set, after which the search ends


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options of a search.

    Attributes:
        texts: recorded texts to search on; as many others, of the dev part, to report on.
        places: places of each text from which chains are guessed, from the answer's first on.
        num_draft_tokens: longest chain.
        width: parts tried in a round, the most promising ones; the first round tries all.
        seconds: after which no further set is tried.
        max_length: texts with more tokens are left out; None for none.
    """

    texts: int = 16
    places: int = 48
    num_draft_tokens: int = 6
    width: int = 4
    seconds: float = 600.0
    max_length: int | None = None

    def __post_init__(self) -> None:
        for name in ("texts", "places", "num_draft_tokens", "width", "seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give more than 0.")


class Score(NamedTuple):
    """What a set is worth.

    Attributes:
        speed: predicted tokens a second, over those of plain decoding.
        agreement: share of places where the first guess holds.
        length: tokens a step, the whole model's own included.
        rows: drafted rows a step.
    """

    speed: float
    agreement: float
    length: float
    rows: float


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds, measured.

    Attributes:
        row: of a drafted row with nothing left out.
        attention: what leaving out one attention saves of it.
        mlp: what leaving out one MLP saves of it.
        steps: of verifying passes, by rows.
    """

    row: float
    attention: float
    mlp: float
    steps: StepCost

    def of(self, skip: Skip) -> float:
        """Of a drafted row."""
        saved = len(skip.attention) * self.attention + len(skip.mlp) * self.mlp
        return max(self.row - saved, 0.01 * self.row)


class Replay:
    """Recorded texts in a cache, and chains of guesses at them.

    Args:
        host: drives the model.
        rows: the texts.
        places: most places of each.
        depth: longest chain.
    """

    def __init__(self, host: Host, rows: Sequence[Row], places: int, depth: int) -> None:
        self._host, self._depth = host, depth
        self._cache = host.new_cache(len(rows), max(map(len, rows)) + CHUNK)
        self._encoder = EncoderState(host.target, len(rows)) if host.target.encoder_decoder else None
        self._texts = [list(row.tokens) for row in rows]
        self._floors = [row.start for row in rows]
        self._roots = [
            range(row.start - 1, min(row.start - 1 + places, len(text) - 1))
            for row, text in zip(rows, self._texts, strict=True)
        ]
        with host.lock, host.guard():
            for slot, row in enumerate(rows):
                self._read(slot, row)

    def _read(self, slot: int, row: Row) -> None:
        device = self._host.target.device
        if self._encoder is not None:
            self._encoder.admit(slot, torch.tensor(row.source, device=device))
        for begin in range(0, len(row), CHUNK):
            ids = torch.tensor([row.tokens[begin : begin + CHUNK]], device=device)
            n = ids.shape[1]
            causal = torch.ones(1, n, n, dtype=torch.bool, device=device).tril()
            places = begin + torch.arange(n, device=device)[None]
            plan = Plan(ids, places, causal, first_logit_row=n - 1, rope_floor=(row.start,))
            result = self._host.run(plan, self._cache, slot, self._encoder)
            self._cache.commit([list(range(n))], result.segments)

    def chains(self, skip: Skip) -> list[tuple[np.ndarray, np.ndarray]]:
        """By text: whether guesses [places, depth] are the text, and their log-probabilities there."""
        with self._host.lock, self._host.guard():
            return [self._of_text(slot, skip) for slot in range(len(self._texts))]

    def _of_text(self, slot: int, skip: Skip) -> tuple[np.ndarray, np.ndarray]:
        roots, depth = self._roots[slot], self._depth
        true = np.zeros((len(roots), depth), dtype=bool)
        logp = np.full((len(roots), depth), -np.inf, dtype=np.float32)
        each = max(CHUNK // depth, 1)
        for begin in range(0, len(roots), each):
            part = roots[begin : begin + each]
            true[begin : begin + each], logp[begin : begin + each] = self._pass(slot, part, skip)
        return true, logp

    def _pass(self, slot: int, roots: range, skip: Skip) -> tuple[np.ndarray, np.ndarray]:
        text, depth, device = self._texts[slot], self._depth, self._host.target.device
        length, count = len(text), len(roots) * self._depth
        # Rows beyond the text's end stay at it: they guess nothing that counts.
        places = np.array([[min(root + j, length - 2) for j in range(depth)] for root in roots])
        chain = np.arange(count) // depth
        visible = np.zeros((count, length + count), dtype=bool)
        visible[:, :length] = np.arange(length) < np.array(roots)[chain, None]
        visible[:, length:] = (chain[:, None] == chain) & np.tri(count, dtype=bool)
        known = np.array(text)
        plan = Plan(
            torch.from_numpy(known[places].reshape(1, -1)).to(device),
            torch.from_numpy(places.reshape(1, -1)).to(device),
            torch.from_numpy(visible[None]).to(device),
            rope_floor=(self._floors[slot],),
            skip=skip,
        )
        result = self._host.run(plan, self._cache, slot, self._encoder)
        best = result.logits[0].float().log_softmax(-1).max(-1)
        inside = np.array(roots)[:, None] + np.arange(depth) < length - 1
        guesses = best.indices.cpu().numpy().reshape(-1, depth)
        scores = best.values.cpu().numpy().reshape(-1, depth)
        return (guesses == known[places + 1]) & inside, np.where(inside, scores, -np.inf)

    def score(self, skip: Skip, prices: Prices) -> Score:
        """Walk the texts as decoding would, each step from where the one before ended."""
        row, plain = prices.of(skip), float(prices.steps.of(1))
        least = math.log(max(min(WORTH * row / plain, 1.0), 1e-30))
        steps = prices.steps.of(np.arange(1, self._depth + 2))
        tokens = drafted = passes = first = places = 0
        seconds = 0.0
        for true, logp in self.chains(skip):
            first, places = first + int(true[:, 0].sum()), places + len(true)
            # Another row is drafted as long as the chain so far is worth it.
            worth = (np.cumsum(logp, 1)[:, :-1] >= least).cumprod(1).sum(1)
            rows = 1 + worth
            right = true.cumprod(1).sum(1)
            at = 0
            while at < len(true):
                accepted = int(min(right[at], rows[at]))
                tokens, drafted, passes = tokens + accepted + 1, drafted + int(rows[at]), passes + 1
                seconds += int(rows[at]) * row + float(steps[int(rows[at])])
                at += accepted + 1
        return Score(tokens * plain / seconds, first / places, tokens / passes, drafted / passes)

    def time_row(self, skip: Skip) -> float:
        """Seconds of a drafted row behind the first text."""
        seat = Seat(self._host, self._cache, self._encoder, 0)
        newest, floor = self._texts[0][-1], self._floors[0]
        with self._host.guard():
            begin = time.perf_counter()
            run_chains(seat, [newest], [TIMED], skip, best=1, least=-math.inf, ends=(), floors=[floor])
            return (time.perf_counter() - begin) / TIMED


def measure_prices(host: Host, replay: Replay) -> Prices:
    """Time drafted rows with everything, without any attention and without any MLP, interleaved."""
    layers = range(len(host.target.layers))
    without = {"attention": Skip.of(layers), "mlp": Skip.of((), layers)}
    if not _parted(host):  # then layers are left out whole, and it does not matter which part costs what
        without = dict.fromkeys(without, Skip.behind(1, len(layers)))
    fastest = {"all": math.inf} | dict.fromkeys(without, math.inf)
    for _ in range(ROUNDS):
        for kind, skip in ({"all": Skip()} | without).items():
            fastest[kind] = min(fastest[kind], replay.time_row(skip))
    row, parts = fastest["all"], len(layers) if _parted(host) else 2 * (len(layers) - 1)
    attention, mlp = (max(row - fastest[kind], 0.0) / parts for kind in without)
    return Prices(row, attention, mlp, cached_cost(host))


def _parted(host: Host) -> bool:
    """Whether attentions and MLPs can be left out one by one."""
    try:
        for layer in host.target.layers:
            for part in Omitted:
                omitted_modules(layer, part)
    except ValueError:
        return False
    return True


def _with(skip: Skip, part: Skip) -> Skip:
    return Skip(skip.attention | part.attention, skip.mlp | part.mlp)


@dataclass(slots=True)
class Search:
    """A search as it goes: sets tried, and the best of them.

    Attributes:
        replay: of the texts searched on.
        prices: measured.
        options: see there.
        watcher: hears of every set tried.
    """

    replay: Replay
    prices: Prices
    options: SearchOptions
    watcher: Watcher | None = None

    def run(self, host: Host) -> list[tuple[Skip, Score]]:
        """Every set that was tried, in order.

        First every exit layer and every single part; then, round by round, the set grows by the part of the most
        promising ones that makes the fastest set.
        """
        layers = len(host.target.layers)
        deadline = time.monotonic() + self.options.seconds
        tried: list[tuple[Skip, Score]] = []

        def attempt(skip: Skip) -> Score:
            tried.append((skip, self.replay.score(skip, self.prices)))
            if self.watcher is not None:
                self.watcher.step()
            return tried[-1][1]

        if _parted(host):
            parts = [Skip.of([i]) for i in range(layers)] + [Skip.of((), [i]) for i in range(layers)]
        else:
            parts = [Skip.of([i], [i]) for i in range(layers)]
        if self.watcher is not None:
            self.watcher.stage("trying sets", None)
        for skip in (*(Skip.behind(n, layers) for n in range(1, layers)), *parts):
            if time.monotonic() < deadline or not tried:
                attempt(skip)
        known = dict(tried)
        worth = {part: known[part].speed for part in parts if part in known}
        grown, best, stale = Skip(), -math.inf, 0
        while worth and stale < PATIENCE and time.monotonic() < deadline:
            ranked = sorted(worth, key=worth.__getitem__, reverse=True)
            for part in ranked[: self.options.width]:
                larger = _with(grown, part)
                if larger.kept(layers) and time.monotonic() < deadline:
                    worth[part] = (known.get(larger) or attempt(larger)).speed
                else:
                    worth[part] = -math.inf
            chosen = max(ranked[: self.options.width], key=worth.__getitem__)
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
    host: str = "auto",
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Search what SelfSpeculative leaves out of `model`, and write the drafter's folder; returns its recipe.

    Args:
        model: the target.
        data: a data set of `draftree train data`, made by this model.
        out: folder to write: the drafter's, and `search.json` with every set tried.
        options: see there.
        host: that decoding will use, as times are its: "auto", "loop" or "hooked".
        watcher: hears how far it is.

    Raises:
        ValueError: bad data or options.
    """
    options = options or SearchOptions()
    driver = open_host(model, host)
    layers = len(driver.target.layers)
    if layers < 2:
        raise ValueError("The model has one layer, so nothing can be left out: use another drafter.")
    rows = read_data(data, driver.target, options.max_length)
    if watcher is not None:
        watcher.stage("reading texts and timing rows", None)
    replay = Replay(driver, rows.train[: options.texts], options.places, options.num_draft_tokens)
    prices = measure_prices(driver, replay)
    begin = time.monotonic()
    tried = Search(replay, prices, options, watcher).run(driver)
    best = max(tried, key=lambda found: found[1].speed)[0]
    timed = min(replay.time_row(best) for _ in range(ROUNDS))
    dev = Replay(driver, rows.dev[: options.texts], options.places, options.num_draft_tokens)
    held_out = dev.score(best, prices)
    settings = {"num_draft_tokens": options.num_draft_tokens}
    drafter = SelfSpeculative.fresh(
        driver.target.model, skip_attention=sorted(best.attention), skip_mlp=sorted(best.mlp), **settings
    )
    drafter.base = base_of(driver.target.model)
    drafter.recipe = {
        "search": asdict(options),
        "seconds": round(time.monotonic() - begin, 1),
        "sets": len(tried),
        "host": driver.form,
        "row_seconds": {"whole": prices.row, "attention": prices.attention, "mlp": prices.mlp, "best": timed},
        "step_seconds": float(prices.steps.of(1)),
        "predicted": dict(tried)[best]._asdict(),
        "predicted_on_dev": held_out._asdict(),
        "data": rows.about,
    }
    drafter.save_pretrained(out)
    told = [
        {"skip_attention": sorted(skip.attention), "skip_mlp": sorted(skip.mlp), **score._asdict()}
        for skip, score in tried
    ]
    (out / "search.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return drafter.settings | drafter.recipe
