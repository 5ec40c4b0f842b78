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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftree.runner.masks import LayerKind, PassMasks
from draftree.runner.target import Target

# Families that the zoo of the test suite holds, by Hugging Face's `model_type`. Other families
# run too, after `check_trees` has tried them once.
TESTED_FAMILIES = frozenset(
    (
        "bart", "biogpt", "bloom", "codegen", "cohere", "cohere2", "deepseek_v3", "exaone4", "falcon", "gemma",
        "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj",
        "granite", "internlm3", "llama", "llama4_text", "m2m_100", "marian", "mbart", "mistral", "mixtral", "mpt",
        "mt5", "nemotron", "olmo", "olmo2", "olmo3", "opt", "pegasus", "persimmon", "phi", "phi3", "qwen2",
        "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2", "t5", "umt5", "xglm",
    )
)  # fmt: skip

POSITIONS = 1 << 30  # more KV positions than any cache has


@contextmanager
def replaced(module: nn.Module, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace `module.name` by `method` inside this context."""
    held = module.__dict__.get(name)  # of a wrapper, such as accelerate's
    module.__dict__[name] = method
    try:
        yield
    finally:
        if held is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = held


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

    Of what it is given, MPT's attention reads the shape, slices its own KV positions, and adds that.
    """

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias
        self.shape = (bias.shape[1], 1, bias.shape[3])

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def __getitem__(self, positions: Any) -> Tensor:
        return self._bias  # it covers the KV positions of this pass only

    def to(self, *given: Any, **options: Any) -> _PerRequest:
        """Return the bias on another device; accelerate's hooks move a layer's arguments to its device."""
        return _PerRequest(self._bias.to(*given, **options))


class Mpt(Family):
    """MPT takes a position bias by key position, another for each request, and a boolean mask of what to hide."""

    layer_arguments_needed = True

    def layer_arguments(self, index: int, kind: LayerKind, masks: PassMasks) -> dict[str, Any]:
        """Replace `position_bias` and invert the mask."""
        keys = masks.key_positions.clamp(min=0)
        table = self.target.decoder.build_mpt_alibi_tensor(self.target.config.n_heads, 2, device=keys.device)
        slopes = table[:, 0, 1] - table[:, 0, 0]
        bias = (slopes[:, None] * keys[:, None].float())[:, :, None].to(masks.dtype)
        return {"position_bias": _PerRequest(bias), "attention_mask": ~masks.boolean(kind)[:, None]}


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


class T5(Family):
    """T5 and mT5: the relative position bias from explicit positions."""

    layer_arguments_needed = True

    def layer_arguments(self, index: int, kind: LayerKind, masks: PassMasks) -> dict[str, Any]:
        """Replace `position_bias` [B, heads, n, K]; let the layer rebuild its cross bias for its rows."""
        first: Any = self.target.layers[0]
        attention = first.layer[0].SelfAttention
        bucket = attention._relative_position_bucket(
            _relative_positions(masks),
            bidirectional=False,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )
        bias = attention.relative_attention_bias(bucket).permute(0, 3, 1, 2)
        return {"position_bias": bias, "encoder_decoder_position_bias": None}


class Umt5(Family):
    """umT5: every layer computes a relative bias of its own, counting rows and KV positions."""

    layer_arguments_needed = True

    @contextmanager
    def patched(self, masks: Callable[[], PassMasks]) -> Iterator[None]:
        """Answer each layer's `compute_bias` from explicit positions."""
        layers: list[Any] = self.target.layers
        attentions = [layer.layer[0].SelfAttention for layer in layers]

        def by_position(attention: Any) -> Callable[..., Tensor]:
            def compute_bias(*args: Any, **kwargs: Any) -> Tensor:
                bucket = attention._relative_position_bucket(_relative_positions(masks()))
                bias: Tensor = attention.relative_attention_bias(bucket)
                return bias.permute(0, 3, 1, 2)

            return compute_bias

        with ExitStack() as stack:
            for attention in attentions:
                stack.enter_context(replaced(attention, "compute_bias", by_position(attention)))
            yield


def _relative_positions(masks: PassMasks) -> Tensor:
    """LongTensor [B, n, K]: key position minus row position."""
    return masks.key_positions[:, None, :] - masks.segment.positions[:, :, None]


class LearnedByColumn(Family):
    """The bart family: decoder positions are counted by KV position; look them up by the rows' own positions."""

    @contextmanager
    def patched(self, masks: Callable[[], PassMasks]) -> Iterator[None]:
        """Answer the positional embedding's forward from the rows' positions."""
        module = self.target.decoder.embed_positions
        positions = masks().segment.positions

        def within(mod: nn.Module, args: Any, kwargs: Any) -> Any:
            # The model's own look-up counts KV positions, of which trees have more than the table.
            if "position_ids" in kwargs:
                kwargs = kwargs | {"position_ids": torch.zeros_like(positions[0])}
            return args, kwargs

        def look_up(mod: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            tokens = kwargs.get("input_ids", args[0] if args else None)
            return self.look_up(mod, positions, tokens).to(output)

        before = module.register_forward_pre_hook(within, with_kwargs=True)
        after = module.register_forward_hook(look_up, with_kwargs=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def look_up(self, module: Any, positions: Tensor, tokens: Tensor | None) -> Tensor:
        """Positional embeddings [B, N, d] of rows with these positions and token ids."""
        if module.weight.is_meta:  # offloaded: accelerate's own `forward` brings the weight
            rows: Tensor = module.forward(tokens, position_ids=positions)
            return rows.reshape(*positions.shape, -1)
        return F.embedding(positions + getattr(module, "offset", 0), module.weight)


class M2M100(LearnedByColumn):
    """M2M-100: a sinusoidal table that starts behind its padding row and grows on demand.

    The model gives the padding token the padding row wherever it stands, also in the middle of a text.
    """

    def look_up(self, module: Any, positions: Tensor, tokens: Tensor | None) -> Tensor:
        """Rows of the table, which the model counts from its padding index."""
        index = positions + module.padding_idx + 1
        if tokens is not None:
            index = index.masked_fill(tokens == module.padding_idx, module.padding_idx)
        longest = int(index.max()) + 1
        if longest > module.weights.shape[0]:
            module.make_weights(longest + module.offset, module.embedding_dim, module.padding_idx)
        return F.embedding(index, module.weights)


class _Uncounted:
    """A cache for a layer that counts its rows from `get_seq_length` on: to it they all stand before the first."""

    def __init__(self, cache: Any, rows: Tensor) -> None:
        self._rows, self.update = rows, cache.update

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        return -1 - self._rows


class Llama4(Family):
    """Layers without angles scale their queries by position, which the model counts by KV position."""

    @contextmanager
    def patched(self, masks: Callable[[], PassMasks]) -> Iterator[None]:
        """Have the layers scale nothing, as before the first position, and scale the queries by the rows' positions."""
        config, cache_argument = self.target.config, self.target.cache_argument
        layers: list[Any] = self.target.layers

        def scale(module: nn.Module, args: Any, queries: Tensor) -> Tensor:
            position = masks().segment.positions.to(queries.device).float() + 1.0
            scales = torch.log1p(torch.floor(position / config.floor_scale)) * config.attn_scale + 1.0
            return (queries * scales[..., None]).to(queries.dtype)

        def uncount(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            positions = masks().segment.positions
            rows = torch.arange(positions.shape[1], dtype=torch.long, device=kwargs["hidden_states"].device)
            return args, kwargs | {cache_argument: _Uncounted(kwargs[cache_argument], rows)}

        with ExitStack() as stack:
            for attention in (layer.self_attn for layer in layers if not layer.self_attn.use_rope):
                hook = uncount
                stack.callback(attention.register_forward_pre_hook(hook, with_kwargs=True).remove)
                stack.callback(attention.q_proj.register_forward_hook(scale).remove)
            yield


def family_of(target: Target) -> Family:
    """Return the provider for `target`'s family."""
    name = target.model_type
    if name == "falcon" and target.config.alibi:
        return FalconAlibi(target)
    if name == "llama4_text" and target.config.attn_temperature_tuning:
        return Llama4(target)
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
        "umt5": Umt5,
        "bart": LearnedByColumn,
        "mbart": LearnedByColumn,
        "pegasus": LearnedByColumn,
        "marian": LearnedByColumn,
        "m2m_100": M2M100,
        "blenderbot": LearnedByColumn,
        "blenderbot-small": LearnedByColumn,
    }
    return special.get(name, Family)(target)
