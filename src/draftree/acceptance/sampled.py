"""Sampled acceptance that reproduces token-by-token sampling exactly.

`torch.multinomial(p, 1)` is argmax(p / e) with e drawn from Exp(1), one draw of the whole vocabulary per emitted
token. Drawing that noise once per *position*, in order, makes the outcome a function of seed, position and prefix
alone: whether the prefix was reached by draft tokens or token by token changes nothing, and at batch 1 the result is
that of Hugging Face's `generate(do_sample=True)`. Logits processors see each node's true prefix.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

from draftree.errors import NoTokenError
from draftree.grammar import GrammarProcessor
from draftree.runner.base import callers_mode


class PrefixChooser:
    """Applies logits processors to the true prefix, then takes the best token or samples one.

    Args:
        prefix: LongTensor [1, L], what processors see as the prompt (padding included, as in Hugging Face).
        processors: Hugging Face logits processors, this request's own.
        generator: source of noise; None with `sample` uses torch's default generator.
    """

    def __init__(
        self,
        prefix: Tensor,
        processors: LogitsProcessorList,
        generator: torch.Generator | None,
        sample: bool,
    ) -> None:
        self._ids = prefix
        self._processors = processors
        self._generator = generator
        self._sample = sample
        of_callers = any(_runs_callers_code(processor) for processor in processors)
        self._mode: Callable[[], AbstractContextManager[None]] = callers_mode if of_callers else nullcontext
        self._noise: deque[Tensor] = deque()  # of the present position and those behind it, as far as it was drawn

    def scores(self, logits: Tensor, ahead: Sequence[int] = ()) -> Tensor:
        """Return processed scores [1, V] in float32 of raw `logits` [V] after the prefix and the tokens `ahead`."""
        ids = self._ids  # where the processors' own tensors lie too, on another device than the logits perhaps
        with self._mode():  # a copy that is made here is a usual tensor, also of logits that are none
            raw = logits[None].to(device=ids.device, dtype=torch.float32, copy=True)
            if ahead:
                ids = torch.cat((ids, torch.tensor([list(ahead)], device=ids.device, dtype=torch.long)), 1)
            return self._processors(ids, raw)  # type: ignore[arg-type]

    def choose(self, logits: Tensor) -> int:
        """Choose the next token given raw `logits` [V] at the true prefix; called once per emitted token, in order."""
        noisy = self._noisy(self.scores(logits), 0)
        token = int(noisy.argmax(-1))
        if self._sample and math.isnan(noisy[0, token]):
            raise NoTokenError(
                "No token has a probability that is a number: raise the temperature, forbid fewer tokens, or look for "
                "NaN in the model's weights."
            )
        return token

    def draft(self, logits: Tensor, ahead: Sequence[int]) -> int:
        """Return the draft token that another model's raw `logits` [V] choose after the prefix and the tokens `ahead`.

        With the noise that the place will have for this model as well: each choice is a sample of its own model, and
        two models that agree choose alike. Noise is drawn ahead for it, so torch's default generator may move on
        further than the text.
        """
        return int(self._noisy(self.scores(logits, ahead), len(ahead)).argmax(-1))

    def _noisy(self, scores: Tensor, ahead: int) -> Tensor:
        """Return `scores` [1, V] with the noise of the place `ahead` of the present one; unchanged if greedy."""
        if not self._sample:
            return scores
        while len(self._noise) <= ahead:
            self._noise.append(torch.empty_like(scores).exponential_(1, generator=self._generator))
        return scores.softmax(-1) / self._noise[ahead]

    def push(self, token: int) -> None:
        """Add a token to the prefix."""
        with self._mode():
            self._ids = torch.nn.functional.pad(self._ids, (0, 1), value=token)
        if self._noise:
            self._noise.popleft()


def _runs_callers_code(processor: object) -> bool:
    """Return True if a processor may run the caller's code or model, as some of Hugging Face's do."""
    if type(processor).__module__ not in (stock.__name__, GrammarProcessor.__module__):
        return True
    return any(callable(held) for held in vars(processor).values())
