"""Methods that answer prompts behind one interface, so that a benchmark treats them alike."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftree.drafting import Drafter
from draftree.engine import Engine, Request, RequestStats
from draftree.engine.limits import decoder_start, eos_token_ids
from draftree.shaping import Shape

AfterStep = Callable[[Request], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered prompt."""

    ids: list[int]  # New token ids, an EOS included.
    seconds: float  # Wall time of the call, prefill included; each prompt of a batch counts an equal part.
    stats: RequestStats | None = None  # The engine's counts; None for Hugging Face's methods.


class Method(ABC):
    """Base of all methods.

    Attributes:
        name: key in result files.
        optional: whether a benchmark omits this method if its first calls fail.
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
        """Begin a round with a new drafter."""

    def answer(self, ids: Sequence[int]) -> Answer:
        """Answer one prompt of token ids."""
        return self.answers([ids])[0]

    @abstractmethod
    def answers(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """Answer prompts together; raise a ValueError if the method takes one prompt at a time."""


def decoding_options(temperature: float) -> dict[str, Any]:
    """Return the options of greedy decoding (temperature 0) or sampling; a model's own config has no effect."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


class HuggingFace(Method):
    """Hugging Face's own `generate` with its defaults and `options`; prompts of a batch are padded on the left.

    With `prompt_lookup_num_tokens` or `assistant_model` Hugging Face drafts, one prompt at a time.
    """

    def __init__(self, name: str, model: Any, max_new_tokens: int, temperature: float = 0.0, **options: Any) -> None:
        super().__init__(name)
        self._model = model
        self.drafts = "prompt_lookup_num_tokens" in options or "assistant_model" in options
        self.optional = self.drafts  # Not every model can drop draft tokens from its cache.
        self._options = {"max_new_tokens": max_new_tokens, **decoding_options(temperature), **options}
        self._ends = set(eos_token_ids(model))

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        if self.drafts and len(prompts) > 1:
            raise ValueError("Hugging Face's assisted generation takes one prompt at a time")
        width, device = max(len(ids) for ids in prompts), self._model.device
        prompt = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
        if self._options["do_sample"]:
            torch.manual_seed(0)
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
    """An engine for each answer, whose construction counts, as in `generate`; drafter and shape serve a whole round."""

    def __init__(
        self,
        name: str,
        model: Any,
        max_new_tokens: int,
        make_drafter: Callable[[], Drafter | None] = lambda: None,
        make_shape: Callable[[], Shape | None] = lambda: None,
        *,
        temperature: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(name)
        self._model, self._new, self._options = model, max_new_tokens, options
        self._decoding = {"max_new_tokens": max_new_tokens} | decoding_options(temperature)
        self._make_drafter, self._make_shape = make_drafter, make_shape
        self.start()

    def start(self) -> None:
        self.drafter = self._make_drafter()
        self.shape = self._make_shape()

    def answer(self, ids: Sequence[int], after_step: AfterStep | None = None, **asked: Any) -> Answer:
        """Answer one prompt."""
        return self.answers([ids], after_step, **asked)[0]

    def answers(
        self, prompts: Sequence[Sequence[int]], after_step: AfterStep | None = None, **asked: Any
    ) -> list[Answer]:
        begin = time.perf_counter()
        engine, requests = self._requests(prompts, asked)
        seconds = time.perf_counter() - begin
        while engine.busy:
            begin = time.perf_counter()
            engine.step()
            seconds += time.perf_counter() - begin
            if after_step is not None:
                for request in requests:
                    after_step(request)
        for request in requests:
            if request.error is not None:
                raise request.error
        return [Answer(request.tokens, seconds / len(requests), request.stats) for request in requests]

    def _requests(self, prompts: Sequence[Sequence[int]], asked: dict[str, Any]) -> tuple[Engine, list[Request]]:
        """Return an engine with a slot for each prompt, and the added requests."""
        starts: Sequence[Sequence[int]] = prompts
        sources: list[torch.Tensor | None] = [None] * len(prompts)
        if self._model.config.is_encoder_decoder:
            starts = [[decoder_start(self._model.generation_config)]] * len(prompts)
            sources = [torch.tensor(ids, device=self._model.device) for ids in prompts]
        capacity = max(map(len, starts)) + self._new + 64
        made = {"drafter": self.drafter, "shape": self.shape, **self._options}
        engine = Engine(self._model, None, slots=len(prompts), capacity=capacity, **made)
        options = self._decoding | asked
        requests = [
            engine.add(start, encoder_input=source, seed=b, **options)
            for b, (start, source) in enumerate(zip(starts, sources, strict=True))
        ]
        return engine, requests
