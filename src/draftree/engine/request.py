"""A request: its prompt, sampling parameters, output and end, and its statistics.

The mean acceptance length is 1 + accepted / steps: accepted draft tokens, and one token of the target per step.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from draftree.acceptance.sampled import PrefixChooser
from draftree.drafting.base import RequestState
from draftree.engine.limits import Asked
from draftree.engine.sampling import SamplingParams
from draftree.grammar import GrammarProcessor, with_grammar
from draftree.runner.base import callers_mode
from draftree.runner.images import Images

STAGES = ("draft", "verify", "accept", "commit")
COUNTS = ("steps", "drafted", "accepted", "emitted", "pruned", "rollbacks")


@dataclass(slots=True)
class RequestStats:
    """Statistics of one request.

    Attributes:
        steps: passes of the target that could emit tokens; the first one reads the prompt. Of the passes that read a
            prompt of more than 512 tokens only the last one is a step.
        drafted: draft tokens that entered a pass.
        pruned: draft tokens that were pruned inside a pass.
        accepted: draft tokens that were accepted and emitted.
        emitted: new tokens.
        accepted_by_depth: accepted draft tokens at depth 1, 2, ...
        accepted_by_source: accepted draft tokens by drafter.
        seconds: time by stage. A step is shared equally by its requests. "verify" includes all passes that read the
            prompt.
        rollbacks: passes that rejected draft tokens, which for trees are most passes.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    pruned: int = 0
    rollbacks: int = 0

    @property
    def acceptance_length(self) -> float:
        """Return 1 + accepted / steps."""
        return 1 + self.accepted / self.steps if self.steps else 0.0

    @property
    def calls_per_token(self) -> float:
        """Return steps / emitted, the passes of the target per token."""
        return self.steps / self.emitted if self.emitted else 0.0

    @property
    def engagement(self) -> float:
        """Return 1 - accepted / emitted, the share of the target's own tokens."""
        return 1 - self.accepted / self.emitted if self.emitted else 0.0

    @property
    def rollback_ratio(self) -> float:
        """Return rollbacks / steps, the share of passes that rejected draft tokens."""
        return self.rollbacks / self.steps if self.steps else 0.0

    @property
    def total_seconds(self) -> float:
        """Return the time of all stages."""
        return sum(self.seconds.values())

    def count(self, drafted_by: Sequence[int | None], drafted: int) -> None:
        """Add the counts of a step."""
        accepted = len(drafted_by) - drafted_by.count(None)
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += len(drafted_by)
        self.rollbacks += accepted < drafted and len(drafted_by) > 0 and drafted_by[-1] is None
        by_depth = self.accepted_by_depth
        by_depth.extend([0] * (accepted - len(by_depth)))
        for depth in range(accepted):
            by_depth[depth] += 1

    def copy(self) -> RequestStats:
        """Return a copy; another thread may be in a step."""
        return replace(
            self,
            accepted_by_depth=self.accepted_by_depth.copy(),
            accepted_by_source=self.accepted_by_source.copy(),
            seconds=self.seconds.copy(),
        )

    def add(self, other: RequestStats) -> None:
        """Add the counts of another request."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.accepted_by_depth.extend([0] * (len(other.accepted_by_depth) - len(self.accepted_by_depth)))
        for depth, hits in enumerate(other.accepted_by_depth):
            self.accepted_by_depth[depth] += hits
        self.accepted_by_source.update(other.accepted_by_source)
        for stage, spent in other.seconds.items():
            self.seconds[stage] += spent

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON values."""
        return {
            **{name: getattr(self, name) for name in COUNTS},
            "acceptance_length": self.acceptance_length,
            "accepted_by_depth": list(self.accepted_by_depth),
            "accepted_by_source": dict(self.accepted_by_source),
            "seconds": dict(self.seconds),
            "calls_per_token": self.calls_per_token,
            "engagement": self.engagement,
            "rollback_ratio": self.rollback_ratio,
        }


@dataclass(slots=True)
class RunStats:
    """Statistics of the requests of a run.

    Attributes:
        runner: name of the runner; None if it is unknown.
    """

    requests: list[RequestStats]
    runner: str | None = None

    @property
    def total(self) -> RequestStats:
        """Return the sum over all requests."""
        total = RequestStats()
        for request in self.requests:
            total.add(request)
        return total

    @property
    def acceptance_length(self) -> float:
        """Return 1 + accepted / steps over all requests."""
        return self.total.acceptance_length

    def summary(self) -> str:
        """Print a table of the run with a sentence below it, and return both as text."""
        from rich.console import Console
        from rich.table import Table

        total = self.total
        table = Table(
            title=f"{len(self.requests)} request{'s' * (len(self.requests) != 1)}",
            show_header=False,
            title_justify="left",
        )
        rows: dict[str, object] = {} if self.runner is None else {"runner": self.runner}
        rows |= {
            "tokens": total.emitted,
            "of the model's own": f"{total.emitted - total.accepted} ({total.engagement:.0%})",
            "passes (steps)": total.steps,
            "passes a token": f"{total.calls_per_token:.2f}",
            "passes that rejected draft tokens": f"{total.rollbacks} ({total.rollback_ratio:.0%})",
            "acceptance length (1 + accepted / steps)": f"{total.acceptance_length:.2f}",
            "draft tokens": total.drafted,
            "draft tokens accepted": total.accepted,
        }
        if total.pruned:
            rows["draft tokens pruned inside the pass"] = f"{total.pruned} ({total.pruned / total.drafted:.0%})"
        if total.accepted:
            rows["most accepted in one pass"] = len(total.accepted_by_depth)
        rows |= {f"accepted from {name}": hits for name, hits in sorted(total.accepted_by_source.items())}
        rows |= {f"milliseconds to {stage}": f"{1000 * total.seconds[stage]:.1f}" for stage in STAGES}
        spent = total.total_seconds
        if spent:
            rows["tokens a second"] = f"{total.emitted / spent:.1f}"
        for name, value in rows.items():
            table.add_row(name, str(value))
        console = Console()
        with console.capture() as captured:
            console.print(table)
        text = f"{captured.get()}{total.steps} passes for {total.emitted} tokens, in {spent:.2f} s.\n"
        print(text, end="")
        return text


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
    """The draft tree of a step, for display."""

    tokens: list[int]  # Of the nodes; the root (the newest token before the step) is first.
    parents: list[int]  # Parent of each node; -1 for the root.
    drafters: list[str]  # Drafter of each node; "" for the root.
    accepted: list[int]  # Accepted nodes, the root first.
    emitted: list[int]  # Tokens that the step emitted.


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
        images: Images | None = None,
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
            images=images,
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
    def sharing(self) -> tuple[str | None, str | None]:
        """Return what a request must have in common with this one to reuse its keys and values, besides tokens."""
        images = self.context.images
        return self.params.cache_salt, None if images is None else images.digest

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
