"""Recorded texts replayed as drafts: how far chains of draft tokens would be accepted, without decoding.

A chain is accepted as far as it is the text, so the rows of all chains are known beforehand: those from every place go
through the model in a few wide passes, each seeing the whole model's keys and values before its place and its own
chain's behind it, as in drafting. That gives acceptance exactly (greedy). Times are measured: of drafted rows with and
without attentions and MLPs, and of verifying passes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from draftree.drafting.base import Place
from draftree.drafting.self_speculative import LEAST, WORTH, run_chains
from draftree.runner import Runner
from draftree.runner.hooked.bypass import omitted_modules
from draftree.runner.layout.skip import Omitted, Skip
from draftree.runner.plan import Plan
from draftree.runner.step_cost import StepCost, cached_cost
from draftree.training.rows import Row

CHUNK = 512  # rows of a pass
TIMED = 8  # rows in a timing
ROUNDS = 12  # timings of each kind; the fastest counts


class Score(NamedTuple):
    """What a set is worth."""

    speed: float  # predicted tokens a second, over those of plain decoding
    agreement: float  # share of places where the first draft token is accepted
    length: float  # tokens a step, the whole model's own included
    rows: float  # drafted rows a step


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds, measured."""

    row: float  # of a drafted row with nothing left out
    attention: float  # what leaving out one attention saves of it
    mlp: float  # what leaving out one MLP saves of it
    steps: StepCost  # of verifying passes, by rows

    def of(self, skip: Skip) -> float:
        """Of a drafted row."""
        saved = len(skip.attention) * self.attention + len(skip.mlp) * self.mlp
        return max(self.row - saved, 0.01 * self.row)


class Replay:
    """Recorded texts in a cache, and chains of up to `depth` draft tokens from up to `places` places of each."""

    def __init__(self, runner: Runner, rows: Sequence[Row], places: int, depth: int) -> None:
        self._runner, self._depth = runner, depth
        self._cache = runner.new_cache(len(rows), max(map(len, rows)) + min(CHUNK, places * depth))
        self._encoder = runner.new_encoder(len(rows)) if runner.target.encoder_decoder else None
        self._texts = [list(row.tokens) for row in rows]
        self._floors = [row.start for row in rows]
        self._roots = [
            range(row.start - 1, min(row.start - 1 + places, len(text) - 1))
            for row, text in zip(rows, self._texts, strict=True)
        ]
        with runner.lock, runner.guard():
            for slot, row in enumerate(rows):
                self._read(slot, row)

    def _read(self, slot: int, row: Row) -> None:
        device = self._runner.target.device
        if self._encoder is not None:
            self._encoder.admit(slot, torch.tensor(row.source, device=device, dtype=torch.long))
        for begin in range(0, len(row), CHUNK):
            ids = torch.tensor([row.tokens[begin : begin + CHUNK]], device=device, dtype=torch.long)
            plan = Plan.causal(ids, begin, first_logit_row=ids.shape[1] - 1, rope_floor=(row.start,))
            result = self._runner.run(plan, self._cache, slot, self._encoder)
            self._cache.commit([list(range(plan.width))], result.segments)

    def chains(self, skip: Skip) -> list[tuple[np.ndarray, np.ndarray]]:
        """By text: whether draft tokens [places, depth] are the text, and their log-probabilities there."""
        with self._runner.lock, self._runner.guard():
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
        text, depth, device = self._texts[slot], self._depth, self._runner.target.device
        length, count = len(text), len(roots) * self._depth
        # Rows beyond the text's end stay at it: what they draft does not count.
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
        result = self._runner.run(plan, self._cache, slot, self._encoder)
        best = result.logits[0].float().log_softmax(-1).max(-1)
        inside = np.array(roots)[:, None] + np.arange(depth) < length - 1
        drafted = best.indices.cpu().numpy().reshape(-1, depth)
        scores = best.values.cpu().numpy().reshape(-1, depth)
        return (drafted == known[places + 1]) & inside, np.where(inside, scores, -np.inf)

    def score(self, skip: Skip, prices: Prices) -> Score:
        """Go through the texts as decoding would, each step from where the one before ended."""
        row, plain = prices.of(skip), float(prices.steps.of(1))
        least = math.log(max(min(WORTH * row / plain, 1.0), LEAST))
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
        """Seconds of a drafted row behind the first text, and behind a verifying pass, which empties caches."""
        self.time_step()
        place = Place(self._runner, self._cache, self._encoder, 0)
        newest, floor = self._texts[0][-1], self._floors[0]
        with self._runner.guard():
            begin = time.perf_counter()
            run_chains(place, [newest], [TIMED], skip, best=1, least=-math.inf, ends=[()], floors=[floor])
            return (time.perf_counter() - begin) / TIMED

    def time_step(self) -> float:
        """Seconds of the whole model's pass of one row behind the first text."""
        text = self._texts[0]
        last = torch.tensor([text[-1:]], dtype=torch.long, device=self._runner.target.device)
        plan = Plan.causal(last, len(text) - 1, rope_floor=(self._floors[0],))
        with self._runner.lock, self._runner.guard():
            begin = time.perf_counter()
            self._runner.run(plan, self._cache, 0, self._encoder).logits[0, -1, 0].item()  # waits for the device
            return time.perf_counter() - begin


def measure_prices(runner: Runner, replay: Replay) -> Prices:
    """Time drafted rows with everything, without any attention and without any MLP, and steps, interleaved."""
    layers = range(len(runner.target.layers))
    without = {"attention": Skip.of(layers), "mlp": Skip.of((), layers)}
    if not parted(runner):  # then layers are left out whole, and it does not matter which part costs what
        without = dict.fromkeys(without, Skip.behind(1, len(layers)))
    kinds = {"all": Skip()} | without
    steps = cached_cost(runner)
    fastest = dict.fromkeys(("step", *kinds), math.inf)
    for _ in range(ROUNDS):
        fastest["step"] = min(fastest["step"], replay.time_step())
        for kind, skip in kinds.items():
            fastest[kind] = min(fastest[kind], replay.time_row(skip))
    row, parts = fastest["all"], len(layers) if parted(runner) else 2 * (len(layers) - 1)
    attention, mlp = (max(row - fastest[kind], 0.0) / parts for kind in without)
    now = fastest["step"] / float(steps.of(1))  # the curve may be of a quieter or busier hour
    return Prices(row, attention, mlp, StepCost(steps.rows, steps.seconds * now))


def parted(runner: Runner) -> bool:
    """Whether attentions and MLPs can be left out one by one."""
    try:
        for layer in runner.target.layers:
            for part in Omitted:
                omitted_modules(layer, part)
    except ValueError:
        return False
    return True
