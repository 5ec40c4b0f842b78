"""A request: its prompt, its params, its output so far, and when it is over."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from draftree.acceptance.sampled import PrefixChooser
from draftree.drafting.base import RequestState
from draftree.engine.criteria import Asked
from draftree.engine.sampling import SamplingParams
from draftree.engine.stats import RequestStats
from draftree.grammar import GrammarProcessor, with_grammar
from draftree.runner.base import callers_mode

_ids = itertools.count()


class State(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probabilities that the model gave at a token's place, before any logits processor.

    Attributes:
        chosen: of the token that came.
        likeliest: token ids with theirs, best first.
    """

    chosen: float
    likeliest: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, logits: Tensor, token: int, count: int) -> TokenScores:
        """Those of `token` and of the `count` likeliest ones, by raw logits [V]."""
        logp = logits.float().log_softmax(-1)
        values, tokens = logp.topk(min(count, logp.shape[-1]))
        return cls(float(logp[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))


@dataclass(frozen=True, slots=True)
class Emitted:
    """One new token.

    Attributes:
        token: its id.
        source: the name of the drafter that drafted it; None for the target's own.
        scores: its log-probabilities where the request's rules ask for them.
    """

    token: int
    source: str | None
    scores: TokenScores | None = None


@dataclass(frozen=True, slots=True)
class StepTree:
    """One step's draft tree, for people to look at.

    Attributes:
        tokens: of the nodes, the root (the newest token before the step) first.
        parents: number of each node's parent; -1 for the root.
        drafters: who drafted each node; "" for the root.
        accepted: numbers of the nodes that were accepted, the root first.
        emitted: tokens that the step brought.
    """

    tokens: list[int]
    parents: list[int]
    drafters: list[str]
    accepted: list[int]
    emitted: list[int]


class Request:
    """One text being generated; made by `Engine.add`.

    Attributes:
        state: waiting, running or finished.
        finish_reason: "eos", "length", "stop", "cancelled" or "error"; None while it lives.
        error: the exception that ended it, if one did.
        output: what was emitted, in order.
        trees: of its steps, where the rules say so.
        reused: prompt tokens that were not read, as the cache had them.
        stats: its counts.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        device: torch.device,
        padded_prompt: Tensor | None = None,
        encoder_input: Tensor | None = None,
        encoder_states: Tensor | None = None,
        on_token: Callable[[Emitted], None] | None = None,
    ) -> None:
        self.params = params
        self.state = State.WAITING
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self.output: list[Emitted] = []
        self.stats = RequestStats()
        self.context = RequestState(
            next(_ids),
            list(prompt),
            len(prompt),
            params.max_new_tokens,
            params.drafting,
            encoder_input,
            prediction=params.prediction,
            cache_salt=params.cache_salt,
            grammar=None if params.grammar is None else params.grammar.begin(),
            eos_token_ids=params.eos_token_ids,
        )
        self.encoder_states = encoder_states
        self.reused = 0
        self.trees: list[StepTree] = []
        self._on_token = on_token
        prefix = padded_prompt
        if prefix is None:
            prefix = torch.tensor([list(prompt)], dtype=torch.long, device=device)
        self.context.chooser = self._make_chooser(prefix)
        self._criteria = Asked(params.criteria, prefix) if params.criteria else None

    def _make_chooser(self, prefix: Tensor) -> PrefixChooser | None:
        params, grammar, processors = self.params, self.context.grammar, self.params.processors
        if grammar is not None:
            own = GrammarProcessor(grammar, prefix.shape[1])
            processors = with_grammar(processors, own)
        if not params.sample and not processors:
            return None
        generator = None
        if params.sample and params.seed is not None:
            generator = torch.Generator(prefix.device).manual_seed(params.seed)
        return PrefixChooser(prefix, processors, generator, params.sample)

    def let_go(self) -> None:
        """The request is over: keep what it said, and nothing that is only there to choose tokens."""
        self.state = State.FINISHED
        self.context.chooser = self._criteria = None
        for processor in self.params.processors:
            if hasattr(processor, "unconditional_context"):  # of guidance: a KV cache of its own
                processor.unconditional_context = None

    @property
    def id(self) -> int:
        """Unique in the process."""
        return self.context.id

    @property
    def tokens(self) -> list[int]:
        """The new token ids."""
        return [e.token for e in self.output]

    def emit(self, token: int, source: str | None, scores: TokenScores | None = None) -> bool:
        """Add a token; return whether the text ends with it."""
        params, context = self.params, self.context
        context.tokens.append(token)
        context.remaining -= 1
        emitted = Emitted(token, source, scores)
        self.output.append(emitted)
        if self._on_token is not None:
            with callers_mode():
                self._on_token(emitted)
        # Criteria may count calls: they are called for every token, also where EOS or the length ends the text.
        stop = self._criteria is not None and self._criteria.ask(token)
        if token in params.eos_token_ids:
            self.finish_reason = "eos"
        elif context.remaining <= 0:
            self.finish_reason = "length"
        elif stop:
            self.finish_reason = "stop"
        return self.finish_reason is not None
