"""The base of published drafters: they read the target's hidden states of every certain token of a text.

After each pass the tapped states of the committed rows are fused to one *feature* a token. A head reads the features of
a request when it drafts next, and keeps its own keys and values of them. Those of draft rows are forgotten.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from draftree.drafting.base import Attachment, ByRequest, Capabilities, Drafter, RequestState, Step, StepPlan
from draftree.drafting.published.layers import NORMS, Grown, States
from draftree.native import load_library
from draftree.runner import Runner
from draftree.runner.base import top_tokens
from draftree.runner.cpu.layers import CompiledNorm
from draftree.runner.kv.cache import rows_within
from draftree.runner.target import Target
from draftree.runner.weights.packed import in_eight_bits
from draftree.tree import TokenTree

ENDED = 4  # Texts that ended and are kept, for others that begin like them.


@dataclass(slots=True)
class Text:
    """What a drafter knows of a request's text.

    Attributes:
        tokens: the request's, which grow.
        first: position of its first row; more than 0 where the engine had read the beginning for a text unknown here.
        count: rows with features: all certain tokens but the newest.
        read: rows whose keys and values the head has.
    """

    tokens: list[int]
    first: int = 0
    count: int = 0
    read: int = 0
    features: Grown = field(default_factory=Grown)
    states: Any = field(default_factory=States)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the target that a head was made for; None where its files do not tell."""

    hidden_size: int | None
    layers: int | None
    vocab_size: int | None


