"""The drafter's contract: the methods that the engine calls, and their arguments.

A drafter drafts a tree of next tokens for each request. Outside drafters (a trie, a small model) only draft and
observe; drafters inside the model also attach rows to the coming pass and read their outputs afterwards. State of
a request lives under the request's id, never on the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from draftree.acceptance.base import LossyRule
from draftree.acceptance.sampled import PrefixChooser
from draftree.grammar import GrammarState
from draftree.runner.images import Images
from draftree.runner.plan import PassResult, Surgery
from draftree.runner.target import Target
from draftree.tree import TokenTree

if TYPE_CHECKING:
    from draftree.runner import Runner
    from draftree.runner.kv.cache import SlotCache
    from draftree.runner.kv.encoder import EncoderState

Kept = TypeVar("Kept")


class ByRequest(dict[int, Kept]):
    """A drafter's state of each running request, by its id. Copies and pickles are empty: requests do not move."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (ByRequest, ())


@dataclass(slots=True)
class RequestState:
    """The state of a request, as drafters and shapes read it.

    Attributes:
        id: unique among all requests of the process.
        tokens: certain token ids, prompt first; the last one is the root of the next tree.
        prompt_length: tokens of the prompt.
        remaining: tokens that the request may still emit; deeper draft tokens are wasted.
        drafting: whether the request takes draft tokens at all.
        source: LongTensor [L], input of the encoder of an encoder-decoder; None for other models, and if only the
            encoder's output is known.
        chooser: the request's logits processors and noise; None for greedy decoding on raw logits.
        place: the running request's slot in the target; for drafters that draft inside it.
        prediction: token ids that the output may repeat in parts.
        cache_salt: drafters share what they learn only between requests of one salt.
        grammar: the grammar of the output; None for free text.
        eos_token_ids: tokens that end it; draft tokens behind one are wasted.
        images: of the prompt; None for text alone.
        shift: what the model adds to positions behind the prompt's images.
    """

    id: int
    tokens: list[int]
    prompt_length: int
    remaining: int
    drafting: bool = True
    source: Tensor | None = None
    chooser: PrefixChooser | None = None
    place: Place | None = None
    prediction: Sequence[int] = ()
    cache_salt: str | None = None
    grammar: GrammarState | None = None
    eos_token_ids: tuple[int, ...] = ()
    images: Images | None = None
    shift: int = 0

    @property
    def answer(self) -> list[int]:
        """Return the output tokens so far."""
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a drafter besides `draft`; the engine uses only declared ones.

    Attributes:
        attaches: `plan` may give rows, surgeries or taps for the coming pass.
        prepares: draft tokens are read from the pass before.
        unprepared: a drafter that prepares also drafts where nothing was prepared (a trie merged with heads).
        observes: `observe` is called after every step.
        copies_prediction: drafts from `RequestState.prediction` too.
    """

    attaches: bool = False
    prepares: bool = False
    unprepared: bool = False
    observes: bool = False
    copies_prediction: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step, made by a shape's `plan` and completed by its `trim`.

    Attributes:
        budgets: most draft tokens of each; 0 for none.
        prepares: whether each of them drafts from rows attached to this step's pass.
        trees: the trees to verify; None before `trim`.
        attach_to: nodes of each tree that get rows of the drafter's own; None leaves that to the drafter.
        gains: accepted draft tokens that the shape expects of each request; empty for none.
        decisions: the pause policy's decision for each request, a number of the shape's own; empty without a policy.
    """

    requests: Sequence[RequestState]
    budgets: Sequence[int]
    prepares: Sequence[bool]
    trees: TokenTree | None = None
    attach_to: int | None = None
    gains: Sequence[float] = ()
    decisions: Sequence[int] = ()

    @property
    def prepares_any(self) -> bool:
        """Return whether any request's next draft is prepared."""
        return any(self.prepares)


