"""DFlash and its kin: one pass over a block of mask tokens drafts all depths (z-lab, 2026).

The head's layers attend to the fused hidden states of the text, of which they keep keys and values alone. The tree is
the most probable part of the product of the depths (DDTree, arXiv 2604.12989).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftree.drafting.base import RequestState
from draftree.drafting.published.features import FeatureDrafter, Sizes, Text
from draftree.drafting.published.files import draft_vocabulary, fill, layer_config, read_config, read_tensors
from draftree.drafting.published.lattice import (
    ConfidenceHead,
    DynamicConv,
    MarkovHead,
    Selector,
    best_of_lattice,
    convolve,
)
from draftree.drafting.published.layers import Angles, Attention, Head, Span, linear, stock_parts, turned
from draftree.runner import Runner
from draftree.tree import Draft, TokenTree

LEFT_OUT = ("t2d", "d2t")
CODEBOOK = re.compile(r"^(candidate_selector\.\w+_codebook)\.weight$")  # z-lab's name of a bare parameter


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """What a folder's configuration says of its head.

    Attributes:
        config: of the layers.
        taps: layers of the target whose incoming hidden states are read.
        layers: of the target; None where it is not said.
        target_hidden_size: width of the target's hidden states.
        vocab_size, draft_vocab_size: token ids of the target and of the head.
        block: rows of a block: the newest token and masks.
        mask_token: the id of a mask.
        speculators: whether speculators wrote it; its numbers and windows mean other things than z-lab's.
        causal: whether rows of a block see only those before them; None for the default of a layer's kind.
        more: keys of the variants: DFlash2's convolutions and selector, DSpark's heads, factors of z-lab's.
    """

    config: Any
    taps: tuple[int, ...]
    layers: int | None
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    block: int
    mask_token: int
    speculators: bool
    causal: bool | None
    more: Mapping[str, Any]

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any], layers: int) -> BlockLayout:
        """Read a configuration of speculators or of z-lab, for a target of so many layers.

        Raises:
            ValueError: a key is missing, or layers of another kind.
        """
        speculators = "speculators_model_type" in config
        layer = layer_config(config, folder)
        own = {**config, **(config.get("dflash_config") or {})}
        for key in ("block_size", "mask_token_id"):
            if not isinstance(own.get(key), int):
                raise ValueError(f"{folder / 'config.json'} has no usable {key!r}: fetch the folder anew.")
        vocabulary = int(layer.vocab_size)
        return cls(
            layer,
            _taps(own, layer.num_hidden_layers, layers, speculators=speculators),
            own.get("num_target_layers"),
            int(own.get("target_hidden_size") or layer.hidden_size),
            vocabulary,
            int(own.get("draft_vocab_size") or vocabulary),
            own["block_size"],
            own["mask_token_id"],
            speculators,
            _causal(own, speculators=speculators),
            own,
        )

    @property
    def first_row(self) -> int:
        """The first row of a block that drafts: DSpark's newest token drafts already."""
        return 0 if self.more.get("sample_from_anchor") else 1


def _causal(config: Mapping[str, Any], *, speculators: bool) -> bool | None:
    """Return whether blocks are causal; None where sliding layers alone are."""
    if speculators:
        return False if config.get("sliding_window_non_causal") else None
    given = next((config[key] for key in ("is_causal", "causal", "causal_head") if config.get(key) is not None), None)
    return None if given is None else bool(given)


