"""Ways to answer a prompt, all behind one call, so that a benchmark treats them alike.

A method gets token ids and gives back new token ids, the seconds it took and, where it drafts, its counts. One more
method is one more object here; nothing else of the harness changes.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from draftree.drafting import Drafter
from draftree.drafting.base import Context
from draftree.engine import Engine, Request, RequestStats
from draftree.engine.limits import eos_token_ids
from draftree.engine.options import read_options, rules_for
from draftree.shaping import Shape

MakeDrafter = Callable[[], Drafter | None]
MakeShape = Callable[[], Shape | None]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; where there is none the best one is taken.

    Attributes:
        temperature, top_k, top_p: as in Hugging Face.
        seed: of the noise; prompt b of a batch has seed + b in draftree, while Hugging Face draws all from one stream.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def options(self) -> dict[str, Any]:
        """What Hugging Face calls it, the seed left out."""
        return {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


def samplings_of(
    temperatures: Sequence[float], top_k: int | None, top_p: float | None, seed: int
) -> tuple[Sampling | None, ...]:
    """One for each temperature, None for 0.

    Raises:
        ValueError: cuts that no draw would heed.
    """
    if not any(temperatures) and (top_k is not None or top_p is not None):
        raise ValueError(
            "--top-k and --top-p shape draws, and every --temperature is 0: give one over 0, or leave them."
        )
    return tuple(Sampling(heat, top_k, top_p, seed) if heat else None for heat in dict.fromkeys(temperatures))


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt answered.

    Attributes:
        ids: new token ids, an EOS included.
        seconds: wall time of the call, prompt pass included; for prompts answered together its equal part.
        stats: the engine's counts; None for methods that are not ours.
        lengths: new tokens of every step; empty where the method does not tell.
        prompt_verify: seconds of the pass that read the prompt; 0 for methods that are not ours.
    """

    ids: list[int]
    seconds: float
    stats: RequestStats | None = None
    lengths: tuple[int, ...] = ()
    prompt_verify: float = 0.0


class Method(ABC):
    """Base of all methods.

    Attributes:
        name: key in result files.
        label: what tables print.
        optional: whether a benchmark goes on without it where it fails to get ready.
        note: what a table should say about it besides its figures.
        same_draws: whether it draws the tokens that plain decoding draws from the same seed.
    """

    optional = False
    note = ""
    same_draws = True

    def __init__(self, name: str, label: str) -> None:
        self.name = name
        self.label = label

    def ready(self, groups: Sequence[Sequence[Sequence[int]]]) -> None:
        """Pay what only first calls pay. A drafter that learns here is replaced when a round starts."""
        for prompts in groups:
            self.answers(prompts)

    def start(self) -> None:
        """A round begins: forget what the round before it taught, and be ready to answer."""

    def recall(self, ids: Sequence[int], answer: Sequence[int]) -> None:
        """A stopped run goes on: learn what an answer given before the stop has taught."""

    @abstractmethod
    def answer(self, ids: Sequence[int]) -> Answer:
        """Answer a prompt of token ids."""

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """Answer prompts together.

        Raises:
            ValueError: several, and the method takes one at a time.
        """
        return [self.answer(self._alone(prompts))]

    def _alone(self, prompts: Sequence[Sequence[int]]) -> Sequence[int]:
        if len(prompts) > 1:
            raise ValueError(f"{self.label} takes one prompt at a time")
        return prompts[0]