@dataclass(slots=True)
class Place:
    """A running request's slot in the target.

    A drafter may pass rows of its own through the target behind the committed text (`runner.run`), and restores the
    cache's lengths. Requests of one step are in neighbouring slots, in their order.

    Attributes:
        runner: runs passes; hold its lock around them.
        cache: the target's keys and values.
    """

    runner: Runner
    cache: SlotCache
    encoder: EncoderState | None
    slot: int

    @property
    def committed(self) -> int:
        """Return the number of the request's tokens in the cache: all but the newest, once its prompt was read."""
        return self.cache.lengths[self.slot]


def target_of(requests: Sequence[RequestState]) -> Target:
    """Return the target of the requests of a step."""
    place = requests[0].place
    assert place is not None  # requests of a step are running
    return place.runner.target


@dataclass(slots=True)
class Attachment:
    """A drafter's own rows in the coming pass, and the layers that it reads; row 0 is the tree's root.

    Attributes:
        embeddings: [B, M, d], extra rows that enter behind the N tree rows, or None.
        positions: LongTensor [B, M], their offset from the root's position.
        visible: BoolTensor [B, M, N + M], which tree and extra rows they see (the context always).
        prefix_rows: BoolTensor [B, N + M], rows that see the deep prefix.
        surgeries: changes mid-stack, in terms of these N + M rows.
        taps: layers whose incoming hidden states the drafter reads; the number of layers itself taps what the last one
            returns, from which `Runner.logits` makes logits. Passes make logits of trees only.
    """

    embeddings: Tensor | None = None
    positions: Tensor | None = None
    visible: Tensor | None = None
    prefix_rows: Tensor | None = None
    surgeries: tuple[Surgery, ...] = ()
    taps: tuple[int, ...] = ()


