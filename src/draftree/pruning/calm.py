"""CALM: a token leaves the layers early once its hidden state has settled. LOSSY, no drafting: the papers' baseline.

Confident Adaptive Language Modeling (Schuster et al., 2022): behind each layer the state is compared with the one
before it; where their cosine passes a threshold that decays over the text, the head reads the state there. The layers
that are left make their keys and values of that state, for later tokens to see. Nothing verifies the tokens, so the
text is not the model's. BiLD is compared with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor
from torch.nn import functional as F

from draftree.drafting.base import RequestState
from draftree.runner import Runner
from draftree.runner.hooked.bypass import keys_and_values_of
from draftree.runner.plan import Plan

SHARE = 0.9  # of the threshold that does not decay


class LossyCALM:
    """The lossy rule: leave behind layer i where cos(h_i, h_i+1) > 0.9 threshold + 0.1 exp(-decay t / N).

    t are the tokens emitted so far, N the most that the request may emit (their equation 5). The requests of a batch
    leave together, behind the layer where all of them have settled. Prompts pass whole.

    Args:
        threshold: lambda, 0 to 1. 1 never leaves: the text is then the model's own.
        decay: tau; 0 keeps the threshold where it begins.
        first_layer: layers that always run, 1 or more.

    Raises:
        ValueError: an option out of range.

    Attributes:
        layers_run: how many passes ran so many layers, over all requests since the rule was made.
    """

    def __init__(self, threshold: float = 0.9, *, decay: float = 4.0, first_layer: int = 1) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold is {threshold}: give a cosine from 0 to 1 (never leave).")
        if not decay >= 0:
            raise ValueError(f"decay is {decay}: give 0 (a constant threshold) or more.")
        if first_layer < 1:
            raise ValueError(f"first_layer is {first_layer}: run at least 1 layer.")
        self.threshold, self.decay, self.first_layer = threshold, decay, first_layer
        self.layers_run: Counter[int] = Counter()

    def at(self, emitted: int, most: int) -> float:
        """The threshold after `emitted` of at most `most` tokens; above 1 where no row may leave."""
        if self.threshold == 1:
            return 2.0
        return SHARE * self.threshold + (1 - SHARE) * math.exp(-self.decay * emitted / most)

    def bind(self, runner: Runner) -> None:
        """Meet the runner, before any work.

        Raises:
            ValueError: keys and values of a model of this family cannot be made without its layers, or it has none
                behind the first that rows may leave.
        """
        layers = len(runner.target.layers)
        if self.first_layer >= layers:
            raise ValueError(
                f"first_layer is {self.first_layer} and the model has {layers} layers, so no token could leave early: "
                f"give less than {layers}."
            )
        if not runner.leaves:
            keys_and_values_of(runner.target)

    def enter(self, plan: Plan, requests: Sequence[RequestState], layers: int) -> Plan:
        """The plan of a pass of one row for each of `requests`, in a model of so many layers, with leave to leave."""
        thresholds = []
        for request in requests:
            emitted = len(request.tokens) - request.prompt_length
            thresholds.append(self.at(emitted, max(emitted + request.room, 1)))

        def settled(run: int, before: Tensor, behind: Tensor) -> bool:
            leave = False
            if run >= self.first_layer and max(thresholds) <= 1:
                cosines = F.cosine_similarity(before[:, 0].float(), behind[:, 0].float(), dim=-1).tolist()
                leave = all(cosine > least for cosine, least in zip(cosines, thresholds, strict=True))
            if leave or run + 1 == layers:
                self.layers_run[run if leave else layers] += 1
            return leave

        return replace(plan, leaves=settled)

    @property
    def mean_layers(self) -> float:
        """Layers that a pass ran, on average; 0 before the first."""
        passes = sum(self.layers_run.values())
        return sum(run * count for run, count in self.layers_run.items()) / passes if passes else 0.0
