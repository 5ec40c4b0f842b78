"""The engine: requests in slots, and the one loop that everything in draftree goes through.

    draft -> shape -> verify (prune inside) -> accept -> commit -> observe

Requests join and leave between steps. `generate`, `stream` and the server are faces of this loop; there is no other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftree.acceptance.base import Walk, lazy_walk
from draftree.acceptance.greedy import greedy_walks
from draftree.drafting.base import Attachment, Drafter, Step
from draftree.engine.limits import check_prompt, eos_token_ids
from draftree.engine.passes import TreePass, tree_pass
from draftree.engine.request import Emitted, Request, Rules, State
from draftree.engine.stats import STAGES
from draftree.host import Host, open_host
from draftree.host.cost import cached_cost
from draftree.host.encoder import EncoderState
from draftree.host.plan import PassResult
from draftree.shaping import DynamicTree, Shape
from draftree.tree import TokenTree

Choice = tuple[int, int | None, int | None]  # node, token, the guess that said it
PREFILL_CHUNK = 512  # prompt rows per pass; keeps masks and activations of long prompts small


class Engine:
    """Generates for many requests at once on one model.

    Args:
        model: a Hugging Face causal LM or encoder-decoder, as loaded.
        drafter: makes guesses; None decodes plainly.
        slots: requests decoded together; more wait.
        shape: sizes the trees; by default by measured cost and calibrated probability (`DynamicTree`).
        pruner: prunes trees inside the pass; not there yet, must be None.
        host: "auto" (loop where the model qualifies, else hooked), "loop" or "hooked".
        strict: decide near-ties again by a one-row pass (for 16-bit types); see `draftree.engine.strict` for what
            that does and does not promise.
        capacity: cache columns to allocate at first, where the need is known.
        reject_drafts: verify guesses but accept none; the worst case, for measurements.

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
        pruner: Any = None,
        host: str = "auto",
        strict: bool = False,
        capacity: int = 256,
        reject_drafts: bool = False,
    ) -> None:
        if not isinstance(slots, int) or slots < 1:
            raise ValueError(f"slots is {slots}: give a whole number of at least 1.")
        if drafter is not None and not isinstance(drafter, Drafter):
            raise TypeError(
                f"drafter is a {type(drafter).__name__}: pass a drafter object such as draftree.Lookahead()."
            )
        if shape is not None and not isinstance(shape, Shape):
            raise TypeError(f"shape is a {type(shape).__name__}: pass a shape object such as draftree.DynamicTree().")
        if pruner is not None:
            raise ValueError("Pruning inside the pass is not built yet: leave pruner=None.")
        self.model = model  # hosts hold it weakly
        self.host: Host = open_host(model, host)
        self.target = self.host.target
        self.slots = slots
        self.drafter = drafter
        self.shape = shape
        self.reject_drafts = reject_drafts
        self.tolerance: float | None = None
        if strict:
            from draftree.engine.strict import measure_tolerance

            self.tolerance = measure_tolerance(self.host)
        prefix = None
        if drafter is not None:
            drafter.bind(self.target, eos_token_ids=eos_token_ids(model))
            prefix = drafter.deep_prefix
            if self.shape is None:
                drafter.shape = self.shape = drafter.shape or DynamicTree()
            if isinstance(self.shape, DynamicTree):
                self.shape.bind(cached_cost(self.host))
        self.cache = self.host.new_cache(slots, capacity, prefix)
        self.encoder = EncoderState(self.target, slots) if self.target.encoder_decoder else None
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
                with self.host.guard():
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
            with self.host.guard():
                self._step()
        finally:
            self._stepping = False

    def _step(self) -> None:
        joined = len(self.running)
        while self.waiting and len(self.running) < self.slots:
            self._join(self.waiting.popleft())
        try:
            if len(self.running) > joined:
                self._advance(joined, self.running[joined:])
            if joined:
                self._advance(0, self.running[:joined])
        except BaseException as error:
            for request in self.running:
                if request.finish_reason is None:
                    request.error, request.finish_reason = error, "error"
            raise
        finally:
            for request in [r for r in self.running if r.finish_reason is not None]:
                self._leave(request)

    def _advance(self, first: int, requests: list[Request]) -> None:
        """One pass of the target over requests in slots [first, first + len(requests))."""
        # Strict mode: a prompt, and what follows a near-tie, pass as the plain engine passes them.
        alone = self.tolerance is not None and any(r.decide_alone or not r.output for r in requests)
        marks = [time.perf_counter()]
        trees = self._draft(requests, alone)
        marks.append(time.perf_counter())
        turn, result = self._verify(first, requests, trees, alone)
        marks.append(time.perf_counter())
        walks = self._accept(requests, turn, result, None if alone or turn.bare else self.tolerance)
        marks.append(time.perf_counter())
        self.cache.commit(turn.committed([walk.nodes for walk in walks]), result.segments)
        marks.append(time.perf_counter())
        self._observe(requests, turn, result, walks, own_rows=not alone)
        if self.shape is not None and turn.offset == 0:  # reading the choices waits for the device, so it counts
            self.shape.clock(trees.batch * trees.width, marks[3] - marks[1])
        self._account(requests, trees, walks, marks)

    def _draft(self, requests: list[Request], alone: bool) -> TokenTree:
        device = self.target.device
        roots = TokenTree.roots(torch.tensor([r.context.tokens[-1] for r in requests], device=device))
        drafter, shape = self.drafter, self.shape
        if drafter is None or shape is None or alone:
            return roots
        contexts = [r.context for r in requests]
        budgets = shape.budgets(contexts, drafter.max_nodes)
        for b, request in enumerate(requests):
            if not request.rules.drafting or request.context.room <= 1:
                budgets[b] = 0
        if not any(budgets):
            return roots
        drafted = drafter.draft(contexts, budgets)
        if self.reject_drafts:  # -1 is no token, so no text confirms it
            drafted = replace(drafted, tokens=torch.where(drafted.depth > 0, -1, drafted.tokens))
        trees = shape.trim(contexts, drafted)
        return trees if trees.tokens.device == device else trees.to(device)

    def _verify(
        self, first: int, requests: list[Request], trees: TokenTree, alone: bool
    ) -> tuple[TreePass, PassResult]:
        starts = self.cache.lengths[first : first + len(requests)]
        trunks = [r.context.tokens[start:-1] for r, start in zip(requests, starts, strict=True)]
        floors = [r.context.prompt_length for r in requests]
        while max(len(t) for t in trunks) > PREFILL_CHUNK:
            self._prefill(first, requests, [t[:PREFILL_CHUNK] for t in trunks], floors, alone)
            trunks = [t[PREFILL_CHUNK:] for t in trunks]
        return self._pass(first, requests, trunks, trees, floors, alone)

    def _pass(
        self,
        first: int,
        requests: list[Request],
        trunks: list[list[int]],
        trees: TokenTree,
        floors: list[int],
        alone: bool,
    ) -> tuple[TreePass, PassResult]:
        attachment = self.drafter.plan([r.context for r in requests], trees) if self.drafter is not None else None
        if alone and attachment is not None:
            attachment = Attachment(taps=attachment.taps)
        starts = self.cache.lengths[first : first + len(requests)]
        turn = tree_pass(trunks, trees, starts, attachment, floors, self.target.max_positions)
        with self.host.lock:
            return turn, self.host.run(turn.plan, self.cache, first, self.encoder)

    def _prefill(
        self, first: int, requests: list[Request], chunks: list[list[int]], floors: list[int], alone: bool
    ) -> None:
        """Commit a part of long prompts; the drafter sees its hidden states, nothing is emitted."""
        # The chunk's last token plays the root; requests whose prompt is already in give an empty chunk.
        roots = TokenTree.roots(
            torch.tensor([c[-1] if c else 0 for c in chunks], dtype=torch.long, device=self.target.device)
        )
        turn, result = self._pass(first, requests, [c[:-1] for c in chunks], roots, floors, alone)
        walked = [[0] if chunk else [] for chunk in chunks]
        self.cache.commit(turn.committed(walked), result.segments)
        if self.drafter is not None:
            contexts = [r.context for r in requests]
            nothing: list[list[int]] = [[] for _ in requests]
            self.drafter.observe(
                Step(contexts, roots, result, turn.trunk, turn.offset, walked, nothing, own_rows=not alone)
            )

    def _accept(
        self, requests: list[Request], turn: TreePass, result: PassResult, tolerance: float | None
    ) -> list[Walk]:
        trees = turn.trees
        rows = turn.node_rows(result)
        logits = result.logits if rows is not None else result.logits[:, : trees.width]
        walks = [Walk() for _ in requests]
        if any(r.chooser is None for r in requests):
            walks = greedy_walks(trees, logits, rows, tolerance)
        for b, request in enumerate(requests):
            request.decide_alone = False
            if request.chooser is not None:
                where = None if rows is None else {n: i for i, n in enumerate(rows[b].tolist()) if n >= 0}
                choices = lazy_walk(trees, b, logits[b], where, request.chooser, tolerance)
                walk = Walk()
            else:
                whole = walks[b]
                choices = zip(whole.nodes, whole.tokens, whole.guesses, strict=True)
                walk = Walk(tie=whole.tie)
            walks[b] = walk
            try:
                self._emit(request, trees.source[b], choices, walk)
            except Exception as error:  # one request's criteria or callback must not stop the others
                request.error, request.finish_reason = error, "error"
        return walks

    def _emit(self, request: Request, sources: Tensor, choices: Iterable[Choice], walk: Walk) -> None:
        """Emit choices into `walk` up to where the text ends; whatever lies behind is cut off."""
        if request.finish_reason is not None:  # cancelled by another request's callback
            return
        for node, token, guess in choices:
            if token is None:
                walk.tie = True
                break
            source = None
            if guess is not None and self.drafter is not None:
                source = self.drafter.source_name(int(sources[guess]))
                request.stats.accepted_by_source[source] += 1
            walk.nodes.append(node)
            walk.tokens.append(token)
            walk.guesses.append(guess)
            if request.emit(token, source):
                return
        if walk.tie:
            request.decide_alone = True
            request.stats.re_decided += 1

    def _observe(
        self, requests: list[Request], turn: TreePass, result: PassResult, walks: list[Walk], *, own_rows: bool
    ) -> None:
        if self.drafter is None:
            return
        contexts = [r.context for r in requests]
        if self.shape is not None:
            self.shape.learn(contexts)
        emitted = [walk.tokens for walk in walks]
        nodes = [walk.nodes for walk in walks]
        self.drafter.observe(
            Step(contexts, turn.trees, result, turn.trunk, turn.offset, nodes, emitted, own_rows=own_rows)
        )

    def _account(self, requests: list[Request], trees: TokenTree, walks: list[Walk], marks: list[float]) -> None:
        share = 1 / len(requests)
        for b, (request, walk) in enumerate(zip(requests, walks, strict=True)):
            stats = request.stats
            stats.count(walk.accepted, trees.sizes[b] - 1, len(walk.tokens))
            for stage, begin, end in zip(STAGES, marks, marks[1:], strict=False):
                stats.seconds[stage] += (end - begin) * share

    # ---------------------------------------------------------------- slots

    def _join(self, request: Request) -> None:
        slot = len(self.running)
        self.cache.clear(slot)
        self.running.append(request)
        request.state = State.RUNNING
        try:
            if self.encoder is not None:
                with self.host.lock:
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
            self.running[slot] = self.running[last]
        self.running.pop()
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
