"""Ways to answer a prompt, all behind one call, so that a benchmark treats them alike.

A method takes token ids and returns new token ids, the seconds that it took and, where it drafts, its counts.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers import CompileConfig, StoppingCriteria, StoppingCriteriaList

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
        optional: whether a benchmark goes on without this method where its first calls fail.
        note: what a report says about it, next to its figures.
        same_draws: whether it samples the tokens that plain decoding samples at the same seed.
    """

    optional = False
    note = ""
    same_draws = True

    def __init__(self, name: str) -> None:
        self.name = name

    def ready(self, groups: Sequence[Sequence[Sequence[int]]]) -> None:
        """Answer these batches for what only first calls pay; `start` drops what a drafter learns here."""
        for prompts in groups:
            self.answers(prompts)

    def start(self) -> None:
        """Begin a round: drop what was learned in the round before."""

    def recall(self, ids: Sequence[int], answer: Sequence[int]) -> None:
        """Learn from an answer that was given before a run was stopped."""

    def answer(self, ids: Sequence[int]) -> Answer:
        """Answer one prompt of token ids."""
        return self.answers([ids])[0]

    @abstractmethod
    def answers(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """Answer prompts together; a ValueError for several prompts for a method that takes one at a time."""


class HuggingFace(Method):
    """Hugging Face's own `generate`, at its defaults but for `options`; prompts of a batch are padded on the left.

    With `prompt_lookup_num_tokens` or `assistant_model` among the options Hugging Face drafts; a stopping criterion
    then counts the tokens of each step.
    """

    def __init__(
        self, name: str, model: Any, max_new_tokens: int, sampling: Sampling | None = None, **options: Any
    ) -> None:
        super().__init__(name)
        self._model = model
        self._seed = None if sampling is None else sampling.seed
        self._texts: _TextLengths | None = None
        if "prompt_lookup_num_tokens" in options or "assistant_model" in options:
            self._texts = _TextLengths()
            options["stopping_criteria"] = StoppingCriteriaList([self._texts])
            self.optional = True  # not every model can drop draft tokens from its cache
            self.same_draws = sampling is None
        self._options = {"max_new_tokens": max_new_tokens, **decoding_options(sampling), **options}
        self._ends = set(eos_token_ids(model))

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        if self._texts is not None:
            if len(prompts) > 1:
                raise ValueError("Hugging Face's assisted generation takes one prompt at a time")
            self._texts.lengths = []
        width = max(len(ids) for ids in prompts)
        rows = [[0] * (width - len(ids)) + list(ids) for ids in prompts]
        prompt = torch.tensor(rows, device=self._model.device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=self._model.device)
        if self._seed is not None:
            torch.manual_seed(self._seed)
        begin = time.perf_counter()
        sequences = self._model.generate(prompt, attention_mask=mask, **self._options)
        before = 1 if self._model.config.is_encoder_decoder else width
        new: list[list[int]] = sequences[:, before:].tolist()  # waits for the device
        seconds = (time.perf_counter() - begin) / len(prompts)
        return [Answer(ids, seconds, lengths=self._lengths(ids, before)) for ids in map(self._cut, new)]

    def _cut(self, ids: list[int]) -> list[int]:
        """The answer up to its EOS; the rest of a batch's row is padding."""
        end = next((i for i, token in enumerate(ids) if token in self._ends), len(ids) - 1)
        return ids[: end + 1]

    def _lengths(self, ids: list[int], before: int) -> tuple[int, ...]:
        """New tokens of every step that made `ids`, behind `before` tokens of the prompt."""
        if self._texts is None:
            return (1,) * len(ids)
        # The last step may have accepted draft tokens after an EOS, which are cut off.
        ends = [min(length - before, len(ids)) for length in self._texts.lengths]
        return tuple(b - a for a, b in pairwise([0, *ends]) if b > a)


class _TextLengths(StoppingCriteria):
    """Stops nothing, and notes the length of the text after every step."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        self.lengths.append(input_ids.shape[1])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class CompiledHuggingFace(HuggingFace):
    """Hugging Face's `generate` with its static cache and its own torch.compile of the decoding step.

    Compiling is paid in `ready`; its time stands in `note` and not in the speed.
    """

    optional = True

    def __init__(self, name: str, model: Any, max_new_tokens: int, sampling: Sampling | None = None) -> None:
        config = CompileConfig()
        # Hugging Face compiles on a CPU only where this is set.
        config._compile_all_devices = True  # type: ignore[assignment]
        options: dict[str, Any] = {"cache_implementation": "static", "compile_config": config}
        super().__init__(name, model, max_new_tokens, sampling, **options)

    def ready(self, groups: Sequence[Sequence[Sequence[int]]]) -> None:
        # The longest prompts come first: the cache keeps their length, and another length would compile again.
        begin = time.perf_counter()
        super().ready(sorted(groups, key=lambda group: max(map(len, group)), reverse=True))
        self.note = f"compiling took {time.perf_counter() - begin:.0f} s, not counted"


class Draftree(Method):
    """The engine, one call an answer: options are read and the engine is made inside the clock, as `generate` does.

    The drafter and the shape live on from call to call within a round.

    Args:
        model: decoder-only, or an encoder-decoder, whose prompts go through its encoder.
        make_drafter, make_shape: make those of a round; None for plain decoding, and for the engine's default shape.
        sampling: how tokens are sampled; None decodes greedily.
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

    def recall(self, ids: Sequence[int], answer: Sequence[int]) -> None:
        """Teach the drafter (a trie keeps answers); the calibration of the shape is not restored."""
        if self.drafter is None:
            return
        Engine(self._model, drafter=self.drafter, shape=self.shape, slots=1, **self._options)  # binds
        teach(self.drafter, ids, answer)

    def answer(self, ids: Sequence[int], after_step: AfterStep | None = None, **asked: Any) -> Answer:
        """Answer one prompt.

        Args:
            ids: token ids of the prompt.
            after_step: gets the request after every step, outside of the measured time.
            asked: more of `Engine.add`, such as `grammar`.
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
        """An engine with a slot for each prompt, and the prompts in it."""
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
    """Show a bound drafter the answer to a prompt (both token ids), as if it had drafted for it: a trie keeps it."""
    request = RequestState(-1, list(ids), len(ids), len(answer))
    drafter.begin(request)
    request.tokens += answer
    drafter.end(request)
