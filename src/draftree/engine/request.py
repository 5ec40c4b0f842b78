"""A request: its prompt, sampling parameters, output and end."""

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
    """The state of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probabilities at a token's position, before logits processors.

    Attributes:
        chosen: of the emitted token.
        likeliest: (token id, log-probability) of the most probable tokens, best first.
    """

    chosen: float
    likeliest: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, logits: Tensor, token: int, count: int) -> TokenScores:
        """Return the scores of `token` and of the `count` most probable tokens, from raw logits [V]."""
        logp = logits.float().log_softmax(-1)
        values, tokens = logp.topk(min(count, logp.shape[-1]))
        return cls(float(logp[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))


@dataclass(frozen=True, slots=True)
class Emitted:
    """A new token.

    Attributes:
        token: its id.
        source: name of the drafter that drafted it; None for the target's own.
        scores: its log-probabilities if the request asks for them.
    """

    token: int
    source: str | None
    scores: TokenScores | None = None


@dataclass(frozen=True, slots=True)
class StepTree:
    """The draft tree of a step, for display.

    Attributes:
        tokens: of the nodes; the root (the newest token before the step) is first.
        parents: parent of each node; -1 for the root.
        drafters: drafter of each node; "" for the root.
        accepted: accepted nodes, the root first.
        emitted: tokens that the step emitted.
    """

    tokens: list[int]
    parents: list[int]
    drafters: list[str]
    accepted: list[int]
    emitted: list[int]


class Request:
    """A text in generation; `Engine.add` makes it.

    Attributes:
        state: waiting, running or finished.
        finish_reason: "eos", "length", "stop", "cancelled" or "error"; None before the end.
        error: the exception that ended it, or None.
        output: the emitted tokens, in order.
        trees: of its steps, with `keep_trees`.
        reused: prompt tokens that the cache had already.
        stats: its statistics.
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
        """Finish the request: keep its output, and free the state of sampling."""
        self.state = State.FINISHED
        self.context.chooser = self._criteria = None
        for processor in self.params.processors:
            if hasattr(processor, "unconditional_context"):  # Classifier-free guidance has a KV cache of its own.
                processor.unconditional_context = None

    @property
    def id(self) -> int:
        """Return the id, unique in the process."""
        return self.context.id

    @property
    def tokens(self) -> list[int]:
        """Return the new token ids."""
        return [e.token for e in self.output]

    def emit(self, token: int, source: str | None, scores: TokenScores | None = None) -> bool:
        """Append a token, and return whether the text ends with it."""
        params, context = self.params, self.context
        context.tokens.append(token)
        context.remaining -= 1
        emitted = Emitted(token, source, scores)
        self.output.append(emitted)
        if self._on_token is not None:
            with callers_mode():
                self._on_token(emitted)
        # Criteria may count calls, so they are called for each token, also at EOS and at the length limit.
        stop = self._criteria is not None and self._criteria.ask(token)
        if token in params.eos_token_ids:
            self.finish_reason = "eos"
        elif context.remaining <= 0:
            self.finish_reason = "length"
        elif stop:
            self.finish_reason = "stop"
        return self.finish_reason is not None