class HuggingFace(Method):
    """Hugging Face's own `generate`, at its defaults but for `options`; prompts of a batch are padded on the left."""

    def __init__(
        self,
        name: str,
        label: str,
        model: Any,
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name, label)
        self._model = model
        self._seed = None if sampling is None else sampling.seed
        drawn = {"do_sample": False} if sampling is None else sampling.options()
        self._options = {"max_new_tokens": max_new_tokens, **drawn, **options}
        self._ends = set(eos_token_ids(model))

    def answer(self, ids: Sequence[int]) -> Answer:
        """See `Method.answer`."""
        return self.answers([ids])[0]

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """See `Method.answers`."""
        width = max(len(ids) for ids in prompts)
        rows = [[0] * (width - len(ids)) + list(ids) for ids in prompts]
        prompt = torch.tensor(rows, device=self._model.device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=self._model.device)
        if self._seed is not None:
            torch.manual_seed(self._seed)
        begin = time.perf_counter()
        sequences = self._model.generate(prompt, attention_mask=mask, **self._options, **self._extra())
        said = 1 if self._model.config.is_encoder_decoder else width
        new: list[list[int]] = sequences[:, said:].tolist()  # waits for the device
        seconds = (time.perf_counter() - begin) / len(prompts)
        cut = [self._cut(ids) for ids in new]
        return [Answer(ids, seconds, lengths=self._lengths(ids)) for ids in cut]

    def _cut(self, ids: list[int]) -> list[int]:
        """The answer up to its EOS: behind it a batch's row is padded."""
        end = next((i for i, token in enumerate(ids) if token in self._ends), len(ids) - 1)
        return ids[: end + 1]

    def _extra(self) -> dict[str, Any]:
        """Options of one call."""
        return {}

    def _lengths(self, ids: list[int]) -> tuple[int, ...]:
        return (1,) * len(ids)


class DraftingHuggingFace(HuggingFace):
    """Hugging Face's prompt lookup or assisted generation; a stopping criterion counts the tokens of each step."""

    optional = True  # not every model can take guesses back

    def __init__(self, name: str, label: str, model: Any, max_new_tokens: int, **options: Any) -> None:
        super().__init__(name, label, model, max_new_tokens, **options)
        self.same_draws = self._seed is None
        self._counter = _StepLengths()

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """See `Method.answers`."""
        prompt = self._alone(prompts)
        self._counter.seen = [1 if self._model.config.is_encoder_decoder else len(prompt)]
        return super().answers(prompts)

    def _extra(self) -> dict[str, Any]:
        return {"stopping_criteria": StoppingCriteriaList([self._counter])}

    def _lengths(self, ids: list[int]) -> tuple[int, ...]:
        seen = self._counter.seen
        steps = [b - a for a, b in pairwise(seen)]
        while steps and sum(steps) > len(ids):  # of guesses behind an EOS
            steps[-1] -= 1
            if not steps[-1]:
                steps.pop()
        return tuple(steps)


class _StepLengths(StoppingCriteria):
    """Stops nothing; notes how long the text is after every step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        """See Hugging Face's `StoppingCriteria`."""
        if input_ids.shape[1] > self.seen[-1]:
            self.seen.append(input_ids.shape[1])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class CompiledHuggingFace(HuggingFace):
    """Hugging Face's `generate` with its static cache and its own torch.compile of the decoding step.

    Compiling is paid in `ready` and told in `note`, not in the speed. The static cache is as long as the longest
    prompt wants it, for every prompt: another length would compile again.
    """

    optional = True

    def __init__(
        self, name: str, label: str, model: Any, max_new_tokens: int, *, sampling: Sampling | None = None
    ) -> None:
        from transformers import CompileConfig

        config = CompileConfig()
        # Hugging Face compiles on a CPU only where this is set.
        config._compile_all_devices = True  # type: ignore[assignment]
        super().__init__(
            name,
            label,
            model,
            max_new_tokens,
            sampling=sampling,
            cache_implementation="static",
            compile_config=config,
        )

    def ready(self, groups: Sequence[Sequence[Sequence[int]]]) -> None:
        """See `Method.ready`."""
        begin = time.perf_counter()
        for prompts in sorted(groups, key=lambda group: max(map(len, group)), reverse=True):
            self.answers(prompts)
        self.note = f"compiling took {time.perf_counter() - begin:.0f} s, not counted"


