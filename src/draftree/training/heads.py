"""Define the training of published kinds of drafter: EAGLE-3 and DFlash heads, which read recorded hidden states.

A batch is the rows of its texts one after the other, without padding. Queries are computed only where drafts begin; the
rows before give keys and values.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from draftree.drafting.published.layers import turned
from draftree.errors import check_least
from draftree.runner import layout_of
from draftree.runner.target import inspect_model
from draftree.training.objectives import Objective
from draftree.training.recording import Recording
from draftree.training.rows import Batch, Data
from draftree.training.speculators import Speculator, dflash, eagle3


@dataclass(frozen=True, slots=True)
class Texts:
    """The rows of a batch of texts, one after the other, and the anchors in them: rows behind which drafts begin.

    Attributes:
        states: [R, taps * d]; tokens: LongTensor [R].
        row, place: LongTensor [N], of each anchor among all rows and in its text.
        text: of each text its first row, its length, its first anchor and the number of its anchors.
        ahead: LongTensor [N, depth + 1], the tokens behind each anchor; those behind a text's end are its last.
        there: BoolTensor [N, depth + 1], which of them exist.
        likely, shares: LongTensor and float [N, depth, K], the tokens that the model finds likeliest in the place of
            each drafted one, and their probabilities, which are 0 behind the text's end.
    """

    states: Tensor
    tokens: Tensor
    row: Tensor
    place: Tensor
    text: list[tuple[int, int, int, int]]
    ahead: Tensor
    there: Tensor
    likely: Tensor
    shares: Tensor

    @property
    def positions(self) -> Tensor:
        """Return the position [R] of each row in its text."""
        return torch.cat([torch.arange(size, device=self.tokens.device) for _, size, _, _ in self.text])


class HeadObjective(Objective):
    """Base of the losses of heads: the mean over anchors of each drafted token's loss, weighted by decay^depth.

    The loss is the cross entropy with the model's own probabilities, of its likeliest tokens in the draft vocabulary.

    Args:
        trained: holds the head.
        model: the frozen model that it is for.
        decay: weight of a depth's loss relative to the one before.
    """

    learning_rate: ClassVar[float] = 1e-3

    def __init__(self, trained: Speculator, model: Any, *, decay: float = 0.8) -> None:
        super().__init__()
        self.trained, self.target = trained, inspect_model(model)
        self.weights: Any = trained.weights
        self.depth, self.decay = int(trained.settings["depth"]), decay
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay is {decay}: give a number over 0 and at most 1.")
        self.places = tuple(range(2, self.depth + 2))

    def begin(self, data: Data, folder: Path, report: Callable[[str], None], *, bf16: bool) -> None:
        """Choose the draft vocabulary, and record the hidden states of all rows in `folder`."""
        table = self.target.model.get_output_embeddings()
        self.trained.choose(data, getattr(table, "weight", None))
        self.recording = Recording(folder, self.target, self.trained.taps, data.train + data.dev, bf16=bf16)
        self.recording.complete(report)
        device, known = self.target.device, self.trained.vocabulary
        self.draft_ids = torch.full((self.target.vocab_size,), -1, dtype=torch.long, device=device)
        self.draft_ids[known.to(device)] = torch.arange(len(known), device=device)

    def anchors_of(self, splits: Tensor) -> Tensor:
        """Return those of a text's split points [S] behind which drafts begin."""
        return splits

    def texts(self, batch: Batch) -> Texts:
        """Return the rows of a batch with what was recorded of them."""
        assert batch.number is not None
        device, ahead = batch.tokens.device, torch.arange(1, self.depth + 2, device=batch.tokens.device)
        parts: list[tuple[Tensor, ...]] = []
        text, rows, count = [], 0, 0
        for b, number in enumerate(batch.number.tolist()):
            size = int(batch.length[b])
            places = self.anchors_of(batch.splits[b][batch.real[b]])
            index = places[:, None] + ahead
            held, tokens = self.recording[number], batch.tokens[b, :size]
            there, answered = index < size, index[:, :-1] - (size - len(held.ids))
            answered = answered.clamp(max=len(held.ids) - 1)
            likely, shares = held.ids.to(device)[answered].long(), held.shares.to(device)[answered].float()
            own = held.states.to(device).float(), tokens, places + rows, places
            parts.append((*own, tokens[index.clamp(max=size - 1)], there, likely, shares * there[:, 1:, None]))
            text.append((rows, size, count, len(places)))
            rows, count = rows + size, count + len(places)
        states, tokens, row, place, *more = (torch.cat(part) for part in zip(*parts, strict=True))
        return Texts(states, tokens, row, place, text, *more)

    @abstractmethod
    def drafted(self, texts: Texts) -> list[Tensor]:
        """Return the logits [N, Vd] of each depth."""

    def forward(self, **fields: Tensor) -> dict[str, Tensor]:
        self._texts = self.texts(Batch(**fields))
        return super().forward(**fields)

    def measure(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        texts = self._texts
        logits = self.drafted(texts)
        losses = [self.loss(texts, depth, own) * self.decay**depth for depth, own in enumerate(logits)]
        if not self.training:  # A token outside the draft vocabulary is found in a last column, which is never likely.
            logits = [F.pad(own, (0, 1), value=-torch.inf)[None] for own in logits]
        return torch.stack(losses).sum(), logits

    def truths(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        texts, outside = self._texts, len(self.trained.vocabulary)
        ids = self.draft_ids[texts.ahead]
        ids = torch.where(ids < 0, outside, ids)
        return [(ids[None, :, depth + 1], texts.there[None, :, depth + 1]) for depth in range(self.depth)]

    def loss(self, texts: Texts, depth: int, logits: Tensor) -> Tensor:
        """Return the mean loss of a depth's logits [N, Vd] over the anchors with a token of this depth."""
        ids = self.draft_ids[texts.likely[:, depth]]
        shares = texts.shares[:, depth] * (ids >= 0)
        losses = -(logits.float().log_softmax(-1).gather(-1, ids.clamp(min=0)) * shares).sum(-1)
        return losses.sum() / texts.there[:, depth + 1].sum().clamp(min=1)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings of tokens: the target's, or the head's own."""
        table = self.weights.embed_tokens or self.target.model.get_input_embeddings()
        made: Tensor = table(ids)
        return made.float()

    def heads_of(self, attention: Any, names: str, rows: Tensor, positions: Tensor) -> list[Tensor]:
        """Return heads [R, heads, dim] of rows: queries, keys and values, by names such as "kv"."""
        angles = self.weights.rope(rows, positions[None])
        made = [(name, attention.heads(name, rows)) for name in names]
        return [part if name == "v" else turned(part, angles) for name, part in made]

    def attend(
        self, attention: Any, texts: Texts, queries: Tensor, context: Sequence[Tensor], own: Sequence[Tensor]
    ) -> Tensor:
        """Return what drafts' rows find in their text up to the anchor, and among their own rows.

        Args:
            attention: of the layer.
            texts: with N anchors.
            queries: [N, n, heads, dim].
            context: keys and values [R, kv heads, dim] of all rows.
            own: keys and values [N, m, kv heads, dim] of rows of each draft, all of which are seen.

        Returns:
            [N * n, hidden].
        """
        mixed = []
        for begin, size, first, count in texts.text:
            one, rows = slice(first, first + count), slice(begin, begin + size)
            asked, each = queries[one], own[0].shape[1]
            sees = torch.arange(size, device=asked.device) <= texts.place[one, None]
            chain = torch.eye(count, dtype=torch.bool, device=asked.device).repeat_interleave(each, 1)
            mask = torch.cat([sees, chain], 1).repeat_interleave(asked.shape[1], 0)
            keys, values = (
                torch.cat([there[rows], mine[one].flatten(0, 1)]).transpose(0, 1)[None]
                for there, mine in zip(context, own, strict=True)
            )
            flat = asked.flatten(0, 1).transpose(0, 1)[None]
            out = F.scaled_dot_product_attention(
                flat, keys, values, attn_mask=mask, scale=attention.scaling, enable_gqa=True
            )
            mixed.append(out[0].transpose(0, 1).flatten(1))
        projected: Tensor = attention.o_proj(torch.cat(mixed))
        return projected


class EagleObjective(HeadObjective):
    """Train an EAGLE-3 head on its own outputs (training-time test): depth k reads the output of depth k - 1."""

    def drafted(self, texts: Texts) -> list[Tensor]:
        head = self.weights
        layer, logits = head.layers[0], []
        attention = layer.self_attn
        features = head.fuse(texts.states.chunk(len(self.trained.taps), -1))
        # The last row of a text gets another's token; no draft begins there, and none sees it.
        _, inputs = layer.enter(self.embed(texts.tokens.roll(-1)), features)
        context = self.heads_of(attention, "kv", inputs, texts.positions)
        x, own = features[texts.row], [part[:0].new_zeros(len(texts.row), 0, *part.shape[1:]) for part in context]
        for depth in range(self.depth):
            x, inputs = layer.enter(self.embed(texts.ahead[:, depth]), x)
            query, *new = self.heads_of(attention, "qkv", inputs, texts.place + depth)
            if depth:
                own = [torch.cat([held, part[:, None]], 1) for held, part in zip(own, new, strict=True)]
            x = x + self.attend(attention, texts, query[:, None], context, own)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            logits.append(head.lm_head(head.head_input(x)))
            x = head.fed_back(x)
        return logits


class BlockObjective(HeadObjective):
    """Train a DFlash head on blocks behind some anchors of each text, drawn anew in every pass.

    Args:
        trained, model, decay: see `HeadObjective`.
        anchors: of a text in a pass.
    """

    def __init__(self, trained: Speculator, model: Any, *, anchors: int = 24, decay: float = 0.8) -> None:
        super().__init__(trained, model, decay=decay)
        check_least(1, anchors=anchors)
        self.anchors = anchors
        self.layout = layout_of(self.target.model)

    def anchors_of(self, splits: Tensor) -> Tensor:
        count = min(self.anchors, len(splits))
        if self.training:
            return splits[torch.randperm(len(splits), device="cpu")[:count].sort().values.to(splits.device)]
        return splits[torch.arange(count, device=splits.device) * len(splits) // count]

    def drafted(self, texts: Texts) -> list[Tensor]:
        head, block = self.weights, self.weights.layout.block
        features = head.fuse(texts.states.chunk(len(self.trained.taps), -1))
        masks = texts.ahead.new_full((len(texts.row), block - 1), self.trained.config["mask_token_id"])
        x = self.embed(torch.cat([texts.ahead[:, :1], masks], 1)).flatten(0, 1)
        places = (texts.place[:, None] + torch.arange(1, block + 1, device=x.device)).flatten()
        for layer in head.layers:
            attention = layer.self_attn
            context = self.heads_of(attention, "kv", features, texts.positions)
            made = self.heads_of(attention, "qkv", layer.input_layernorm(x), places)
            query, *own = (part.unflatten(0, (-1, block)) for part in made)
            x = x + self.attend(attention, texts, query, context, own)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        closed = head.norm(x).unflatten(0, (-1, block))[:, 1:]
        logits = self.layout.head(closed) if head.lm_head is None else head.lm_head(closed)
        return list(logits.unbind(1))


HEADS: dict[str, tuple[Callable[..., Speculator], type[HeadObjective]]] = {
    "eagle3": (eagle3, EagleObjective),
    "dflash": (dflash, BlockObjective),
}
