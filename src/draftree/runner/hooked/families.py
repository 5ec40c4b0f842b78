"""The few families whose position information does not come from `position_ids` or the 4D mask alone.

Each provider derives what its family needs (alibi, relative bias, learned positions, a local window baked
into a buffer) from the positions of rows and keys, as keyword arguments for the decoder layers or as
a patch that lasts for one pass. Everything else in the library is free of family names.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from draftree.runner.positions import LayerKind, PassMasks
from draftree.runner.recurrent.operators import replaced
from draftree.runner.target import Target

# Families that the zoo of the test suite holds, by Hugging Face's `model_type`. Other families
# run too, after `check_trees` has tried them once.
TESTED_FAMILIES = frozenset(
    (
        "bamba", "bart", "biogpt", "bloom", "codegen", "cohere", "cohere2", "deepseek_v3", "exaone4", "falcon",
        "falcon_h1", "falcon_mamba", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode",
        "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoehybrid", "internlm3", "jamba", "kimi_linear",
        "lfm2", "lfm2_moe", "llama", "llama4_text", "m2m_100", "mamba", "mamba2", "marian", "mbart",
        "mistral", "mixtral", "mpt", "mt5", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "opt",
        "pegasus", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text",
        "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "stablelm", "starcoder2", "t5", "umt5", "xglm", "zamba2",
    )
)  # fmt: skip

POSITIONS = 1 << 30  # more KV positions than any cache has


class Family:
    """A family with nothing special: masks and positions through `forward` are enough.

    Attributes:
        layer_arguments_needed: whether `layer_arguments` must be applied on every layer of every pass.
        views_final_rows: whether the model reshapes its final hidden states to the *entering* row count:
            a pass with surgery has to hand it that many and compute the logits itself.
    """

    layer_arguments_needed = False
    views_final_rows = False

    def __init__(self, target: Target) -> None:
        self.target = target

    def layer_arguments(self, index: int, kind: LayerKind, masks: PassMasks) -> dict[str, Any]:
        """Return keyword arguments for decoder layer `index`, on top of mask and positions."""
        return {}

    @contextmanager
    def patched(self, masks: Callable[[], PassMasks]) -> Iterator[None]:
        """Change the model's state for a pass; `masks()` are those of the present rows."""
        yield


class ViewsFinalRows(Family):
    """gpt2 and its relatives: `hidden_states.view(output_shape)` after the last layer."""

    views_final_rows = True


class Bloom(Family):
    """Alibi from the key positions, one line of [B * heads, 1, K]."""

    layer_arguments_needed = True

    def layer_arguments(self, index: int, kind: LayerKind, masks: PassMasks) -> dict[str, Any]:
        """Replace `alibi`, which the model counts by KV position."""
        from transformers.models.bloom.modeling_bloom import build_alibi_tensor

        keys = masks.key_positions.clamp(min=0)
        two = torch.ones(1, 2, dtype=torch.long, device=keys.device)
        slopes = build_alibi_tensor(two, self.target.config.n_head, torch.float32)[:, 0, 1]
        alibi = slopes[None, :, None] * keys[:, None].float()
        return {"alibi": alibi.reshape(-1, 1, keys.shape[1]).to(masks.dtype)}


class FalconAlibi(Family):
    """Falcon with `alibi=True`: the bias goes into `alibi` and the mask, scaled as the model scales it."""

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


class _PerRequest:
    """A position bias [B, heads, 1, K] that passes MPT's check for one without a batch axis.

    MPT's attention reads the shape, slices its own KV positions out of the bias, and adds them to the scores.
    """

    def __init__(self, bias: Tensor) -> None:
        self._bias, self.shape, self.size = bias, bias.shape[1:], bias[0].size

    def __getitem__(self, positions: Any) -> Tensor:
        return self._bias

    def to(self, *given: Any, **options: Any) -> _PerRequest:  # accelerate moves a layer's arguments to its device
        return _PerRequest(self._bias.to(*given, **options))


class Mpt(Family):
    """MPT takes a position bias by key position, another for each request, and a boolean mask of what to hide."""

    layer_arguments_needed = True

    def layer_arguments(self, index: int, kind: LayerKind, masks: PassMasks) -> dict[str, Any]:
        """Replace `position_bias` and invert the mask."""
        keys = masks.key_positions.clamp(min=0)
        table = self.target.decoder.build_mpt_alibi_tensor(self.target.config.n_heads, 2, device=keys.device)
        bias = (table[:, 0, 1] - table[:, 0, 0])[:, None] * keys[:, None].float()
        shaped = bias[:, :, None].to(masks.dtype)
        return {"position_bias": _PerRequest(shaped), "attention_mask": ~masks.boolean(kind)[:, None]}


class GptNeo(ViewsFinalRows):
    """GPT-Neo bakes its causal and local masks into a buffer indexed by KV position: open it, mask by position."""

    layer_arguments_needed = True

    @contextmanager
    def patched(self, masks: Callable[[], PassMasks]) -> Iterator[None]:
        """Make every layer's buffer all-visible for the pass, and wide enough for rows behind the context's end."""
        layers: list[Any] = self.target.layers
        with ExitStack() as stack:
            for attention in (layer.attn.attention for layer in layers):
                seeing = copy.copy(attention)
                # The last draft tokens have KV positions beyond the context. One element, read everywhere.
                everything = torch.ones_like(attention.bias[:, :, :1, :1]).expand(1, 1, POSITIONS, POSITIONS)
                seeing._buffers = attention._buffers | {"bias": everything}
                stack.enter_context(replaced(attention, "_attn", seeing._attn))
            yield