class Draftree(Method):
    """The engine, one call an answer: options read and engine made inside the clock, as `draftree.generate` does.

    Only the drafter, and the shape with it, lives on from call to call within a round.

    Args:
        model: decoder-only, or an encoder-decoder, which is asked through its encoder.
        max_new_tokens: most tokens of an answer.
        make_drafter: gives the drafter of a round, or None for plain decoding.
        make_shape: gives the shape of a round; None leaves the engine's default.
        sampling: how tokens are drawn; None takes the best.
        options: more of `Engine`, such as `runner` or `reject_drafts`.
    """

    def __init__(
        self,
        name: str,
        label: str,
        model: Any,
        max_new_tokens: int,
        make_drafter: MakeDrafter = lambda: None,
        make_shape: MakeShape = lambda: None,
        *,
        sampling: Sampling | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name, label)
        self._model = model
        self._new = max_new_tokens
        self._make_drafter = make_drafter
        self._make_shape = make_shape
        self._seed = None if sampling is None else sampling.seed
        self._drawn = {} if sampling is None else sampling.options()
        self._options = options
        self._reads = bool(model.config.is_encoder_decoder)
        self.start()

    def start(self) -> None:
        """See `Method.start`."""
        self.drafter = self._make_drafter()
        self._shape = self._make_shape()

    def answer(self, ids: Sequence[int], after_step: Callable[[Request], None] | None = None) -> Answer:
        """See `Method.answer`; `after_step` sees the request after every pass, outside the measured time."""
        return self._together([ids], after_step)[0]

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """See `Method.answers`."""
        return [self.answer(prompts[0])] if len(prompts) == 1 else self._together(prompts)

    def recall(self, ids: Sequence[int], answer: Sequence[int]) -> None:
        """See `Method.recall`: what a trie keeps; what tree sizes were calibrated on is found anew."""
        if self.drafter is None:
            return
        Engine(self._model, drafter=self.drafter, shape=self._shape, slots=1, **self._options)  # binds
        request = Context(-1, list(ids), len(ids), self._new)
        self.drafter.begin(request)
        request.tokens += answer
        self.drafter.end(request)

    def _together(
        self, prompts: Sequence[Sequence[int]], after_step: Callable[[Request], None] | None = None
    ) -> list[Answer]:
        begin = time.perf_counter()
        options = read_options(self._model, None, None, None, {"max_new_tokens": self._new, **self._drawn})
        sources = [torch.tensor(ids, device=self._model.device) for ids in prompts] if self._reads else []
        starts = [[options.decoder_start]] * len(prompts) if self._reads else prompts
        engine = Engine(
            self._model,
            drafter=self.drafter,
            shape=self._shape,
            slots=len(prompts),
            capacity=max(map(len, starts)) + self._new + 64,
            **self._options,
        )
        requests = [
            engine.add(
                ids,
                rules_for(
                    self._model,
                    options,
                    max_new_tokens=self._new,
                    padded_length=len(ids),
                    seed=None if self._seed is None else self._seed + b,
                    encoder_ids=sources[b][None] if sources else None,
                ),
                encoder_input=sources[b] if sources else None,
            )
            for b, ids in enumerate(starts)
        ]
        seconds = time.perf_counter() - begin
        lengths: list[list[int]] = [[] for _ in requests]
        told = [0] * len(requests)
        first = [0.0] * len(requests)
        while engine.busy:
            begin = time.perf_counter()
            engine.step()
            seconds += time.perf_counter() - begin
            for b, request in enumerate(requests):
                new = len(request.output) - told[b]
                if new:
                    if not told[b]:
                        first[b] = request.stats.seconds["verify"]
                    lengths[b].append(new)
                    told[b] += new
                if after_step is not None:
                    after_step(request)
        for request in requests:
            if request.error is not None:
                raise request.error
        return [
            Answer(request.tokens, seconds / len(requests), request.stats, tuple(of), read)
            for request, of, read in zip(requests, lengths, first, strict=True)
        ]
