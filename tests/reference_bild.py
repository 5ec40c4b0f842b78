"""BiLD written from its description, token by token: whole texts through stock models, none of our engine.

No decoder has a cache; what an encoder has read is kept.

The small model writes while the best it has to say is as likely as the fallback threshold; then the large model reads
everything written since its last turn, replaces the first token that is further than the rollback threshold from what
it would say, or adds a token behind all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Told:
    """What the reference wrote, and how often which policy decided."""

    tokens: list[int] = field(default_factory=list)
    calls: int = 0  # passes of the large model
    drafted: int = 0
    kept: int = 0  # tokens of the small model in the text
    rollbacks: int = 0
    fallbacks: int = 0


@dataclass
class Reference:
    """Two stock models and the policies between them; `noise` [positions, V] makes choices random."""

    large: Any
    small: Any
    fallback: float
    rollback: float | None
    ends: Sequence[int] = ()
    turn: int = 10
    processors: Sequence[Any] = ()
    noise: Tensor | None = None
    read: dict[Any, Any] = field(default_factory=dict)  # by the encoders

    @torch.no_grad()
    def says(self, model: Any, text: Sequence[int], source: Sequence[int] | None) -> Tensor:
        """Logits [len(text), V] behind every token."""
        ids = torch.tensor([list(text)])
        if source is None:
            return model(ids).logits[0]
        key = id(model), tuple(source)
        if key not in self.read:  # what an encoder has read stays the same while the text grows
            self.read[key] = model.get_encoder()(input_ids=torch.tensor([list(source)]))
        return model(encoder_outputs=self.read[key], decoder_input_ids=ids).logits[0]

    def choose(self, logits: Tensor, text: Sequence[int], start: int) -> int:
        """The token behind `text`, whose first `start` tokens are the prompt."""
        scores = logits[None].clone()
        for processor in self.processors:
            scores = processor(torch.tensor([list(text)]), scores)
        if self.noise is not None:
            scores = scores.softmax(-1) / self.noise[len(text) - start]
        return int(scores.argmax())

    def far(self, large: Tensor, token: int) -> float:
        """d of a token, of the large model's raw logits [V]."""
        return -math.log(large.double().softmax(-1)[token])

    def write(self, prompt: Sequence[int], new: int, source: Sequence[int] | None = None) -> Told:
        """The text behind `prompt`, at most `new` tokens."""
        start, told = len(prompt), Told()
        text = list(prompt)
        text.append(self.choose(self.says(self.large, text, source)[-1], text, start))
        told.calls += 1
        while text[-1] not in self.ends and len(text) - start < new:
            own = self.small_turn(text, start, new, source, told)
            told.drafted += len(own)
            scored = self.says(self.large, [*text, *own], source)
            told.calls += 1
            self.large_turn(text, own, scored[len(text) - 1 :], start, told)
        told.tokens = text[start:]
        return told

    def small_turn(self, text: list[int], start: int, new: int, source: Sequence[int] | None, told: Told) -> list[int]:
        """What the small model writes behind `text`."""
        own: list[int] = []
        while len(own) < min(self.turn, new - (len(text) - start) - 1):  # the large model's token needs room
            logits = self.says(self.small, [*text, *own], source)[-1]
            if float(logits.softmax(-1).max()) < self.fallback:
                told.fallbacks += 1
                break
            own.append(self.choose(logits, [*text, *own], start))
            if own[-1] in self.ends:
                break
        return own

    def large_turn(self, text: list[int], own: list[int], scored: Tensor, start: int, told: Told) -> None:
        """Review, and add to `text` what stays and the large model's token."""
        for row, token in zip(scored, own, strict=False):
            if self.rollback is not None and self.far(row, token) > self.rollback and int(row.argmax()) != token:
                instead = self.choose(row, text, start)
                if instead != token:
                    told.rollbacks += 1
                    text.append(instead)
                    return
            told.kept += 1
            text.append(token)
        if text[-1] not in self.ends or not own:
            text.append(self.choose(scored[len(own)], text, start))
