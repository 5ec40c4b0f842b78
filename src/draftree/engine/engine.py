"""The engine: requests in slots that join and leave between the steps of the loop.

`generate`, `stream` and the server are faces of this. Only `tuning.replay` repeats the loop, on recorded answers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, Self

from torch import Tensor

from draftree.engine import streams
from draftree.engine.config import EngineConfig
from draftree.engine.limits import check_added, check_encoder_side, check_grammar, check_prompt, eos_token_ids
from draftree.engine.loop import Loop
from draftree.engine.options import rules_of
from draftree.engine.recorder import about_engine
from draftree.engine.request import Emitted, Request, SamplingParams, State
from draftree.engine.scheduler import Scheduler, reading_groups
from draftree.engine.strict import check_prefix, check_strict
from draftree.pruning.pruner import Pruner
from draftree.runner import Runner, open_runner
from draftree.runner.step_cost import cached_cost
from draftree.runner.target import Target, offloaded
from draftree.shaping import Shape, shape_for
from draftree.shaping.base import Sizer

PREFILL_CHUNK = 512  # prompt rows per pass; keeps masks and activations of long prompts small
LEAST_CHUNK = 32  # of one prompt; fewer rows would hardly be read sooner


class Engine:
    """Generates for many requests at once on one model.

    `step` and `run` belong to one thread at a time, streams may be read in several. In a `with` statement, or by
    `close`, it ends what still waits or runs, so that a drafter which others use forgets these requests.

    Args:
        model: a Hugging Face causal LM or encoder-decoder, as loaded.
        config: how to decode; None for the options.
        options: the fields of `EngineConfig` by name, where no config is given.

    Raises:
        TypeError, ValueError: a model, drafter or option that does not fit; one sentence, before any work.
    """

    def __init__(self, model: Any, config: EngineConfig | None = None, **options: Any) -> None:
        if config is not None and options:
            raise TypeError(f"Engine got a config and the option {next(iter(options))!r}: put it into the config.")
        config = config or EngineConfig.of(**options)
        self.model = model  # runners hold it weakly
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
            if config.strict:
                check_prefix(self.runner, drafter)
            if config.pruner is not None:
                cost = None if config.pruner.always else cached_cost(self.runner, config.clock)
                pruner = config.pruner.bind(self.runner, cost, config.clock)
            shape = config.shape or shape_for(drafter)
            cost = cached_cost(self.runner, config.clock) if shape.measures else None
            sizer = shape.bind(cost, drafter, pruner, packed=self.runner.packs)
        prefix = None if drafter is None else drafter.deep_prefix(self.target)
        self.cache = self.runner.new_cache(config.slots, config.capacity, prefix)
        encoder = self.runner.new_encoder(config.slots) if self.target.encoder_decoder else None
        track = None
        if config.recorder is not None:
            about = about_engine(model, self.runner, drafter, shape, config.pruner, config.rule, strict=config.strict)
            track = config.recorder.track(about, drafter)
        self.loop = Loop(config, self.runner, self.cache, encoder, sizer, pruner, track)
        self.waiting: deque[Request] = deque()
        self._open: dict[Request, None] = {}  # those that are not over, also while they move from one list to another
        keeps = config.keep_prefixes and not config.strict and not offloaded(model)
        self.scheduler = Scheduler(self.runner, self.cache, encoder, keeps=keeps)
        self._stepping = threading.Lock()
        self._turn = threading.RLock()  # of the streams: one steps, and the others find the tokens that this gave them
        self._adding = threading.Lock()  # for no longer than it takes to put a request into both lists
        self.closed = False

    # ---------------------------------------------------------------- requests come and go

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        padded_prompt: Tensor | None = None,
        encoder_input: Tensor | None = None,
        encoder_states: Tensor | None = None,
        on_token: Callable[[Emitted], None] | None = None,
        **options: Any,
    ) -> Request:
        """Queue a prompt (token ids); it joins at the next step that has a free slot.

        Args:
            prompt: token ids; for encoder-decoders the decoder's start.
            params: how to choose and when to stop, whatever the model's own generation config says; None for options.
            padded_prompt: LongTensor [1, L], what logits processors see as the prompt (default: `prompt`).
            encoder_input: LongTensor [L], what the encoder of an encoder-decoder reads.
            encoder_states: [L, d], the encoder's output where it is known already.
            on_token: called with every token as it is emitted.
            options: without params, those of `generate` (`max_new_tokens`, `do_sample`, `grammar` with
                `tokenizer`, ..) and, as of `SamplingParams`, those in
                `options.OF_A_REQUEST` (`drafting`, `cache_salt`, ..).

        Raises:
            RuntimeError: the engine is closed.
            TypeError: params and options, or an option that does not exist.
            ValueError: an empty prompt, ids outside the vocabulary, a request beyond the model's context, or a model
                that was changed since the engine was made (looked at while no request runs).
        """
        if self.closed:
            raise RuntimeError("The engine is closed: make a new one.")
        if params is not None and options:
            raise TypeError(f"add got params and the option {next(iter(options))!r}: put it into the params.")
        check_added(prompt, params, SamplingParams)
        prompt = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
        check_encoder_side(self.target, encoder_input, encoder_states)
        params = params or rules_of(self.target, prompt, options, encoder_input, padded_prompt)
        if self.config.rule is not None:
            self.config.rule.check(params.processors)
        check_prompt(prompt, params.max_new_tokens, self.target.vocab_size, self.target.max_positions)
        check_grammar(params.grammar, params.eos_token_ids, self.target.vocab_size)
        request = Request(
            prompt,
            params,
            device=self.target.device,
            padded_prompt=padded_prompt,
            encoder_input=encoder_input,
            encoder_states=encoder_states,
            on_token=on_token,
        )
        # Only the first request after a pause checks the model. One that comes later must not wait for a step to end.
        with nullcontext() if self.busy else self._turn:
            if not self.busy:  # no other thread has added one meanwhile
                self.scheduler.check_model()
            with self._adding:
                self._open[request] = None
                self.waiting.append(request)
        if self.closed:  # meanwhile, by another thread
            self.cancel(request)
            raise RuntimeError("The engine is closed: make a new one.")
        return request

    def cancel(self, request: Request) -> None:
        """End a request now; what it has emitted stays. One that has finished stays as it is.

        Raises:
            ValueError: a request of another engine.
        """
        with self._turn:
            own = request in self._open  # looked up first: whoever is over is taken out afterwards
            if request.state is State.FINISHED:
                return
            if not own:
                raise ValueError("This request belongs to another engine: cancel it there.")
            try:
                self.waiting.remove(request)
            except ValueError:  # it has a slot, or is about to get one
                request.finish_reason = "cancelled"
                if not self._stepping.locked():  # a step lets it go when it is done: slots must not move under it
                    self._release([request])
            else:
                request.finish_reason = "cancelled"
                self._over(request)

    def close(self) -> None:
        """End all requests; those that wait or run count as cancelled. Nothing can be added afterwards."""
        with self._adding:
            self.closed = True
        for request in list(self._open):
            self.cancel(request)

    def __del__(self) -> None:
        if (
            hasattr(self, "scheduler") and self.running
        ):  # dropped in the middle: a shared drafter must forget the requests
            with suppress(Exception):
                self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def target(self) -> Target:
        """The model as the runner drives it."""
        return self.runner.target

    @property
    def running(self) -> list[Request]:
        """The requests in slots; request i lives in slot i."""
        return self.scheduler.running

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    def stream(self, request: Request) -> Generator[Emitted, None, None]:
        """Step the engine and yield `request`'s tokens as they come; other requests advance as well.

        Streams may be read in several threads at once. Closing the iterator before its end, or dropping it, cancels the
        request, also before its first token.

        Raises:
            Exception: whatever ended the request with an error.
        """
        return streams.stream(request, self._next, self.cancel)

    def astream(self, request: Request) -> AsyncGenerator[Emitted, None]:
        """The same, with the same errors, for `async for`: steps run in threads, and the event loop goes on."""
        return streams.astream(request, self._next, self.cancel)

    def _next(self, request: Request, given: int) -> list[Emitted]:
        """The tokens behind the first `given`, as soon as there are any, whoever steps; none where the text is over.

        Raises:
            Exception: whatever ended the request with an error.
        """
        while _silent(request, given):
            time.sleep(0)  # whoever waits for the turn to read what has come gets it before the next step
            with self._turn:
                if not _silent(request, given):  # another thread has stepped meanwhile
                    break
                there = [*self.running, *self.waiting]
                if request not in self._open:
                    raise ValueError("This request belongs to another engine: stream it there.")
                try:
                    self.step()
                except Exception:  # of those that ran; this one may still wait
                    if request.state is State.FINISHED or not any(other.error for other in there):
                        raise
        if len(request.output) == given and request.error is not None:
            raise request.error
        return request.output[given:]

    def run(self) -> None:
        """Step until every request has finished."""
        while self.busy:
            self.step()

    # ---------------------------------------------------------------- the loop

    def step(self) -> None:
        """Advance every running request by one pass; first let waiting ones join (their prompts go in one pass).

        Raises:
            RuntimeError: called while a step runs (from a callback, or from another thread).
            Exception: whatever the drafter or the model raised; all running requests have failed with it.
        """
        with self._turn:  # no slot is being freed
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
                except IndexError:  # also where another thread has just cancelled the last one
                    break
                self._join(request)
            decoding = scheduler.decoding
            if scheduler.reading:
                self._read(decoding)
            if decoding:
                loop.advance(0, self.running[:decoding], closed=self.config.closed and not self.waiting)
        except BaseException as error:
            for request in self.running:
                if request.finish_reason is None:
                    request.error, request.finish_reason = error, "error"
            raise
        finally:
            self._release([r for r in self.running if r.finish_reason is not None])

    def _read(self, decoding: int) -> None:
        """Read prompts; those that decode wait for one chunk a step, not for whole prompts."""
        scheduler, loop = self.scheduler, self.loop
        strict = self.config.strict  # a prompt passes alone then, in chunks of one size
        shared = decoding and not strict
        shares = scheduler.shares(PREFILL_CHUNK, LEAST_CHUNK) if shared else [PREFILL_CHUNK] * scheduler.reading
        count, shares = scheduler.order(shares)
        reading = self.running[decoding:]
        some = [share for share in shares[count:] if share]  # those without one are the last
        for begin, end in reading_groups(some, alone=strict):
            chunked = slice(count + begin, count + end)
            loop.read(decoding + chunked.start, reading[chunked], shares[chunked])
        unread = [len(scheduler.unread(request)) for request in reading[:count]]
        scheduler.begin(count)
        for begin, end in reading_groups(unread, alone=strict):
            loop.advance(decoding + begin, reading[begin:end])

    # ---------------------------------------------------------------- slots

    def _join(self, request: Request) -> None:
        try:
            self.scheduler.enter(request)
        except BaseException as error:  # it has no slot that could be freed
            request.error, request.finish_reason = error, "error"
            self._over(request)
            raise
        request.state = State.RUNNING
        try:
            encoder = self.scheduler.encoder
            if encoder is not None:
                slot = self.running.index(request)
                with self.runner.lock:
                    encoder.admit(slot, request.context.source, states=request.encoder_states)
            if self.config.drafter is not None:
                self.config.drafter.begin(request.context)
        except Exception as error:
            request.error, request.finish_reason = error, "error"
            self._release([request])

    def _release(self, requests: list[Request]) -> None:
        """Let requests go, all of them also where a drafter, or whoever presses Ctrl-C, interrupts that."""
        interrupted = None
        with self.runner.guard():
            for request in requests:
                try:
                    if not self.scheduler.mixed:
                        self.scheduler.leave(request)
                        self._forget(request)
                except BaseException as error:
                    interrupted = error
            if self.scheduler.mixed:
                interrupted = self._give_up(requests, interrupted)
        if interrupted is not None:
            raise interrupted

    def _over(self, request: Request) -> None:
        request.let_go()
        self._open.pop(request, None)

    def _give_up(self, leaving: list[Request], error: BaseException | None) -> BaseException | None:
        """End those that leave and all that run, whose contexts lie nobody knows where; return the last error."""
        requests = [r for r in dict.fromkeys([*leaving, *self.running]) if r.state is not State.FINISHED]
        self.scheduler.give_up()
        for request in requests:
            if request.finish_reason is None:
                request.error, request.finish_reason = error, "error"
            try:
                self._forget(request)
            except BaseException as another:
                error = another
        return error

    def _forget(self, request: Request) -> None:
        """Have the drafter forget a request that has no slot any more."""
        self._over(request)
        knowing: list[Any] = [one for one in (self.loop.sizer, self.config.drafter) if one is not None]
        for one in knowing:
            try:
                one.end(request.context)
            except Exception as error:  # the slot is free by now; the first error of a request is the one to raise
                request.error = request.error or error
            except BaseException:  # Ctrl-C in the middle of it: once more, as others may go on using the drafter
                for again in knowing:
                    with suppress(Exception):
                        again.end(request.context)
                raise


def _silent(request: Request, given: int) -> bool:
    """Whether a request that is not over has no tokens behind the first `given`."""
    return len(request.output) == given and request.state is not State.FINISHED