@dataclass(slots=True)
class Step:
    """The outcome of one pass, for the drafter to learn from.

    Attributes:
        trees: the verified trees; in a `Merge` only the drafter's own draft tokens have source bits.
        result: logits of the trees (from row `offset` on), row layouts and tapped hidden states.
        prefill_rows: per request, the number of rows of its prompt before its tree.
        offset: row at which the trees begin.
        accepted: per request, the node numbers of the accepted path, root first; of siblings with one token any may
            stand there.
        emitted: per request, the new tokens; its `tokens` already end with them. Empty for a part of a prompt.
        attach_to: nodes of each tree that rows were attached to, see `StepPlan`.
        own_rows: whether the rows and surgeries that `plan` returned were in the pass. They are left out of passes
            over parts of prompts, and in strict mode of those over a prompt's end; taps are always there.
    """

    requests: Sequence[RequestState]
    trees: TokenTree
    result: PassResult
    prefill_rows: list[int]
    offset: int
    accepted: list[list[int]] = field(default_factory=list)
    emitted: list[list[int]] = field(default_factory=list)
    attach_to: int | None = None
    own_rows: bool = True

    def standing(self, numbers: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the indices of rows among the last layer's hidden states.

        Args:
            numbers: of rows of each request, counted from its tree's root as in an `Attachment`; -1 for none.

        Returns:
            their columns; -1 for none, and for a row that has left in mid-stack.
        """
        rows = self.result.rows
        if rows is None:
            return [[self.offset + number if number >= 0 else -1 for number in own] for own in numbers]
        found = []
        for own, left in zip(numbers, rows.tolist(), strict=True):
            column = {number: at for at, number in enumerate(left) if number >= 0}
            found.append([column.get(self.offset + number, -1) if number >= 0 else -1 for number in own])
        return found

    def own_logits(self, layer: int, numbers: Sequence[Sequence[int]]) -> Tensor | None:
        """Return logits [B, D, V] of rows that the drafter attached; passes make logits of trees only.

        Args:
            layer: number of the model's layers, whose tap is what the last one returns.
            numbers: D rows of each request, as of `standing`.

        Returns:
            -inf where there is no row; None where the pass had no rows of the drafter's own, or not that tap.

        Raises:
            ValueError: a model with several hidden states a row (Gemma 3n).
        """
        hidden, runner = self.result.hidden.get(layer), self.result.runner
        if hidden is None or runner is None or not self.own_rows:
            return None
        if hidden.dim() != 3:
            raise ValueError(
                f"'{target_of(self.requests).model_type}' models keep several hidden states a row, which draftree "
                "cannot follow to the head: use a drafter that reads none, such as draftree.Lookahead()."
            )
        columns = self.standing(numbers)
        index = torch.tensor(columns, device=hidden.device, dtype=torch.long)[:, :, None]
        logits = runner.logits(hidden.gather(1, index.clamp(min=0).expand(-1, -1, hidden.shape[2])))
        if any(-1 in own for own in columns):  # mostly there is none, and this copies all logits
            logits = logits.masked_fill(index < 0, -torch.inf)
        return logits


class Drafter(ABC):
    """Base of all drafters.

    Attributes:
        name: its name in statistics.
        source: bit that marks its nodes; `Merge` gives each of its drafters one of its own instead.
        max_nodes: most draft tokens per request and step.
        capabilities: its abilities besides `draft`.
        node_budget: draft tokens of every step where its trees have one size, by construction (a static tree) or as
            `draftree tune` found best; None where a shape may choose.
        discount: factor by which `Merge` multiplies the probabilities of its draft tokens; below 1 if they are
            accepted less often than these say.
        acceptance: a lossy rule that belongs to its draft tokens and CHANGES texts; None for the lossless one.
    """

    name: str = "drafter"
    source: int = 1
    max_nodes: int = 64
    capabilities: Capabilities = Capabilities()
    node_budget: int | None = None
    discount: float = 1.0
    acceptance: LossyRule | None = None

    def bind(self, target: Target, *, eos_token_ids: Sequence[int] = ()) -> None:
        """Check shapes and vocabulary, and load weights. Called once per engine, before any work.

        With a lossy rule of its own (`acceptance`) also when requests come after a pause: its model may have changed.

        Engines of several models may use one drafter in turns: what a step needs of the model is found by its requests
        (`RequestState.place`) or its result, not in what was bound last.

        Args:
            target: the model.
            eos_token_ids: tokens that end its texts, by its own settings; a request may have others (`RequestState`).
        """

    def deep_prefix(self, target: Target) -> list[tuple[Tensor, Tensor]] | None:
        """Return per-layer (keys, values), each [kv heads, P, head dim], for `Attachment.prefix_rows`; None for none.

        Asked for when an engine is made, after `bind`, and perhaps more than once.
        """
        return None

    def source_name(self, source: int) -> str:
        """Return the name in statistics of a node with these source bits."""
        return self.name

    def rows(self, nodes: Any, requests: int = 1, attach_to: Any = None) -> Any:
        """Return the rows of a pass over trees of `nodes` nodes in all, with those that `plan` attaches.

        One row is a row through all layers; rows that join half-way count as half. Shapes size trees by it.

        Args:
            nodes: a number or an array of them, the roots of all trees included.
            requests: how many trees.
            attach_to: how many of all nodes get rows attached (`StepPlan.attach_to`, summed over the trees); None for
                what the drafter does by itself.
        """
        return nodes

    def begin(self, request: RequestState) -> None:
        """Set up the state of a new request."""

    def plan(self, step: StepPlan) -> Attachment | None:
        """Return this drafter's own rows for the coming pass over `step.trees`; None for none.

        Called where it declares `attaches`.
        """
        return None

    @abstractmethod
    def draft(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        """Return trees rooted at each request's newest token, with at most `budgets[b]` draft tokens each."""

    def observe(self, step: Step) -> None:
        """Learn from accepted tokens and the outputs of the drafter's own rows."""

    def end(self, request: RequestState) -> None:
        """Drop the state of a request that ended."""
