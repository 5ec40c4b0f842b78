"""Methods that answer prompts, all behind one call, so that a benchmark treats them alike.

A method takes token ids and returns new token ids, its wall time in seconds and, if it is the engine, its counts.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from draftree.bench.samples import Answer, Sampling, decoding_options
from draftree.drafting import Drafter
from draftree.drafting.base import RequestState
from draftree.engine import Engine, Request
from draftree.engine.limits import decoder_start, eos_token_ids
from draftree.shaping import Shape

AfterStep = Callable[[Request], None]


class Method(ABC):
    """Base of all methods.

    Attributes:
        name: key in result files.
        optional: whether a benchmark goes on without this method if its first calls fail.
        note: a sentence for the report.
    """

    optional = False
    note = ""

    def __init__(self, name: str) -> None:
        self.name = name

    def ready(self, groups: Sequence[Sequence[Sequence[int]]]) -> None:
        """Answer these batches once, uncounted: first calls compile and measure."""
        for prompts in groups:
            self.answers(prompts)

    def start(self) -> None:
        """Begin a round: forget what was learned in the last one."""

    def answer(self, ids: Sequence[int]) -> Answer:
        """Answer one prompt of token ids."""
        return self.answers([ids])[0]

    @abstractmethod
    def answers(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """Answer prompts together; a ValueError for several prompts for a method that takes one at a time."""


class HuggingFace(Method):
    """Hugging Face's own `generate` with its defaults and `options`; prompts of a batch are padded on the left.

    With `prompt_lookup_num_tokens` or `assistant_model` Hugging Face drafts, one prompt at a time.
    """

    def __init__(
        self, name: str, model: Any, max_new_tokens: int, sampling: Sampling | None = None, **options: Any
    ) -> None:
        super().__init__(name)
        self._model = model
        self._seed = None if sampling is None else sampling.seed
        self.drafts = "prompt_lookup_num_tokens" in options or "assistant_model" in options
        self.optional = self.drafts  # Not every model can drop draft tokens from its cache.
        self._options = {"max_new_tokens": max_new_tokens, **decoding_options(sampling), **options}
        self._ends = set(eos_token_ids(model))

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        if self.drafts and len(prompts) > 1:
            raise ValueError("Hugging Face's assisted generation takes one prompt at a time")
        width = max(len(ids) for ids in prompts)
        rows = [[0] * (width - len(ids)) + list(ids) for ids in prompts]
        prompt = torch.tensor(rows, device=self._model.device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=self._model.device)
        if self._seed is not None:
            torch.manual_seed(self._seed)
        begin = time.perf_counter()
        sequences = self._model.generate(prompt, attention_mask=mask, **self._options)
        before = 1 if self._model.config.is_encoder_decoder else width
        new: list[list[int]] = sequences[:, before:].tolist()  # This waits for the device.
        seconds = (time.perf_counter() - begin) / len(prompts)
        return [Answer(self._cut(ids), seconds) for ids in new]

    def _cut(self, ids: list[int]) -> list[int]:
        """Return the answer up to its EOS, without the padding of a batch."""
        end = next((i for i, token in enumerate(ids) if token in self._ends), len(ids) - 1)
        return ids[: end + 1]


class Draftree(Method):
    """The engine, one call an answer: reading the options and making the engine count, as in `generate`.

    The drafter and the shape live through all calls of a round.

    Args:
        model: decoder-only, or an encoder-decoder, whose prompts go through its encoder.
        make_drafter: makes a round's drafter; None for plain decoding.
        make_shape: makes a round's shape; None for the engine's default.
        sampling: sampling options; None decodes greedily.
        options: more of `Engine`, such as `runner` or `reject_drafts`.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        max_new_tokens: int,
        make_drafter: Callable[[], Drafter | None] = lambda: None,
        make_shape: Callable[[], Shape | None] = lambda: None,
        *,
        sampling: Sampling | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name)
        self._model, self._new, self._sampling, self._options = model, max_new_tokens, sampling, options
        self._make_drafter, self._make_shape = make_drafter, make_shape
        self.start()

    def start(self) -> None:
        self.drafter = self._make_drafter()
        self.shape = self._make_shape()

    def answer(self, ids: Sequence[int], after_step: AfterStep | None = None, **asked: Any) -> Answer:
        """Answer one prompt.

        Args:
            ids: token ids of the prompt.
            after_step: is called with the request after each step, outside of the measured time.
            asked: more arguments of `Engine.add`, such as `grammar`.
        """
        return self.answers([ids], after_step, **asked)[0]

    def answers(
        self, prompts: Sequence[Sequence[int]], after_step: AfterStep | None = None, **asked: Any
    ) -> list[Answer]:
        begin = time.perf_counter()
        engine, requests = self._requests(prompts, asked)
        seconds = time.perf_counter() - begin
        lengths: list[list[int]] = [[] for _ in requests]
        prompt_verify = [0.0] * len(requests)
        while engine.busy:
            begin = time.perf_counter()
            engine.step()
            seconds += time.perf_counter() - begin
            for b, request in enumerate(requests):
                new = len(request.output) - sum(lengths[b])
                if new:
                    if not lengths[b]:
                        prompt_verify[b] = request.stats.seconds["verify"]
                    lengths[b].append(new)
                if after_step is not None:
                    after_step(request)
        for request in requests:
            if request.error is not None:
                raise request.error
        return [
            Answer(request.tokens, seconds / len(requests), request.stats, tuple(own), verify)
            for request, own, verify in zip(requests, lengths, prompt_verify, strict=True)
        ]

    def _requests(self, prompts: Sequence[Sequence[int]], asked: dict[str, Any]) -> tuple[Engine, list[Request]]:
        """Return an engine with a slot for each prompt, and the added requests."""
        sampling = self._sampling
        options = {"max_new_tokens": self._new} | decoding_options(sampling) | asked
        starts: Sequence[Sequence[int]] = prompts
        sources: list[torch.Tensor | None] = [None] * len(prompts)
        if self._model.config.is_encoder_decoder:
            starts = [[decoder_start(self._model.generation_config)]] * len(prompts)
            sources = [torch.tensor(ids, device=self._model.device) for ids in prompts]
        capacity = max(map(len, starts)) + self._new + 64
        made = {"drafter": self.drafter, "shape": self.shape, **self._options}
        engine = Engine(self._model, None, slots=len(prompts), capacity=capacity, **made)
        seed = 0 if sampling is None else sampling.seed
        requests = [
            engine.add(start, encoder_input=source, seed=seed + b, **options)
            for b, (start, source) in enumerate(zip(starts, sources, strict=True))
        ]
        return engine, requests


def teach(drafter: Drafter, ids: Sequence[int], answer: Sequence[int]) -> None:
    """Let a bound drafter learn the answer to a prompt (both token ids), as if it had drafted for it."""
    request = RequestState(-1, list(ids), len(ids), len(answer))
    drafter.begin(request)
    request.tokens += answer
    drafter.end(request)
