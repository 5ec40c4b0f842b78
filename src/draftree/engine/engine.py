"""The engine: requests in slots that join and leave between the steps of the loop.

`generate`, `stream` and the server are faces of this.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from draftree.by_name import as_drafter
from draftree.engine.config import EngineConfig, check_strict
from draftree.engine.limits import check_encoder_side, check_grammar, check_prompt, eos_token_ids
from draftree.engine.loop import Loop
from draftree.engine.recorder import about_engine
from draftree.engine.request import Emitted, Request, State
from draftree.engine.sampling import SamplingParams, params_of
from draftree.engine.scheduler import Scheduler, reading_groups
from draftree.errors import check_kind
from draftree.pruning.pruner import Pruner
from draftree.runner import Runner, open_runner
from draftree.runner.images import Images, check_images, images_of
from draftree.runner.step_cost import cached_cost
from draftree.runner.target import Target, offloaded
from draftree.shaping import Shape, shape_for
from draftree.shaping.base import Sizer

PREFILL_CHUNK = 512  # Prompt rows per pass; it bounds masks and activations of long prompts.
LEAST_CHUNK = 32  # Smallest chunk of one prompt; fewer rows take about the same time.


class Engine:
    """Generate for many requests at once on one model.

    Call `step` and `run` from one thread at a time. Streams may be read in several threads. `close`, also at the end of
    a `with` block, cancels waiting and running requests, so that a shared drafter forgets them.

    Args:
        model: a Hugging Face causal LM or encoder-decoder.
        config: how to decode; None to use the options.
        options: the fields of `EngineConfig` by name; `drafter` may be a name, such as "lookahead".

    Raises:
        TypeError, ValueError: the model, the drafter or an option does not fit; one sentence, before any work.
    """

    def __init__(self, model: Any, config: EngineConfig | None = None, **options: Any) -> None:
        if config is not None and options:
            raise TypeError(f"Engine got a config and the option {next(iter(options))!r}: put it into the config.")
        if isinstance(options.get("drafter"), str):
            options["drafter"] = as_drafter(options["drafter"], model)
        config = config or EngineConfig.of(**options)
        self.model = model  # Runners hold it weakly.
        self.config = config
        self.runner: Runner = open_runner(model, config.runner)
        if config.strict:
            config = self.config = replace(config, strict=check_strict(self.runner))
        drafter = config.drafter
        pruner: Pruner | None = None
        shape: Shape | None = None
        sizer: Sizer | None = None
        if drafter is not None:
            drafter.bind(self.target, eos_token_ids=eos_token_ids(model))
            if config.pruner is not None:
                cost = None if config.pruner.always else cached_cost(self.runner, config.clock)
                pruner = config.pruner.bind(self.runner, cost, config.clock)
            shape = config.shape or shape_for(drafter)
            cost = cached_cost(self.runner, config.clock) if shape.measures else None
            sizer = shape.bind(cost, drafter, pruner, packed=self.runner.packs)
        prefix = None if drafter is None else drafter.deep_prefix(self.target)
        if prefix is not None and config.strict and self.runner.name == "cuda_graphs":
            raise ValueError("strict=True cannot be kept in recorded passes with a drafter that has a deep prefix.")
        self.cache = self.runner.new_cache(config.slots, config.capacity, prefix)
        encoder = self.runner.new_encoder(config.slots) if self.target.encoder_decoder else None
        track = None
        if config.recorder is not None:
            about = about_engine(model, self.runner, drafter, shape, config.pruner, config.rule, strict=config.strict)
            track = config.recorder.track(about, drafter)
        self.loop = Loop(config, self.runner, self.cache, encoder, sizer, pruner, track)
        self.waiting: deque[Request] = deque()
        self._open: dict[Request, None] = {}  # Waiting and running requests, also while they change lists.
        keeps = config.keep_prefixes and not config.strict and not offloaded(model)
        self.scheduler = Scheduler(self.runner, self.cache, encoder, keeps=keeps)
        self._stepping = threading.Lock()
        self._turn = threading.RLock()  # One stream steps the engine; the others read their tokens afterwards.
        self._adding = threading.Lock()  # Held only while a request is put into both lists.
        self.closed = False

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        padded_prompt: Tensor | None = None,
        encoder_input: Tensor | None = None,
        encoder_states: Tensor | None = None,
        inputs: Mapping[str, Tensor] | Images | None = None,
        on_token: Callable[[Emitted], None] | None = None,
        **options: Any,
    ) -> Request:
        """Queue a prompt. It joins at the next step with a free slot.

        Args:
            prompt: token ids; for encoder-decoders the decoder's start.
            params: sampling parameters; the model's generation config is then ignored. None to use the options.
            padded_prompt: LongTensor [1, L], the prompt as logits processors see it (default: `prompt`).
            encoder_input: LongTensor [L], the input of the encoder.
            encoder_states: [L, d], the output of the encoder if it was computed already.
            inputs: image tensors of the prompt by name, as the model's processor returns them; see docs/images.md.
            on_token: called with each token as it is emitted.
            options: the options of `generate` for one request (`max_new_tokens`, `do_sample`, `grammar` with
                `tokenizer`, ...), and the fields of `SamplingParams` from `drafting` on.

        Raises:
            RuntimeError: the engine is closed.
            TypeError: params and options together, or an unknown option.
            ValueError: an empty prompt, ids outside the vocabulary, a request beyond the context, or a model that was
                changed since the engine was made (checked when no request runs).
        """
        if self.closed:
            raise RuntimeError("The engine is closed: make a new one.")
        if params is not None and options:
            raise TypeError(f"add got params and the option {next(iter(options))!r}: put it into the params.")
        if isinstance(prompt, str):
            raise TypeError("The prompt is a text, and an engine takes token ids: give tokenizer(text).input_ids.")
        check_kind(SamplingParams, "draftree.SamplingParams(...), or options by name", params=params)
        prompt = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
        check_encoder_side(self.target, encoder_input, encoder_states)
        images = images_of(self.target, inputs)
        params = params or params_of(self.target, prompt, options, encoder_input, padded_prompt)
        if self.config.rule is not None:
            self.config.rule.check(params.processors)
        check_prompt(prompt, params.max_new_tokens, self.target.vocab_size, self.target.max_positions)
        check_images(self.target, prompt, images)
        check_grammar(params.grammar, params.eos_token_ids, self.target.vocab_size)
        request = Request(
            prompt,
            params,
            device=self.target.device,
            padded_prompt=padded_prompt,
            encoder_input=encoder_input,
            encoder_states=encoder_states,
            images=images,
            on_token=on_token,
        )
        # Only the first request after a pause checks the model. Later ones must not wait for a step to end.
        with nullcontext() if self.busy else self._turn:
            if not self.busy:  # Another thread may have added a request meanwhile.
                self.scheduler.check_model()
            with self._adding:
                self._open[request] = None
                self.waiting.append(request)
        if self.closed:  # Another thread closed the engine meanwhile.
            self.cancel(request)
            raise RuntimeError("The engine is closed: make a new one.")
        return request

    def cancel(self, request: Request) -> None:
        """End a request and keep its output. A finished request stays as it is.

        Raises:
            ValueError: the request belongs to another engine.
        """
        with self._turn:
            own = request in self._open
            if request.state is State.FINISHED:
                return
            if not own:
                raise ValueError("This request belongs to another engine: cancel it there.")
            try:
                self.waiting.remove(request)
            except ValueError:  # It has a slot, or gets one now.
                request.finish_reason = "cancelled"
                if not self._stepping.locked():  # Otherwise the step releases it at its end.
                    self._release([request])
            else:
                request.finish_reason = "cancelled"
                self._over(request)

    def close(self) -> None:
        """Cancel waiting and running requests. Nothing can be added afterwards."""
        with self._adding:
            self.closed = True
        for request in list(self._open):
            self.cancel(request)

    def __del__(self) -> None:
        if hasattr(self, "scheduler") and self.running:  # A shared drafter must forget the requests.
            with suppress(Exception):
                self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def target(self) -> Target:
        """Return the model as the runner drives it."""
        return self.runner.target

    @property
    def running(self) -> list[Request]:
        """Return the requests in slots; request i has slot i."""
        return self.scheduler.running

    @property
    def busy(self) -> bool:
        """Return whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    def stream(self, request: Request) -> Generator[Emitted, None, None]:
        """Step the engine and yield `request`'s tokens; other requests advance as well.

        Streams may be read in several threads at once. Closing a stream cancels its request; a stream that was never
        read cancels nothing, so call `cancel`.

        Raises:
            Exception: the error that ended the request.
        """
        given = 0
        try:
            while new := self._next(request, given):
                yield from new
                given += len(new)
        finally:
            self.cancel(request)

    async def astream(self, request: Request) -> AsyncGenerator[Emitted, None]:
        """Yield `request`'s tokens like `stream`, for `async for`; steps run in a thread."""
        given, loop, threads = 0, asyncio.get_running_loop(), ThreadPoolExecutor(2, "draftree-stream")
        try:
            while new := await loop.run_in_executor(threads, self._next, request, given):
                for emitted in new:
                    yield emitted
                given += len(new)
        finally:
            if request.state is not State.FINISHED:  # In a thread, because it waits for a step under way.
                await asyncio.shield(loop.run_in_executor(threads, self.cancel, request))
            threads.shutdown(wait=False)

    def _next(self, request: Request, given: int) -> list[Emitted]:
        """Return the tokens after the first `given`, stepping until there are any; [] if the text has ended."""
        while _silent(request, given):
            time.sleep(0)  # Lets another stream take its turn and read its tokens before the next step.
            with self._turn:
                if not _silent(request, given):  # Another thread has stepped meanwhile.
                    break
                others = [*self.running, *self.waiting]
                if request not in self._open:
                    raise ValueError("This request belongs to another engine: stream it there.")
                try:
                    self.step()
                except Exception:  # It ended the running requests; this one may still wait.
                    if request.state is State.FINISHED or not any(other.error for other in others):
                        raise
        if len(request.output) == given and request.error is not None:
            raise request.error
        return request.output[given:]

    def run(self) -> None:
        """Step until all requests have finished."""
        while self.busy:
            self.step()

    def step(self) -> None:
        """Let waiting requests join, and advance each running request by one pass.

        Raises:
            RuntimeError: another step is under way (the call comes from a callback or another thread).
            Exception: an error of the drafter or the model; all running requests have failed with it.
        """
        with self._turn:
            begun = self._stepping.acquire(blocking=False)
        if not begun:
            raise RuntimeError("The engine is in a step already: call step() from one thread and from no callback.")
        try:
            with self.runner.guard():
                self._step()
        finally:
            self._stepping.release()

    def _step(self) -> None:
        scheduler, loop = self.scheduler, self.loop
        try:
            while len(self.running) < self.config.slots:
                try:
                    request = self.waiting.popleft()
                except IndexError:  # Another thread may have cancelled the last one.
                    break
                self._join(request)
            decoding = scheduler.decoding
            if scheduler.reading:
                self._read(decoding)
            if decoding:
                loop.advance(0, self.running[:decoding])
            self._release([request for request in self.running if request.finish_reason is not None])
        except BaseException as error:
            for request in self.running:
                if request.finish_reason is None:
                    request.error, request.finish_reason = error, "error"
            requests = list(self.running)
            scheduler.clear()  # The error may have come while requests changed slots.
            for request in requests:
                self._forget(request)
            raise

    def _read(self, decoding: int) -> None:
        """Read prompts; decoding requests wait for one chunk per step, not for whole prompts."""
        scheduler, loop = self.scheduler, self.loop
        alone, recurrence = loop.reads_alone, self.target.recurrence
        if decoding and not alone:
            shares = scheduler.shares(PREFILL_CHUNK, LEAST_CHUNK)
        else:
            chunk = PREFILL_CHUNK if recurrence is None else recurrence.prompt_rows(PREFILL_CHUNK)
            shares = [chunk] * scheduler.reading
        count, shares = scheduler.order(shares)
        reading = self.running[decoding:]
        images = any(map(scheduler.whole, reading[:count]))
        some = [share for share in shares[count:] if share]  # Those without a share are the last.
        for begin, end in reading_groups(some, alone=alone):
            chunked = slice(count + begin, count + end)
            loop.read(decoding + chunked.start, reading[chunked], shares[chunked])
        if scheduler.keeps and not images:
            for slot, request in enumerate(reading[:count], decoding):
                loop.mark(slot, request)
        unread = [len(scheduler.unread(request)) for request in reading[:count]]
        scheduler.begin(count)
        for begin, end in reading_groups(unread, alone=alone or images):
            try:
                loop.advance(decoding + begin, reading[begin:end])
            except (ValueError, RuntimeError) as error:
                if reading[begin].context.images is None or isinstance(error, torch.OutOfMemoryError):
                    raise
                # The model refuses these images, say because they do not fit the placeholders; others go on.
                reading[begin].error, reading[begin].finish_reason = error, "error"

    def _join(self, request: Request) -> None:
        try:
            self.scheduler.enter(request)
            request.state = State.RUNNING
            encoder = self.scheduler.encoder
            if encoder is not None:
                with self.runner.lock:
                    encoder.admit(len(self.running) - 1, request.context.source, states=request.encoder_states)
            if self.config.drafter is not None:
                self.config.drafter.begin(request.context)
        except Exception as error:
            request.error, request.finish_reason = error, "error"
            if request in self.running:
                self._release([request])
            else:
                self._over(request)

    def _release(self, requests: list[Request]) -> None:
        """Free the slots of finished requests, and let the drafter forget them."""
        with self.runner.guard():
            for request in requests:
                self._forget(request)
                self.scheduler.leave(request)

    def _over(self, request: Request) -> None:
        request.let_go()
        self._open.pop(request, None)

    def _forget(self, request: Request) -> None:
        """Let sizer and drafter forget a request that has left its slot."""
        self._over(request)
        for part in (self.loop.sizer, self.config.drafter):
            try:
                if part is not None:
                    part.end(request.context)
            except Exception as error:
                request.error = request.error or error


def _silent(request: Request, given: int) -> bool:
    """Return whether a request that has not ended has no tokens after the first `given`."""
    return len(request.output) == given and request.state is not State.FINISHED
