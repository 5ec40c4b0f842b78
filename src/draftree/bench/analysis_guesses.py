"""What a drafter guesses at every token of the model's own greedy answers, without any guess being verified.

The engine decodes plainly, one token a step, and the drafter attaches its rows to each pass and reads them as it always
does: `plan`, then `guesses`. So every position of an answer is a case with a true prefix, and what is measured is what
decoding would have drafted from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftree.bench.analysis_setup import RANKS, Setup
from draftree.drafting.base import Step
from draftree.drafting.folder import Trained
from draftree.drafting.in_model import InModelDrafter
from draftree.engine import Engine
from draftree.engine.limits import eos_token_ids
from draftree.engine.request import Rules
from draftree.host.likeliest import best_on_host
from draftree.host.probe import probe
from draftree.pruning.early_head import EarlyHead
from draftree.tuning.onlooker import Onlooker, OnlyRoots


def look_on(setup: Setup, prompts: Sequence[Sequence[int]], onlooker: Onlooker) -> dict[int, tuple[int, list[int]]]:
    """Answer `prompts` greedily; by request id, the prompt's number and all tokens, prompt first.

    Raises:
        Exception: whatever ended an answer.
    """
    new = setup.settings.max_new_tokens
    longest = max(len(ids) for ids in prompts)
    engine = Engine(
        setup.model, drafter=onlooker, shape=OnlyRoots(), slots=setup.settings.slots, capacity=longest + new + 64
    )
    rules = Rules(max_new_tokens=new, eos_token_ids=eos_token_ids(setup.model))
    requests = [engine.add(ids, rules) for ids in prompts]
    engine.run()
    for request in requests:
        if request.error is not None:
            raise request.error
    return {request.id: (i, request.context.tokens) for i, request in enumerate(requests)}


@dataclass(frozen=True, slots=True)
class Hits:
    """How often the truth was among the guesses.

    Attributes:
        places: how many tokens behind the newest one each depth guesses; 1 is the token that the model itself says
            next, 2 a drafter's first guess (N in the figures of Hidden Transfer).
        right: int64 [T, D, RANKS], cases of each prompt and depth in which the guess of a rank was the truth.
        cases: int64 [T, D].
    """

    places: tuple[int, ...]
    right: np.ndarray
    cases: np.ndarray

    @property
    def by_rank(self) -> list[list[float]]:
        """[D][RANKS], share of all cases in which each rank was the truth, as `best_choices` wants it."""
        shares: list[list[float]] = (self.right.sum(0) / np.maximum(self.cases.sum(0), 1)[:, None]).tolist()
        return shares


def hits_of(setup: Setup, trained: Trained, prompts: Sequence[Sequence[int]]) -> Hits:
    """Compare what `trained` guesses at every token of the answers to `prompts` with what comes."""
    guesses, places, taps = _reader(setup, trained)
    noted: list[tuple[int, int, np.ndarray]] = []  # request, place of the newest token, candidates [D, RANKS]

    def see(step: Step) -> None:
        logits = guesses(step)
        if logits is None:
            return
        tokens, _ = best_on_host(logits, min(RANKS, logits.shape[-1]))
        for b, emitted in enumerate(step.emitted):
            if emitted:
                request = step.requests[b]
                noted.append((request.id, len(request.tokens) - len(emitted) - 1, tokens[b]))

    drafter = trained if isinstance(trained, InModelDrafter) else None
    texts = look_on(setup, prompts, Onlooker(see, drafter, taps, setup.watcher.step))
    right = np.zeros((len(prompts), len(places), RANKS), np.int64)
    cases = np.zeros((len(prompts), len(places)), np.int64)
    for request, newest, tokens in noted:
        prompt, text = texts[request]
        for d, place in enumerate(places):
            if newest + place < len(text):
                cases[prompt, d] += 1
                right[prompt, d, : tokens.shape[1]] += tokens[d] == text[newest + place]
    return Hits(places, right, cases)


def _reader(setup: Setup, trained: Trained) -> tuple[Callable[[Step], Tensor | None], tuple[int, ...], tuple[int, ...]]:
    """How a step's guesses [B, D, V] at the roots are read, which places they speak of, and the layers it takes."""
    if isinstance(trained, InModelDrafter):
        drafter = trained

        def read(step: Step) -> Tensor | None:
            return drafter.guesses(step, torch.zeros(len(step.requests), dtype=torch.long, device=step.trees.device))

        return read, tuple(range(2, drafter.depth + 2)), ()
    if not isinstance(trained, EarlyHead):
        raise TypeError(f"There is no way to read guesses of {trained.method!r}: give a drafter or an early head.")
    head = trained
    anatomy = probe(setup.target)
    weights = head.weights.to(setup.target.device)

    def read_early(step: Step) -> Tensor | None:
        states = step.result.hidden[head.layer][:, step.offset]
        return torch.stack(weights.ahead(states, anatomy.head), 1)

    return read_early, tuple(range(1, head.settings["places"] + 1)), (head.layer,)