class FeatureDrafter(Drafter):
    """Base of the drafters with a head that reads the target's hidden states.

    Args:
        head: its weights, in any type, which are moved to the target's device and type.
        sizes: of the target that it fits.
        taps: layers whose incoming hidden states it reads, in this order; the number of layers taps what the last one
            returns.
        vocabulary: LongTensor [Vd], the target's token id of each draft id; None where they are the same.

    Attributes:
        branching: tokens that are kept behind a node, or of a depth.
        kind: what error messages call it.
    """

    capabilities = Capabilities(attaches=True, observes=True)
    kind: ClassVar[str] = "drafter"
    branching: int = 4

    def __init__(self, head: nn.Module, sizes: Sizes, taps: Sequence[int], vocabulary: Tensor | None) -> None:
        self.head: Any = head.eval().requires_grad_(False)
        self.sizes, self.taps = sizes, tuple(taps)
        self.vocabulary = None if vocabulary is None else vocabulary.numpy()
        self._texts: ByRequest[Text] = ByRequest()
        self._ended: OrderedDict[int, Text] = OrderedDict()

    @abstractmethod
    def features_of(self, taps: Sequence[Tensor], runner: Runner) -> Tensor:
        """Return the features [R, d'] of tapped hidden states, each [R, d]."""

    @abstractmethod
    def draft_live(self, requests: Sequence[RequestState], budgets: Sequence[int], reaches: Sequence[int]) -> TokenTree:
        """Return the trees; a request of reach 0 gets none. At least one has more."""

    def bind(self, target: Target, *, eos_token_ids: Sequence[int] = ()) -> None:
        """See `Drafter.bind`.

        Raises:
            ValueError: a model of other sizes, or with an encoder.
        """
        if target.encoder_decoder:
            raise ValueError(f"{self.kind} drafts for decoder-only models, not for '{target.model_type}'.")
        found = {"hidden_size": target.hidden_size, "layers": len(target.layers), "vocab_size": target.vocab_size}
        for name, value in found.items():
            expected = getattr(self.sizes, name)
            if expected not in (None, value):
                raise ValueError(
                    f"This {self.kind} drafter was made for a model with {name} {expected}, and this one has {value}: "
                    "use a drafter that was trained for it."
                )
        if max(self.taps) > len(target.layers):
            raise ValueError(
                f"This {self.kind} drafter reads layer {max(self.taps)}, and the model has {len(target.layers)}: use a "
                "drafter that was trained for it."
            )
        self._place(target)

    def _place(self, target: Target) -> None:
        """Move the head to the target; on a CPU it has float32, with norms, and products of 8 bits, in C."""
        own = self.head.embed_tokens
        self._table = target.model.get_input_embeddings() if own is None else own
        if target.device.type != "cpu":
            self.head.to(target.device)
            for weight in self.head.parameters():  # Buffers keep their type: frequencies, and biases of experts.
                weight.data = weight.data.to(target.dtype)
            return
        self.head.float()
        for name, module in list(self.head.named_modules()) if load_library() is not None else ():
            if type(module) is nn.Linear and module.in_features % 32 == 0:
                self.head.set_submodule(name, in_eight_bits(module))
            elif type(module) in NORMS:
                self.head.set_submodule(name, CompiledNorm(module))

    def begin(self, request: RequestState) -> None:
        self._texts[request.id] = self._text(request.tokens)

    def plan(self, step: StepPlan) -> Attachment | None:
        """See `Drafter.plan`: looks at hidden states, in every pass."""
        return Attachment(taps=self.taps)

    @torch.no_grad()
    def observe(self, step: Step) -> None:
        """See `Drafter.observe`: keep the features of the rows that were committed."""
        result = step.result
        rows = [
            [*range(before), *(step.offset + node for node in path)]
            for before, path in zip(step.prefill_rows, step.accepted, strict=True)
        ]
        taps, places = [], dict[int, Tensor]()  # of rows, by the first layer of their segment
        for tap in self.taps:
            segment = max((s for s in result.segments if s.start <= tap), key=lambda s: s.start)
            hidden = result.hidden[tap]
            if segment.start not in places:
                each = enumerate(rows_within(segment, rows))
                flat = [b * hidden.shape[1] + row for b, own in each for row in own]
                places[segment.start] = torch.tensor(flat, dtype=torch.long, device=hidden.device)
            taps.append(hidden.flatten(0, 1).index_select(0, places[segment.start]))
        like = self.head.norm.weight
        features = self.features_of([tap.to(like) for tap in taps], result.runner)
        for request, new in zip(step.requests, features.split(list(map(len, rows))), strict=True):
            text = self._texts.get(request.id)
            if text is None or request.place is None:
                continue
            if not text.count:
                text = self._texts[request.id] = self._behind(request, request.place.committed - len(new))
            text.features.put(text.count, new)
            text.count += len(new)

    def _behind(self, request: RequestState, start: int) -> Text:
        """Return what is known of a text whose first `start` tokens the engine had read for another one."""
        for text in [*self._texts.values(), *reversed(self._ended.values())] if start else ():
            if text.first == 0 and text.count >= start and text.tokens[:start] == request.tokens[:start]:
                read = min(text.read, start - 1)  # The head's last row may have read a token that differs.
                return Text(request.tokens, 0, start, read, text.features.copied(start), text.states.copied(read))
        return self._text(request.tokens, start)

    def _text(self, tokens: list[int], first: int = 0) -> Text:
        return Text(tokens, first)

    def draft(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        reaches = []
        for request, budget in zip(requests, budgets, strict=True):
            text = self._texts.get(request.id)
            known = text is not None and text.read < text.count and text.first + text.count == len(request.tokens) - 1
            reaches.append(max(request.remaining - 1, 0) if known and budget > 0 else 0)
        if not any(reaches):
            return TokenTree.roots(torch.tensor([r.tokens[-1] for r in requests], dtype=torch.long, device="cpu"))
        with torch.no_grad():
            return self.draft_live(requests, budgets, reaches)

    def end(self, request: RequestState) -> None:
        text = self._texts.pop(request.id, None)
        if text is not None and text.count:
            self._ended[request.id] = text
            while len(self._ended) > ENDED:
                self._ended.popitem(last=False)

    def text_of(self, request: RequestState) -> Text:
        """Return what is known of a running request's text."""
        return self._texts[request.id]

    def embedded(self, ids: Tensor) -> Tensor:
        """Return the embeddings [R, d] of LongTensor [R], by the head's own table or the target's."""
        made: Tensor = self._table(ids).to(self.head.norm.weight.dtype)
        return made

    def logits(self, requests: Sequence[RequestState], closed: Tensor) -> Tensor:
        """Return logits [..., Vd] of what the head's last linear reads, its own or the target's."""
        place, own = requests[0].place, self.head.lm_head
        assert place is not None
        if own is None:
            rows = closed.to(place.runner.target.dtype).flatten(0, -2)[None]
            return place.runner.head(rows)[0].view(*closed.shape[:-1], -1)
        made: Tensor = own(closed)
        return made

    def best(self, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return the target's token ids of the best logits [R, Vd], and their log-probabilities, each [R, K]."""
        tokens, logp = top_tokens(logits[None], min(self.branching, logits.shape[-1]))
        return tokens[0] if self.vocabulary is None else self.vocabulary[tokens[0]], logp[0]

    def product(
        self, requests: Sequence[RequestState], budgets: Sequence[int], reaches: Sequence[int], logits: Tensor
    ) -> TokenTree:
        """Return the most probable trees of depths that were drafted at once.

        Args:
            requests, budgets, reaches: see `draft_live`.
            logits: [L, D, Vd], of the requests that draft.
        """
        live, depth = [b for b, reach in enumerate(reaches) if reach > 0], logits.shape[1]
        tokens, logp = (part.reshape(len(live), depth, -1) for part in self.best(logits.flatten(0, 1)))
        shape = len(requests), *tokens.shape[1:]
        held = np.zeros(shape, dtype=np.int64), np.full(shape, -np.inf, dtype=np.float32)
        held[0][live], held[1][live] = tokens, logp
        for own, reach in zip(held[1], reaches, strict=True):
            own[reach:] = -np.inf
        roots = torch.tensor([request.tokens[-1] for request in requests], dtype=torch.long, device="cpu")
        return TokenTree.from_candidates(roots, *held, budgets, self.source)
