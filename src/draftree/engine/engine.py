"""The engine: requests in slots that join and leave between the steps of the loop.

`generate`, `stream` and the server are faces of this; there is no second loop anywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from draftree.acceptance import LossyRule
from draftree.drafting.base import Drafter, Seat
from draftree.engine.limits import check_early_exit, check_lossy_drafter, check_prompt, eos_token_ids
from draftree.engine.loop import Loop
from draftree.engine.recorder import Recorder, about_engine, check_recorder
from draftree.engine.request import Emitted, Request, Rules, State
from draftree.pruning import EarlyPruning, LossyCALM
from draftree.runner import Runner, open_runner
from draftree.runner.step_cost import cached_cost
from draftree.shaping import DynamicTree, Shape


class Engine:
    """Generates for many requests at once on one model.

    Args:
        model: a Hugging Face causal LM or encoder-decoder, as loaded.
        drafter: makes guesses; None decodes plainly.
        slots: requests decoded together; more wait.
        shape: sizes the trees; by default by measured cost and calibrated probability (`DynamicTree`).
        pruner: drops unlikely guesses inside the pass (`EarlyPruning`); None for none.
        runner: "auto", "hooked", "eager", "cpu", "cuda_graphs", or one opened for the model.
        strict: decide near-ties again by a one-row pass (for 16-bit types); see `draftree.engine.strict` for what
            that does and does not promise.
        capacity: cache columns to allocate at first, where the need is known; also the context that step costs are
            measured behind.
        reject_drafts: verify guesses but accept none; the worst case, for measurements.
        acceptance: None keeps the text as it is; `LossyTypical` keeps plausible guesses and CHANGES the text.
        recorder: keeps every step for `write_trace`; None keeps nothing.
        early_exit: None runs every layer for every token; `LossyCALM` lets tokens leave early and CHANGES the text.

    Raises:
        TypeError, ValueError: a model, drafter or option that does not fit; one sentence, before any work.
    """

    def __init__(
        self,
        model: Any,
        *,
        drafter: Drafter | None = None,
        slots: int = 8,
        shape: Shape | None = None,
        pruner: EarlyPruning | None = None,
        runner: str | Runner = "auto",
        strict: bool = False,
        capacity: int = 256,
        reject_drafts: bool = False,
        acceptance: LossyRule | None = None,
        recorder: Recorder | None = None,
        early_exit: LossyCALM | None = None,
    ) -> None:
        check_recorder(recorder)
        if not isinstance(slots, int) or slots < 1:
            raise ValueError(f"slots is {slots}: give a whole number of at least 1.")
        if drafter is not None and not isinstance(drafter, Drafter):
            raise TypeError(
                f"drafter is a {type(drafter).__name__}: pass a drafter object such as draftree.Lookahead()."
            )
        if shape is not None and not isinstance(shape, Shape):
            raise TypeError(f"shape is a {type(shape).__name__}: pass a shape object such as draftree.DynamicTree().")
        if acceptance is not None and not isinstance(acceptance, LossyRule):
            raise TypeError(
                f"acceptance is a {type(acceptance).__name__}: pass None (lossless) or draftree.LossyTypical()."
            )
        if drafter is not None and drafter.acceptance is not None:
            check_lossy_drafter(drafter, acceptance, shape, pruner)
            acceptance = drafter.acceptance
        if acceptance is not None and strict:
            changes = drafter if drafter is not None and drafter.acceptance is not None else acceptance
            raise ValueError(
                f"strict=True asks for the plain engine's text, which {type(changes).__name__} changes: choose one."
            )
        if pruner is not None and drafter is None:
            raise ValueError("pruner prunes a drafter's guesses, and drafter is None: pass a drafter, or no pruner.")
        if pruner is not None and not isinstance(pruner, EarlyPruning):
            raise TypeError(
                f"pruner is a {type(pruner).__name__}: pass a pruner object such as draftree.EarlyPruning(head)."
            )
        check_early_exit(early_exit, drafter=drafter, acceptance=acceptance, strict=strict)
        self.model = model  # runners hold it weakly
        self.runner: Runner = open_runner(model, runner)
        if early_exit is not None:
            early_exit.bind(self.runner)
        self.target = self.runner.target
        self.slots = slots
        self.drafter = drafter
        self.shape = shape
        tolerance = None
        if strict:
            from draftree.engine.strict import measure_tolerance

            tolerance = measure_tolerance(self.runner)
        prefix = None
        if drafter is not None:
            drafter.bind(self.target, eos_token_ids=eos_token_ids(model))
            prefix = drafter.deep_prefix
            if self.shape is None:
                drafter.shape = self.shape = drafter.shape or DynamicTree()
            if type(self.shape).bind is not Shape.bind:  # or nothing has to be measured
                self.shape.bind(cached_cost(self.runner, capacity), drafter, pruner, packed=self.runner.packs)
        if pruner is not None:
            pruner.bind(self.runner, None if pruner.always else cached_cost(self.runner, capacity))
        self.cache = self.runner.new_cache(slots, capacity, prefix)
        self.encoder = self.runner.new_encoder(slots) if self.target.encoder_decoder else None
        track = None
        if recorder is not None:
            lossy = acceptance if acceptance is not None else early_exit
            about = about_engine(model, self.runner, drafter, self.shape, pruner, lossy, strict=strict)
            track = recorder.track(about, drafter)
        self.loop = Loop(
            self.runner,
            self.cache,
            self.encoder,
            drafter,
            self.shape,
            tolerance,
            reject_drafts,
            acceptance,
            pruner,
            track=track,
            early_exit=early_exit,
        )
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # request i lives in slot i
        self._stepping = False

    # ---------------------------------------------------------------- requests come and go

    def add(
        self,
        prompt: Sequence[int],
        rules: Rules | None = None,
        *,
        padded_prompt: Tensor | None = None,
        encoder_input: Tensor | None = None,
        encoder_states: Tensor | None = None,
        on_token: Callable[[Emitted], None] | None = None,
    ) -> Request:
        """Queue a prompt (token ids); it joins at the next step that has a free slot.

        Args:
            prompt: token ids; for encoder-decoders the decoder's start.
            rules: how to choose and when to stop.
            padded_prompt: LongTensor [1, L], what logits processors see as the prompt (default: `prompt`).
            encoder_input: LongTensor [L], what the encoder of an encoder-decoder reads.
            encoder_states: [L, d], the encoder's output where it is known already.
            on_token: called with every token as it is emitted.

        Raises:
            ValueError: an empty prompt, ids outside the vocabulary, or a request beyond the model's context.
        """
        prompt = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
        rules = rules or Rules(eos_token_ids=eos_token_ids(self.target.model))
        if self.loop.acceptance is not None:
            self.loop.acceptance.check(rules.processors)
        check_prompt(prompt, rules.max_new_tokens, self.target.vocab_size, self.target.max_positions)
        request = Request(
            prompt,
            rules,
            device=self.target.device,
            padded_prompt=padded_prompt,
            encoder_input=encoder_input,
            encoder_states=encoder_states,
            on_token=on_token,
        )
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request now; what it has emitted stays."""
        if request.state is State.WAITING:
            self.waiting.remove(request)
            request.state, request.finish_reason = State.FINISHED, "cancelled"
        elif request.state is State.RUNNING:
            request.finish_reason = "cancelled"
            if not self._stepping:  # a step lets it go when it is done: slots must not move under it
                with self.runner.guard():
                    self._leave(request)

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    def stream(self, request: Request) -> Iterator[Emitted]:
        """Step the engine and yield `request`'s tokens as they come; other requests advance as well.

        Raises:
            Exception: whatever ended the request with an error.
        """
        given = 0
        while True:
            while given < len(request.output):
                yield request.output[given]
                given += 1
            if request.state is State.FINISHED:
                break
            self.step()
        if request.error is not None:
            raise request.error

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
        if self._stepping:
            raise RuntimeError("The engine is in a step already: call step() from one thread and from no callback.")
        self._stepping = True
        try:
            with self.runner.guard():
                self._step()
        finally:
            self._stepping = False

    def _step(self) -> None:
        joined = len(self.running)
        while self.waiting and len(self.running) < self.slots:
            self._join(self.waiting.popleft())
        try:
            if len(self.running) > joined:
                self.loop.advance(joined, self.running[joined:])
            if joined:
                self.loop.advance(0, self.running[:joined])
        except BaseException as error:
            for request in self.running:
                if request.finish_reason is None:
                    request.error, request.finish_reason = error, "error"
            raise
        finally:
            for request in [r for r in self.running if r.finish_reason is not None]:
                self._leave(request)

    # ---------------------------------------------------------------- slots

    def _join(self, request: Request) -> None:
        slot = len(self.running)
        self.cache.clear(slot)
        self.running.append(request)
        request.state = State.RUNNING
        request.context.seat = Seat(self.runner, self.cache, self.encoder, slot)
        try:
            if self.encoder is not None:
                with self.runner.lock:
                    self.encoder.admit(slot, request.encoder_input, states=request.encoder_states)
            if self.drafter is not None:
                self.drafter.begin(request.context)
        except Exception as error:
            request.error, request.finish_reason = error, "error"
            self._leave(request)

    def _leave(self, request: Request) -> None:
        """Free a request's slot; the last running request moves into it, so live slots stay contiguous."""
        slot = self.running.index(request)
        last = len(self.running) - 1
        if slot != last:
            self.cache.move(last, slot)
            if self.encoder is not None:
                self.encoder.move(last, slot)
            moved = self.running[slot] = self.running[last]
            moved.context.seat = Seat(self.runner, self.cache, self.encoder, slot)
        self.running.pop()
        request.context.seat = None
        self.cache.clear(last)
        if self.encoder is not None:
            self.encoder.clear(last)
        request.state = State.FINISHED
        if self.shape is not None:
            self.shape.end(request.context)
        if self.drafter is not None:
            try:
                self.drafter.end(request.context)
            except Exception as error:  # the slot is free by now; the first error of a request is the one to tell
                request.error = request.error or error
