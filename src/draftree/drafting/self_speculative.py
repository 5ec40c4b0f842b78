"""SelfSpeculative: the target itself drafts, with some of its attentions and MLPs left out.

Self-speculative decoding (Zhang et al., 2024, "Draft & Verify") and early-exit drafting (Elhoushi et al., 2024): a
token that a part of the model is sure of is mostly the whole model's choice. Drafted rows read the target's own keys
and values and write theirs behind the committed text, where the verifying pass writes over them, so there is no second
model and no second cache. What is accepted is the whole model's choice, whatever is left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from draftree.drafting.base import Capabilities, Drafter, Place, RequestState, Step
from draftree.drafting.folder import Trained
from draftree.drafting.times import OwnTimes, check_confidence
from draftree.errors import check_least, layers_of
from draftree.runner.base import preparations, top_tokens
from draftree.runner.hooked.bypass import omitted_modules
from draftree.runner.layout.skip import Skip
from draftree.runner.plan import Plan
from draftree.runner.target import Target, inspect_model
from draftree.tree import Draft, TokenTree

WORTH = 1.2  # tokens that a drafted row has to promise for the time of a step: about what a step brings in all
PRICE_FIRST = 0.5  # a drafted row against a step, before both were timed
LEAST = 1e-30  # probability that every path has


class SelfSpeculative(Trained, Drafter):
    """Drafts with the target itself, parts of it left out; one object may serve many calls and engines.

    Give `exit_layer`, or what to leave out. `draftree train skip-set` searches a set for a model.

    Args:
        exit_layer: run the first so many layers, then the model's final norm and head.
        skip_attention: layers whose attention is left out.
        skip_mlp: layers whose MLP is left out; a layer in both is left out whole.
        num_draft_tokens: most tokens ahead.
        branching: tokens offered at each place, the likeliest of which is the chain that is read on; the others cost
            rows of the verifying pass and none of drafting. 1 drafts a bare chain.
        confidence: stop where the chain so far has less than this probability; 0 never stops. None: where another row
            takes longer than its draft token is worth, rows and steps being timed as they run.

    Raises:
        TypeError: a single number where layers are listed.
        ValueError: nothing to leave out, both ways at once, or an option out of range.
    """

    name = "self-speculative"
    capabilities = Capabilities(observes=True)
    method: ClassVar[str] = "self-speculative"

    def __init__(
        self,
        *,
        exit_layer: int | None = None,
        skip_attention: Collection[int] = (),
        skip_mlp: Collection[int] = (),
        num_draft_tokens: int = 6,
        branching: int = 2,
        confidence: float | None = None,
    ) -> None:
        check_least(1, num_draft_tokens=num_draft_tokens, branching=branching, exit_layer=exit_layer)
        check_confidence(confidence)
        attention, mlp = layers_of("skip_attention", skip_attention), layers_of("skip_mlp", skip_mlp)
        skips = bool(attention or mlp)
        if skips == (exit_layer is not None):
            raise ValueError(
                "SelfSpeculative leaves parts of the model out: give exit_layer, or skip_attention and skip_mlp "
                f"({'not both' if skips else 'draftree train skip-set searches them'})."
            )
        self.num_draft_tokens, self.branching, self.confidence = num_draft_tokens, branching, confidence
        self.max_nodes = num_draft_tokens * branching
        self.settings: dict[str, Any] = {
            "exit_layer": exit_layer,
            "skip_attention": sorted(attention),
            "skip_mlp": sorted(mlp),
            "num_draft_tokens": num_draft_tokens,
            "branching": branching,
            "confidence": confidence,
        }
        self.weights = nn.Module()  # it has none of its own
        self._shapes: dict[str, int] | None = None  # of the model that it was made for, where that is known
        self._skips: dict[int, Skip] = {}  # by number of layers of the models met
        self._times = OwnTimes(PRICE_FIRST)

    @classmethod
    def fresh(cls, model: Any, **settings: Any) -> SelfSpeculative:
        """See `Trained.fresh`.

        Raises:
            ValueError: settings that do not fit `model`.
        """
        drafter = cls(**settings)
        target = inspect_model(model)
        drafter.skip_of(target)
        drafter._shapes = {"hidden_size": target.hidden_size, "layers": len(target.layers)}
        return drafter

    def shapes(self) -> dict[str, Any]:
        """What must fit the model: hidden_size, layers.

        Raises:
            ValueError: it was made for none.
        """
        if self._shapes is None:
            raise ValueError("This drafter was made for no model: make it by SelfSpeculative.fresh(model, ...).")
        return dict(self._shapes)

    def skip_of(self, target: Target) -> Skip:
        """What rows leave out in `target`.

        Raises:
            ValueError: layers that it does not have, nothing left in or out, or a part that cannot be left out alone.
        """
        layers, exit_layer = len(target.layers), self.settings["exit_layer"]
        if exit_layer is not None:
            if exit_layer >= layers:
                raise ValueError(
                    f"exit_layer is {exit_layer} and the model has {layers} layers: give 1 to {layers - 1}."
                )
            return Skip.behind(exit_layer, layers)
        named = {option: self.settings[option] for option in ("skip_attention", "skip_mlp")}
        for option, numbers in named.items():
            for number in numbers:
                if not 0 <= number < layers:
                    raise ValueError(f"{option} names layer {number}: this model has layers 0 to {layers - 1}.")
        skip = Skip.of(*named.values())
        if not skip.kept(layers):
            raise ValueError("skip_attention and skip_mlp leave out the whole model: keep a layer or more.")
        for number in range(layers):
            if skip.at(number):
                omitted_modules(target.layers[number], skip.at(number))
        return skip

    # ---------------------------------------------------------------- the drafter's contract

    def bind(self, target: Target, *, eos_token_ids: Sequence[int] = ()) -> None:
        """See `Drafter.bind`.

        Raises:
            ValueError: what is to be left out is not there.
        """
        self._skips[len(target.layers)] = self.skip_of(target)

    def draft(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        reaches = [self._reach(request, budget) for request, budget in zip(requests, budgets, strict=True)]
        if not any(reaches):
            last = [request.tokens[-1] for request in requests]
            return TokenTree.roots(torch.tensor(last, dtype=torch.long, device="cpu"))
        prepared, begin = preparations(), time.perf_counter()
        tokens, logp = self._run(requests, reaches)
        if preparations() == prepared:
            self._times.passed((time.perf_counter() - begin) / tokens.shape[1])
        drafts = [
            self._with_leaves(tokens[b, :reach], logp[b, :reach], request.eos_token_ids)
            for b, (request, reach) in enumerate(zip(requests, reaches, strict=True))
        ]
        return TokenTree.from_drafts([request.tokens[-1] for request in requests], drafts, budgets)

    def observe(self, step: Step) -> None:
        """See `Drafter.observe`: learn how long a step takes."""
        self._times.stepped(step.seconds)

    # ---------------------------------------------------------------- rows

    def _reach(self, request: RequestState, budget: int) -> int:
        """How many tokens ahead to look; 0 where the cache does not hold all of the text but its newest token."""
        place = request.place
        if place is None or budget < 1 or place.committed != len(request.tokens) - 1:
            return 0
        limit = place.runner.target.max_positions or math.inf
        return max(int(min(self.num_draft_tokens, budget, request.room - 1, limit - len(request.tokens) + 1)), 0)

    def _run(self, requests: Sequence[RequestState], reaches: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Chains of all requests at once; what lies beyond a request's reach is of no use."""
        place = requests[0].place
        assert place is not None
        least = WORTH * self._times.price if self.confidence is None else self.confidence
        return run_chains(
            place,
            [request.tokens[-1] for request in requests],
            reaches,
            self._skips[len(place.runner.target.layers)],
            best=min(self.branching, place.runner.target.vocab_size),
            least=math.log(max(least, LEAST)),
            ends=[request.eos_token_ids for request in requests],
            floors=[request.prompt_length for request in requests],
        )

    def _with_leaves(self, tokens: np.ndarray, logp: np.ndarray, eos: Sequence[int]) -> Draft:
        """The chain of each row's best token, up to an EOS, with the other tokens [rows, K] as leaves."""
        ends = np.flatnonzero(np.isin(tokens[:, 0], eos))
        rows, count = int(ends[0]) + 1 if len(ends) else len(tokens), tokens.shape[1]
        before = np.cumsum([0.0, *logp[: rows - 1, 0]])[:rows]
        parents = np.maximum(np.arange(-1, rows - 1) * count, -1)
        return (tokens[:rows].ravel(), parents.repeat(count), (before[:, None] + logp[:rows]).ravel(), self.source)