def _relative_bias(attention: Any, masks: PassMasks, **buckets: Any) -> Tensor:
    """Return T5's position bias [B, heads, n, K] from the positions of rows and keys."""
    distance = masks.key_positions[:, None, :] - masks.segment.positions[:, :, None]
    bias: Tensor = attention.relative_attention_bias(attention._relative_position_bucket(distance, **buckets))
    return bias.permute(0, 3, 1, 2)


class T5(Family):
    """T5 and mT5: the first layer's relative position bias serves all layers."""

    layer_arguments_needed = True

    def layer_arguments(self, index: int, kind: LayerKind, masks: PassMasks) -> dict[str, Any]:
        """Replace `position_bias` [B, heads, n, K]; let the layer rebuild its cross bias for its rows."""
        first: Any = self.target.layers[0]
        attention = first.layer[0].SelfAttention
        most, buckets = attention.relative_attention_max_distance, attention.relative_attention_num_buckets
        bias = _relative_bias(attention, masks, bidirectional=False, num_buckets=buckets, max_distance=most)
        return {"position_bias": bias, "encoder_decoder_position_bias": None}


class Umt5(Family):
    """umT5: every layer computes a relative bias of its own, counting rows and KV positions."""

    layer_arguments_needed = True

    @contextmanager
    def patched(self, masks: Callable[[], PassMasks]) -> Iterator[None]:
        """Answer each layer's `compute_bias` from the positions."""
        layers: list[Any] = self.target.layers
        with ExitStack() as stack:
            for attention in (layer.layer[0].SelfAttention for layer in layers):
                by_position = partial(lambda own, *args, **kwargs: _relative_bias(own, masks()), attention)
                stack.enter_context(replaced(attention, "compute_bias", by_position))
            yield


class Bart(Family):
    """The bart family counts decoder positions by KV position: look up the rows' own positions instead."""

    @contextmanager
    def patched(self, masks: Callable[[], PassMasks]) -> Iterator[None]:
        """Call the positional embedding with the rows' positions."""
        module, positions = self.target.decoder.embed_positions, masks().segment.positions
        own = module.forward

        def look_up(*args: Any, **kwargs: Any) -> Tensor:
            rows: Tensor = own(*args, **kwargs | {"position_ids": positions})
            return rows.reshape(*positions.shape, -1)

        with replaced(module, "forward", look_up):
            yield


class M2M100(Family):
    """M2M-100 counts positions from its padding index, and gives padding tokens the padding row anywhere."""

    @contextmanager
    def patched(self, masks: Callable[[], PassMasks]) -> Iterator[None]:
        """Answer the positional embedding's count of positions."""
        positions = masks().segment.positions

        def count(tokens: Tensor, padding: int, *args: Any, **kwargs: Any) -> Tensor:
            return (positions + padding + 1).masked_fill(tokens == padding, padding).contiguous()

        with replaced(self.target.decoder.embed_positions, "create_position_ids_from_input_ids", count):
            yield


class Llama4(Family):
    """Layers without angles scale their queries by position, which the model counts by KV position."""

    @contextmanager
    def patched(self, masks: Callable[[], PassMasks]) -> Iterator[None]:
        """Scale the queries by the rows' positions, in place of the layers' own scaling."""
        config = self.target.config
        layers: list[Any] = self.target.layers

        def scale(module: nn.Module, args: Any, queries: Tensor) -> Tensor:
            position = masks().segment.positions.to(queries.device).float() + 1.0
            scales = torch.log1p(torch.floor(position / config.floor_scale)) * config.attn_scale + 1.0
            return (queries * scales[..., None]).to(queries.dtype)

        with ExitStack() as stack:
            for attention in (layer.self_attn for layer in layers if not layer.self_attn.use_rope):
                stack.enter_context(replaced(attention, "attn_temperature_tuning", False))
                stack.callback(attention.q_proj.register_forward_hook(scale).remove)
            yield


SPECIAL: dict[str, type[Family]] = {
    "bloom": Bloom,
    "mpt": Mpt,
    "gpt_neo": GptNeo,
    "t5": T5,
    "mt5": T5,
    "umt5": Umt5,
    "m2m_100": M2M100,
    **dict.fromkeys(("gpt2", "gptj", "codegen", "gpt_bigcode"), ViewsFinalRows),
    **dict.fromkeys(("bart", "mbart", "pegasus", "marian", "blenderbot", "blenderbot-small"), Bart),
}


def family_of(target: Target) -> Family:
    """Return the provider for `target`'s family."""
    name, config = target.model_type, target.config
    if name == "falcon" and config.alibi:
        return FalconAlibi(target)
    if name == "llama4_text" and config.attn_temperature_tuning:
        return Llama4(target)
    return SPECIAL.get(name, Family)(target)
