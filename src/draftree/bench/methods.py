"""Ways to answer a prompt, all behind one call, so that a benchmark treats them alike.

A method gets token ids and gives back new token ids, the seconds it took and, where it drafts, its counts. One more
method is one more object here; nothing else of the harness changes.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftree.drafting import Drafter
from draftree.engine import Engine, Request, RequestStats
from draftree.engine.options import read_options, rules_for
from draftree.shaping import Shape

MakeDrafter = Callable[[], Drafter | None]
MakeShape = Callable[[], Shape | None]


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt answered.

    Attributes:
        ids: new token ids, an EOS included.
        seconds: wall time of the call, prompt pass included.
        stats: the engine's counts; None for methods that are not ours.
    """

    ids: list[int]
    seconds: float
    stats: RequestStats | None = None


class Method(ABC):
    """Base of all methods.

    Attributes:
        name: key in result files.
        label: what tables print.
        optional: whether a benchmark goes on without it where it fails to get ready.
        note: what a table should say about it besides its figures.
    """

    optional = False
    note = ""

    def __init__(self, name: str, label: str) -> None:
        self.name = name
        self.label = label

    def ready(self, prompts: Sequence[Sequence[int]]) -> None:
        """Pay what only first calls pay. A drafter that learns here is replaced when a round starts."""
        for ids in prompts:
            self.answer(ids)

    def start(self) -> None:
        """A round begins: forget what the round before it taught, and be ready to answer."""

    @abstractmethod
    def answer(self, ids: Sequence[int]) -> Answer:
        """Answer a prompt of token ids greedily."""


class HuggingFace(Method):
    """Hugging Face's own `generate`, greedy, at its defaults but for `options`."""

    def __init__(self, name: str, label: str, model: Any, max_new_tokens: int, **options: Any) -> None:
        super().__init__(name, label)
        self._model = model
        self._options = {"max_new_tokens": max_new_tokens, "do_sample": False, **options}

    def answer(self, ids: Sequence[int]) -> Answer:
        """See `Method.answer`."""
        prompt = torch.tensor([list(ids)], device=self._model.device)
        begin = time.perf_counter()
        sequence = self._model.generate(prompt, attention_mask=torch.ones_like(prompt), **self._options)
        new: list[int] = sequence[0, len(ids) :].tolist()  # waits for the device
        return Answer(new, time.perf_counter() - begin)


class CompiledHuggingFace(HuggingFace):
    """Hugging Face's `generate` with its static cache and its own torch.compile of the decoding step.

    Compiling is paid in `ready` and told in `note`, not in the speed. The static cache is as long as the longest
    prompt wants it, for every prompt: another length would compile again.
    """

    optional = True

    def __init__(self, name: str, label: str, model: Any, max_new_tokens: int) -> None:
        from transformers import CompileConfig

        config = CompileConfig()
        # Hugging Face compiles on a CPU only where this is set.
        config._compile_all_devices = True  # type: ignore[assignment]
        super().__init__(name, label, model, max_new_tokens, cache_implementation="static", compile_config=config)

    def ready(self, prompts: Sequence[Sequence[int]]) -> None:
        """See `Method.ready`."""
        begin = time.perf_counter()
        for ids in sorted(prompts, key=len, reverse=True):
            self.answer(ids)
        self.note = f"compiling took {time.perf_counter() - begin:.0f} s, not counted"


class Draftree(Method):
    """The engine, one call an answer: options read and engine made inside the clock, as `draftree.generate` does.

    Only the drafter, and the shape with it, lives on from call to call within a round.

    Args:
        model: a decoder-only model.
        max_new_tokens: most tokens of an answer.
        make_drafter: gives the drafter of a round, or None for plain decoding.
        make_shape: gives the shape of a round; None leaves the engine's default.
        options: more of `Engine`, such as `host` or `reject_drafts`.
    """

    def __init__(
        self,
        name: str,
        label: str,
        model: Any,
        max_new_tokens: int,
        make_drafter: MakeDrafter = lambda: None,
        make_shape: MakeShape = lambda: None,
        **options: Any,
    ) -> None:
        super().__init__(name, label)
        self._model = model
        self._new = max_new_tokens
        self._make_drafter = make_drafter
        self._make_shape = make_shape
        self._options = options
        self.start()

    def start(self) -> None:
        """See `Method.start`."""
        self.drafter = self._make_drafter()
        self._shape = self._make_shape()

    def answer(self, ids: Sequence[int], after_step: Callable[[Request], None] | None = None) -> Answer:
        """See `Method.answer`; `after_step` sees the request after every pass, outside the measured time."""
        begin = time.perf_counter()
        options = read_options(self._model, None, None, None, {"max_new_tokens": self._new})
        engine = Engine(
            self._model,
            drafter=self.drafter,
            shape=self._shape,
            slots=1,
            capacity=len(ids) + self._new + 64,
            **self._options,
        )
        rules = rules_for(self._model, options, max_new_tokens=self._new, padded_length=len(ids), seed=None)
        request = engine.add(ids, rules)
        seconds = time.perf_counter() - begin
        while engine.busy:
            begin = time.perf_counter()
            engine.step()
            seconds += time.perf_counter() - begin
            if after_step is not None:
                after_step(request)
        if request.error is not None:
            raise request.error
        return Answer(request.tokens, seconds, request.stats)
