"""The few families whose position information does not come from `position_ids` or the 4D mask alone.

Each provider derives what its family needs (alibi, relative bias, learned positions, a local window baked into a
buffer) from the positions of rows and cache columns, as keyword arguments for the decoder layers or as a patch that
lasts for one pass. Everything else in the library is free of family names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftree.host.masks import LayerKind, PassMasks
from draftree.host.target import Target


class Family:
    """A family with nothing special: masks and positions through `forward` are enough.

    Attributes:
        layer_arguments_needed: whether `layer_arguments` must be applied on every layer of every pass.
        ragged_batches: whether one forward can hold requests of different lengths.
        views_final_rows: whether the model reshapes its final hidden states to the *entering* row count, so that
            a pass with surgery has to hand it that many and compute the logits itself.
    """

    layer_arguments_needed = False
    ragged_batches = True
    views_final_rows = False

    def __init__(self, target: Target) -> None:
        self.target = target

    def layer_arguments(self, index: int, kind: LayerKind, masks: PassMasks) -> dict[str, Any]:
        """Keyword arguments for decoder layer `index`, on top of mask and positions."""
        return {}

    @contextmanager
    def patched(self, positions: Tensor) -> Iterator[None]:
        """State that must differ from the stock model's during a pass over rows at `positions` [B, N]."""
        yield


class ViewsFinalRows(Family):
    """gpt2 and its relatives: `hidden_states.view(output_shape)` after the last layer."""

    views_final_rows = True


class Bloom(Family):
    """Alibi from the key positions, one line of [B * heads, 1, K]."""

    layer_arguments_needed = True

    def layer_arguments(self, index: int, kind: LayerKind, masks: PassMasks) -> dict[str, Any]:
        """Replace `alibi`, which the model counts by column."""
        from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

        keys = masks.key_positions.clamp(min=0)
        slopes = _get_alibi_slopes(self.target.config.n_head, keys.device)
        alibi = slopes[None, :, None] * keys[:, None].float()
        return {"alibi": alibi.reshape(-1, 1, keys.shape[1]).to(masks.dtype)}


class FalconAlibi(Family):
    """Falcon with `alibi=True`: the bias goes into both `alibi` and the mask, scaled as the model scales it."""

    layer_arguments_needed = True

    def layer_arguments(self, index: int, kind: LayerKind, masks: PassMasks) -> dict[str, Any]:
        """Replace `alibi` [B, heads, 1, K] and the mask [B, heads, n, K]."""
        from transformers.models.falcon.modeling_falcon import build_alibi_tensor

        config = self.target.config
        keys = masks.key_positions.clamp(min=0)
        ones = torch.ones(1, int(keys.max()) + 1, dtype=torch.long, device=keys.device)
        table = build_alibi_tensor(ones, config.num_attention_heads, masks.dtype)[:, 0]  # [heads, positions]
        alibi = table[:, keys].transpose(0, 1)[:, :, None]
        scaled = alibi / math.sqrt(config.hidden_size // config.num_attention_heads)
        hidden = ~masks.boolean(kind)[:, None]
        return {"alibi": alibi, "attention_mask": scaled.masked_fill(hidden, torch.finfo(masks.dtype).min)}


class Mpt(Family):
    """MPT takes a position bias [heads, 1, K] without a batch axis, and a boolean mask of what to hide."""

    layer_arguments_needed = True
    ragged_batches = False

    def layer_arguments(self, index: int, kind: LayerKind, masks: PassMasks) -> dict[str, Any]:
        """Replace `position_bias` and invert the mask."""
        keys = masks.key_positions[0].clamp(min=0)
        heads = self.target.config.n_heads
        table = self.target.decoder.build_mpt_alibi_tensor(heads, 2, device=keys.device)
        slopes = (table[:, 0, 1] - table[:, 0, 0]).reshape(-1, 1)
        bias = (slopes * keys.float())[:, None].to(masks.dtype)
        return {"position_bias": bias, "attention_mask": ~masks.boolean(kind)[:, None]}


class GptNeo(ViewsFinalRows):
    """GPT-Neo bakes its causal and local masks into a buffer indexed by column: open it, mask by position."""

    layer_arguments_needed = True

    @contextmanager
    def patched(self, positions: Tensor) -> Iterator[None]:
        """Make every layer's buffer all-visible for the pass."""
        attentions: list[Any] = [layer.attn.attention for layer in self.target.layers]  # type: ignore[union-attr]
        stock = [a.bias for a in attentions]
        try:
            for attention in attentions:
                attention.bias = torch.ones_like(attention.bias)
            yield
        finally:
            for attention, bias in zip(attentions, stock, strict=True):
                attention.bias = bias


class T5(Family):
    """T5 and mT5: relative position bias from explicit positions, mask folded in."""

    layer_arguments_needed = True

    def layer_arguments(self, index: int, kind: LayerKind, masks: PassMasks) -> dict[str, Any]:
        """Replace `position_bias` [B, heads, n, K]; let the layer rebuild its cross bias for the rows at hand."""
        attention: Any = self.target.layers[0].layer[0].SelfAttention  # type: ignore[union-attr,index]
        if hasattr(self.target.layers[index].layer[0].SelfAttention, "relative_attention_bias"):  # type: ignore[union-attr,index]
            attention = self.target.layers[index].layer[0].SelfAttention  # type: ignore[union-attr,index]
        relative = masks.key_positions[:, None, :] - masks.segment.positions[:, :, None]
        bucket = attention._relative_position_bucket(
            relative,
            bidirectional=False,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )
        bias = attention.relative_attention_bias(bucket).permute(0, 3, 1, 2)
        mask = masks.additive(kind)
        return {
            "position_bias": bias if mask is None else bias + mask,
            "attention_mask": None,
            "encoder_decoder_position_bias": None,
        }


class LearnedByColumn(Family):
    """The bart family: decoder positions are counted by column, so look them up by the rows' own positions."""

    @contextmanager
    def patched(self, positions: Tensor) -> Iterator[None]:
        """Answer the positional embedding's forward from `positions`."""
        module = self.target.decoder.embed_positions

        def look_up(mod: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor:
            weight: Any = mod.weight if hasattr(mod, "weight") else mod.weights
            return F.embedding(positions + getattr(mod, "offset", 0), weight).to(output.dtype)

        handle = module.register_forward_hook(look_up, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


def family_of(target: Target) -> Family:
    """The provider for `target`'s family."""
    name = target.model_type
    if name == "falcon" and target.config.alibi:
        return FalconAlibi(target)
    special: dict[str, type[Family]] = {
        "bloom": Bloom,
        "mpt": Mpt,
        "gpt_neo": GptNeo,
        "gpt2": ViewsFinalRows,
        "gptj": ViewsFinalRows,
        "codegen": ViewsFinalRows,
        "gpt_bigcode": ViewsFinalRows,
        "t5": T5,
        "mt5": T5,
        "umt5": T5,
        "bart": LearnedByColumn,
        "mbart": LearnedByColumn,
        "pegasus": LearnedByColumn,
        "marian": LearnedByColumn,
        "m2m_100": LearnedByColumn,
        "blenderbot": LearnedByColumn,
        "blenderbot-small": LearnedByColumn,
    }
    return special.get(name, Family)(target)