def _taps(config: Mapping[str, Any], count: int, layers: int, *, speculators: bool) -> tuple[int, ...]:
    """Return the tapped layers; speculators numbers their inputs, z-lab the outputs of layers."""
    if speculators:
        return tuple(config.get("aux_hidden_state_layer_ids") or (2, layers // 2, layers - 3))
    given = config.get("target_layer_ids")
    if given is None:  # Spread evenly between the second layer and the fourth last.
        steps = max(count - 1, 1)
        given = [layers // 2] if count == 1 else [round(1 + i * (layers - 4) / steps) for i in range(count)]
    return tuple(int(i) + 1 for i in given)


class BlockLayer(nn.Module):
    """A decoder layer whose attention also sees the context's features."""

    def __init__(self, config: Any, conv: tuple[int, int] | None) -> None:
        super().__init__()
        self.mlp, norm, _ = stock_parts(config)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn = Attention(config, config.hidden_size)
        if conv is not None:
            self.attention_conv = DynamicConv(config.hidden_size, *conv)
            self.mlp_conv = DynamicConv(config.hidden_size, *conv)
        self.conv = conv is not None

    def forward(self, number: int, x: Tensor, angles: Angles, spans: Sequence[Span]) -> Tensor:
        """Pass the blocks' rows [B * n, width] through layer `number`."""
        attended = self._convolved("attention", self.input_layernorm(x), spans, partial(self._attend, number, angles))
        x = x + attended
        return x + self._convolved("mlp", self.post_attention_layernorm(x), spans, lambda rows, _: self.mlp(rows))

    def _attend(self, number: int, angles: Angles, rows: Tensor, spans: Sequence[Span]) -> Tensor:
        made: Tensor = self.self_attn(number, rows, angles, spans)
        return made

    def _convolved(self, name: str, x: Tensor, spans: Sequence[Span], part: Callable[..., Tensor]) -> Tensor:
        """Return what a part of the layer makes of rows, between DFlash2's convolutions."""
        if not self.conv:
            return part(x, spans)
        blocks = x.view(len(spans), -1, x.shape[-1])
        before, behind = getattr(self, f"{name}_conv").coefficients(blocks)
        made = part(convolve(blocks, before).flatten(0, 1), spans)
        return convolve(made.view(blocks.shape), behind).flatten(0, 1)


class BlockHead(Head):
    """The weights of a head, by the names of the files.

    Args:
        layout: of its folder.
        own: optional tensors that the folder has: "embed_tokens", "lm_head".
    """

    def __init__(self, layout: BlockLayout, own: Sequence[str]) -> None:
        config, width = layout.config, layout.config.hidden_size
        super().__init__(width, layout.vocab_size, layout.draft_vocab_size, own)
        self.layout = layout
        with torch.device("meta"):
            _, norm, rope = stock_parts(config)
            self.fc = linear(len(layout.taps) * layout.target_hidden_size, width)
            more, conv = layout.more, None
            if "conv_kernel_size" in more:
                conv = int(more["conv_kernel_size"]), int(more["conv_group_size"])
            self.layers = nn.ModuleList(BlockLayer(config, conv) for _ in range(config.num_hidden_layers))
            self.hidden_norm, self.norm = norm(), norm()
            if "selector_rank" in more:
                self.candidate_selector = Selector(layout.vocab_size, width, int(more["selector_rank"]))
            rank = int(more.get("markov_rank") or 0)
            if rank:
                self.markov_head = MarkovHead(layout.vocab_size, layout.draft_vocab_size, rank)
            if more.get("enable_confidence_head"):
                joined = width + (rank if more.get("confidence_head_with_markov") else 0)
                self.confidence_head = ConfidenceHead(joined)
        with torch.device("cpu"):
            self.rope = rope(config)

    @property
    def pairs(self) -> Any:
        """What scores a candidate after another one; None in DFlash itself."""
        return getattr(self, "candidate_selector", None) or getattr(self, "markov_head", None)

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """Return features [..., width] of tapped hidden states, each [..., d]."""
        features: Tensor = self.hidden_norm(self.fc(torch.cat(list(taps), -1)))
        return features

    def read(self, text: Text) -> None:
        """Write the keys and values of a text's unread features."""
        features = text.features.upto(text.count)[text.read :]
        first = text.first + text.read
        positions = torch.arange(first, first + len(features), device=features.device)
        angles = self.rope(features, positions[None])
        layer: Any
        for number, layer in enumerate(self.layers):
            keys, values = (layer.self_attn.heads(name, features) for name in "kv")
            text.states.put(number, text.read, turned(keys, angles), values)
        text.read = text.count

    def block(self, embeddings: Tensor, texts: Sequence[Text]) -> Tensor:
        """Pass one block for each text, behind its certain rows.

        Args:
            embeddings: [B * n, width], of the newest token and the masks of each.
            texts: B, which have been read.

        Returns:
            [B * n, width], behind the last norm.
        """
        count = len(embeddings) // len(texts)
        rows = torch.arange(count, device=embeddings.device)
        positions = torch.cat([rows + (text.first + text.count) for text in texts])
        x, angles = embeddings, self.rope(embeddings, positions[None])
        layer: Any
        for number, layer in enumerate(self.layers):
            spans = [self._span(number, text, count, embeddings.device) for text in texts]
            x = layer(number, x, angles, spans)
        closed: Tensor = self.norm(x)
        return closed

    def _span(self, number: int, text: Text, count: int, device: torch.device) -> Span:
        """Return the rows of a block in one layer, and what they see of the text and of the block."""
        layout, config = self.layout, self.layout.config
        sliding = (config.layer_types or [""] * (number + 1))[number] == "sliding_attention"
        only_before = sliding if layout.causal is None else layout.causal
        if not sliding and not only_before:
            return Span(text.states, text.count, count, None)
        keys = torch.arange(text.count + count, device=device) - text.count  # from the block's first row
        behind = torch.arange(count, device=device)[:, None] - keys
        sees = behind >= 0 if only_before else torch.ones_like(behind, dtype=torch.bool)
        if sliding and layout.speculators:  # The window counts from the block's first row, and the block is inside.
            sees = sees & (keys >= -config.sliding_window)
        elif sliding:
            sees = sees & (behind.abs() < config.sliding_window)
        return Span(text.states, text.count, count, sees)


class DFlash(FeatureDrafter):
    """Drafts with a DFlash head; made by `draftree.load_drafter`.

    Args:
        head: its weights.
        vocabulary: the target's token id of each draft id; None where they are the same.
        candidates: tokens kept of each depth.
    """

    name = "dflash"
    kind = "DFlash"

    def __init__(self, head: BlockHead, vocabulary: Tensor | None = None, *, candidates: int = 8) -> None:
        layout = head.layout
        sizes = Sizes(layout.target_hidden_size, layout.layers, layout.vocab_size)
        super().__init__(head, sizes, layout.taps, vocabulary)
        self.branching = candidates

    @classmethod
    def load(cls, folder: Path, layers: int) -> DFlash:
        """Read a folder for a target with so many layers.

        Raises:
            ValueError: files that do not fit together.
        """
        layout = BlockLayout.of(folder, read_config(folder), layers)
        if layout.more.get("markov_head_type", "vanilla") != "vanilla":
            raise ValueError(
                f"The drafter in {str(folder)!r} has a {layout.more['markov_head_type']!r} Markov head, and draftree "
                "runs 'vanilla' ones: use another drafter of this model."
            )
        tensors = {CODEBOOK.sub(r"\1", name): tensor for name, tensor in read_tensors(folder).items()}
        head = BlockHead(layout, [name for name in ("embed_tokens", "lm_head") if f"{name}.weight" in tensors])
        fill(head, tensors, folder, LEFT_OUT)
        return cls(head, draft_vocabulary(tensors, layout.draft_vocab_size))

    def features_of(self, taps: Sequence[Tensor], runner: Runner) -> Tensor:
        if not self.head.layout.speculators:  # z-lab numbers outputs of layers, and the last one's is normed.
            last = len(runner.target.layers)
            taps = [runner.close(tap) if at == last else tap for at, tap in zip(self.taps, taps, strict=True)]
        features: Tensor = self.head.fuse(taps)
        return features

    def draft_live(self, requests: Sequence[RequestState], budgets: Sequence[int], reaches: Sequence[int]) -> TokenTree:
        live = [b for b, reach in enumerate(reaches) if reach > 0]
        texts = [self.text_of(requests[b]) for b in live]
        for text in texts:
            self.head.read(text)
        layout, device = self.head.layout, self.head.norm.weight.device
        masks = [layout.mask_token] * (layout.block - 1)
        newest = [requests[b].tokens[-1] for b in live]
        ids = torch.tensor([token for root in newest for token in (root, *masks)], dtype=torch.long, device=device)
        embeddings = self.embedded(ids) * layout.more.get("input_embedding_scale", 1.0)
        rows = self.head.block(embeddings, texts).view(len(live), layout.block, -1)
        rows = rows[:, layout.first_row :][:, : max(reaches)]
        logits = self._factored(self.logits(requests, rows))
        if self.head.pairs is None:
            return self.product(requests, budgets, reaches, logits)
        roots = torch.tensor(newest, dtype=torch.long, device=device)
        lattices = zip(*(part.tolist() for part in self.lattice(rows, logits, roots)), strict=True)
        drafts: list[Draft] = [([], [], [], self.source) for _ in requests]
        for b, (tokens, logp) in zip(live, lattices, strict=True):
            reach = reaches[b]
            drafts[b] = (*best_of_lattice(tokens[:reach], [logp[0][:1], *logp[1:reach]], budgets[b]), self.source)
        return TokenTree.from_drafts([request.tokens[-1] for request in requests], drafts, budgets)

    def _factored(self, logits: Tensor) -> Tensor:
        more = self.head.layout.more
        logits = logits * more.get("output_multiplier", 1.0)
        cap = more.get("final_logit_softcapping")
        return torch.tanh(logits / cap) * cap if cap else logits

    def lattice(self, rows: Tensor, logits: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the candidates of each depth and their log-probabilities after each candidate of the last depth.

        Args:
            rows: [L, D, width], behind the last norm.
            logits: [L, D, Vd].
            roots: LongTensor [L], the newest tokens.

        Returns:
            LongTensor [L, D, K], the target's token ids; and [L, D, K, K], of which depth 0 has equal rows.
        """
        head, base = self.head, logits.float().log_softmax(-1)
        logp, ids = base.topk(min(self.branching, logits.shape[-1]), -1)
        tokens = ids if self.vocabulary is None else torch.from_numpy(self.vocabulary).to(ids.device)[ids]
        previous = torch.cat([roots[:, None, None].expand(-1, 1, ids.shape[2]), tokens[:, :-1]], 1)
        scores = logp[:, :, None] + head.pairs(rows, previous, tokens, ids)
        # Tokens that are no candidates keep the probability that they had together.
        rest = (1 - logp.exp().sum(-1)).clamp(min=0)[:, :, None]
        scores = scores - (scores.exp().sum(-1) + rest).log()[..., None]
        if hasattr(head, "confidence_head"):
            best = torch.cat([roots[:, None], tokens[:, :-1, 0]], 1)
            joined = (
                [rows, head.markov_head.markov_w1(best)] if head.layout.more["confidence_head_with_markov"] else [rows]
            )
            sure = F.logsigmoid(head.confidence_head(torch.cat(joined, -1)))
            scores = scores + (sure[..., None] - scores.amax(-1)).clamp(max=0)[..., None]
        return tokens, scores