def run_chains(
    place: Place,
    newest: Sequence[int],
    reaches: Sequence[int],
    skip: Skip,
    *,
    best: int,
    least: float,
    ends: Sequence[Sequence[int]],
    floors: Sequence[int],
) -> tuple[np.ndarray, np.ndarray]:
    """Rows through what is left of the target, each reading the best token of the one before.

    Args:
        place: of the first request; the others sit behind it.
        newest: token that each of the B requests begins with.
        reaches: most rows of each; those of 0 take no part.
        skip: what rows leave out.
        best: K, how many of the likeliest tokens to return for each place.
        least: log-probability that the chain of at least one request must have for another row.
        ends: of each request, tokens behind which its chain is not followed.
        floors: prompt lengths, see `Plan.rope_floor`.

    Returns:
        the likeliest tokens behind each row made and their log-probabilities there, best first, each [B, rows, K]; the
        cache is as it was, but for columns behind the texts.
    """
    runner, cache, target = place.runner, place.cache, place.runner.target
    batch, most = len(newest), np.array(reaches)
    slots = slice(place.slot, place.slot + batch)
    lengths = cache.lengths[slots]
    visible = torch.ones(batch, 1, 1, dtype=torch.bool, device=target.device)
    tokens = np.array(newest)
    paths = np.where(most > 0, 0.0, -np.inf)  # log-probabilities of the chains that go on
    found: list[tuple[np.ndarray, np.ndarray]] = []
    with runner.lock:
        try:
            for row in range(max(reaches)):
                ids = torch.from_numpy(tokens[:, None]).to(target.device)
                places = torch.tensor(lengths, dtype=torch.long, device=target.device)[:, None] + row
                if target.max_positions is not None:  # rows of requests that do not take part may lie beyond
                    places = places.clamp(max=target.max_positions - 1)
                plan = Plan(ids, places, visible, rope_floor=tuple(floors), skip=skip)
                result = runner.run(plan, cache, place.slot, place.encoder)
                cache.commit([[0]] * batch, result.segments)  # for the next row to see; nothing of it stays
                found.append(top_tokens(result.logits, best))
                tokens, logp = (part[:, 0, 0] for part in found[-1])
                ended = np.array([token in own for token, own in zip(tokens.tolist(), ends, strict=True)])
                paths = np.where(ended | (most == row + 1), -np.inf, paths + logp)
                if paths.max() < least:
                    break
        finally:
            cache.lengths[slots] = lengths
    every_token, every_logp = (np.concatenate(part, 1) for part in zip(*found, strict=True))
    return every_token, every_logp
