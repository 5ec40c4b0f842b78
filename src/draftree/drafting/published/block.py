"""DFlash and its kin: one pass over a block of mask tokens drafts all depths (z-lab, 2026).

The head's layers attend to the fused hidden states of the text, of which they keep keys and values alone. The tree is
the most probable part of the product of the depths (DDTree, arXiv 2604.12989).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftree.drafting.base import RequestState
from draftree.drafting.published.features import FeatureDrafter, Sizes, Text
from draftree.drafting.published.files import draft_vocabulary, fill, layer_config, read_config, read_tensors
from draftree.drafting.published.layers import Attention, Head, Span, causal, linear, stock_parts, turned
from draftree.errors import brief
from draftree.runner import Runner
from draftree.tree import TokenTree

LEFT_OUT = ("t2d", "d2t")


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
        causal: whether rows of a block see only those before them.
    """

    config: Any
    taps: tuple[int, ...]
    layers: int | None
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    block: int
    mask_token: int
    causal: bool = False

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any], layers: int) -> BlockLayout:
        """Read a configuration of speculators or of z-lab, for a target of so many layers.

        Raises:
            ValueError: a key is missing, or layers of another kind.
        """
        speculators = "speculators_model_type" in config
        layer = layer_config(config, folder)
        own = {**config, **(config.get("dflash_config") or {})}
        try:
            vocabulary, block, mask = int(layer.vocab_size), int(own["block_size"]), int(own["mask_token_id"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder / 'config.json'} has no usable {brief(error)}: fetch the folder anew.") from None
        return cls(
            layer,
            _taps(own, layer.num_hidden_layers, layers, speculators=speculators),
            own.get("num_target_layers"),
            int(own.get("target_hidden_size") or layer.hidden_size),
            vocabulary,
            int(own.get("draft_vocab_size") or vocabulary),
            block,
            mask,
            bool(own.get("causal") or own.get("causal_head")),
        )


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

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.mlp, norm, _ = stock_parts(config)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn = Attention(config, config.hidden_size)


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
            self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_hidden_layers))
            self.hidden_norm, self.norm = norm(), norm()
        with torch.device("cpu"):
            self.rope = rope(config)

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
            x = x + layer.self_attn(number, layer.input_layernorm(x), angles, spans)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        closed: Tensor = self.norm(x)
        return closed

    def _span(self, number: int, text: Text, count: int, device: torch.device) -> Span:
        """Return the rows of a block in one layer: rows see all of it, or those before them in causal layers."""
        config = self.layout.config
        sliding = (config.layer_types or [""] * (number + 1))[number] == "sliding_attention"
        sees = causal(text.count, count, device) if self.layout.causal or sliding else None
        if sliding and sees is not None:
            sees = sees.triu(text.count - config.sliding_window + 1)
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
        tensors = read_tensors(folder)
        head = BlockHead(layout, [name for name in ("embed_tokens", "lm_head") if f"{name}.weight" in tensors])
        fill(head, tensors, folder, LEFT_OUT)
        return cls(head, draft_vocabulary(tensors, layout.draft_vocab_size))

    def features_of(self, taps: Sequence[Tensor], runner: Runner) -> Tensor:
        features: Tensor = self.head.fuse(taps)
        return features

    def draft_live(self, requests: Sequence[RequestState], budgets: Sequence[int], reaches: Sequence[int]) -> TokenTree:
        live = [b for b, reach in enumerate(reaches) if reach > 0]
        texts = [self.text_of(requests[b]) for b in live]
        for text in texts:
            self.head.read(text)
        layout = self.head.layout
        masks = [layout.mask_token] * (layout.block - 1)
        device = self.head.norm.weight.device
        ids = [token for b in live for token in (requests[b].tokens[-1], *masks)]
        closed = self.head.block(self.embedded(requests, torch.tensor(ids, dtype=torch.long, device=device)), texts)
        closed = closed.view(len(live), layout.block, -1)[:, 1:][:, : max(reaches)]
        return self.product(requests, budgets, reaches, self.logits(requests, closed))
