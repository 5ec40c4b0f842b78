"""The loop host: llama-shaped models in one plain loop, with fused projections and as few operations as possible.

Embed, layers, norm, head: the same arithmetic as the stock modules, read from their weights. Query, key and value
projections are one matrix product, so are gate and up; grouped query heads are folded into query rows instead of
repeating keys and values. Taken where the model qualifies (`LoopHost.qualifies`), refused where it does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftree.host.base import Host
from draftree.host.cache import SlotCache
from draftree.host.masks import LayerKind, PassMasks
from draftree.host.plan import PassResult, Plan, Segment, operate
from draftree.host.positions import is_length_dependent, per_row_angles
from draftree.host.product import COPY_LIMIT, Product
from draftree.host.target import Target

SHAPED_LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3")
STOCK_MODULES = ("torch.nn.", "transformers.")
OUTPUT_HOOKS = ("transformers.utils.output_capturing",)
HEAD_ROWS = 16  # rows of one product with the head: its buffers grow with rows times vocabulary
ANGLE_BLOCK = 1024  # positions by which the table of rotary angles grows


class LoopHost(Host):
    """Drives llama, mistral, qwen2 and qwen3 shaped models without their `forward`."""

    name = "loop"
    guard = torch.inference_mode  # a tenth faster; safe since no stock module runs that could keep a tensor

    @staticmethod
    def qualifies(target: Target) -> bool:
        """Whether the model is of a known shape and in its stock state.

        Adapters, quantised linears, offloading hooks or weights on several devices all say no.
        """
        if target.model_type not in SHAPED_LIKE_LLAMA or target.encoder_decoder:
            return False
        if type(target.model).__module__.split(".")[0] != "transformers":
            return False
        if getattr(target.config, "hidden_act", None) != "silu":
            return False
        for module in target.model.modules():
            hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            # A model once asked for hidden states keeps hooks of transformers, which only look.
            if hasattr(module, "_hf_hook") or any(
                getattr(hook, "__module__", None) not in OUTPUT_HOOKS for hook in hooks
            ):
                return False
            if not type(module).__module__.startswith(STOCK_MODULES):
                return False
            if "Linear" in type(module).__name__ and type(module) is not nn.Linear:
                return False
        return len({p.device for p in target.model.parameters()}) == 1

    def __init__(self, target: Target) -> None:
        if not self.qualifies(target):
            raise ValueError(
                f"This '{target.model_type}' model does not qualify for the loop host (it drives stock "
                f"{', '.join(SHAPED_LIKE_LLAMA)} models without adapters, quantisation or offloading): "
                "use host='hooked' or host='auto'."
            )
        super().__init__(target)
        size = sum(p.numel() * p.element_size() for p in target.model.parameters())
        copy = size <= COPY_LIMIT
        self._rotary = target.decoder.rotary_emb
        self._per_row = is_length_dependent(self._rotary)
        self._layers = [_Layer(layer, target.config, copy) for layer in target.layers]
        self._norm = target.decoder.norm
        self._head = Product([target.model.get_output_embeddings()], copy)
        self._embedding = target.model.get_input_embeddings()
        self._cosines = self._sines = torch.empty(0)
        self._versions = self._weight_versions()

    def _weight_versions(self) -> tuple[tuple[int, int], ...]:
        # Moving or casting a model gives its parameters other memory without a new version.
        return tuple((p._version, p.data_ptr()) for p in self.target.model.parameters())

    @property
    def fresh(self) -> bool:
        """Whether the fused weights still are the model's (false after training steps or loading)."""
        return self._versions == self._weight_versions()

    @torch.inference_mode()
    def run(self, plan: Plan, cache: SlotCache, first: int = 0, encoder: Any = None) -> PassResult:
        """See `Host.run`."""
        appended = sum(s.positions.shape[1] for s in plan.surgeries if s.positions is not None)
        cache.open(first, plan.batch, plan.width + appended)
        surgeries = {s.layer: s for s in plan.surgeries}
        segment = Segment(0, None, plan.positions, plan.visible, plan.prefix_rows)
        segments, hidden = [segment], {}
        x = self._embedding(plan.tokens)
        if plan.embeddings is not None:
            x = torch.cat([x[:, : -plan.embeddings.shape[1]], plan.embeddings.to(x.dtype)], 1)
        rows = _Rows(self, segment, plan, cache, first, x.dtype)
        for i, layer in enumerate(self._layers):
            if i in surgeries:
                segment, x = operate(segment, surgeries[i], x, plan.width)
                segments.append(segment)
                rows = _Rows(self, segment, plan, cache, first, x.dtype)
            if i in plan.taps:
                hidden[i] = x
            x = layer(x, i, rows, self.target.kinds[i], cache)
        if len(self._layers) in plan.taps:
            hidden[len(self._layers)] = x
        if plan.first_logit_row:
            x = x[:, plan.first_logit_row :]
        x = _rms_norm(x, self._norm.weight, self._norm.variance_epsilon)
        return PassResult(self._logits(x), segments, hidden)

    def _logits(self, x: Tensor) -> Tensor:
        rows = x.shape[0] * x.shape[1]
        if rows <= HEAD_ROWS:
            return self._head(x)
        flat = x.reshape(1, rows, -1)
        parts = [self._head(part) for part in flat.split(HEAD_ROWS, 1)]
        return torch.cat(parts, 1).view(*x.shape[:2], -1)

    def angles(self, segment: Segment, floor: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sign-folded sines [B, n, 1, rotary dim] of the segment's rows."""
        if self._per_row:
            cosine, sine = per_row_angles(self._rotary, segment.positions, floor, dtype)
            return cosine[:, :, None], _fold_sign(sine)[:, :, None]
        longest = int(segment.positions.max()) + 1
        if longest > self._cosines.shape[0]:
            self._grow_angles(longest, dtype, segment.positions.device)
        return F.embedding(segment.positions, self._cosines)[:, :, None], F.embedding(segment.positions, self._sines)[
            :, :, None
        ]

    def _grow_angles(self, longest: int, dtype: torch.dtype, device: torch.device) -> None:
        count = -(-longest // ANGLE_BLOCK) * ANGLE_BLOCK
        like = torch.empty(1, 1, 1, dtype=dtype, device=device)
        cosine, sine = self._rotary(like, position_ids=torch.arange(count, device=device)[None])
        self._cosines, self._sines = cosine[0], _fold_sign(sine[0])


def _fold_sign(sine: Tensor) -> Tensor:
    """Negate the first half, so that rotating halves is a plain roll."""
    half = sine.shape[-1] // 2
    return torch.cat([-sine[..., :half], sine[..., half:]], -1)


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    if x.dtype != torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, epsilon)
    # On a CPU torch's own takes eleven operations; this takes six, and they are what a layer's overhead is made of.
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    return x * squares.div_(x.shape[-1]).add_(epsilon).rsqrt_() * weight


class _Rows:
    """What all layers of one segment share: angles and masks."""

    def __init__(
        self, host: LoopHost, segment: Segment, plan: Plan, cache: SlotCache, first: int, dtype: torch.dtype
    ) -> None:
        self.cosine, self.sine = host.angles(segment, plan.rope_floor, dtype)
        self._masks = PassMasks(segment, cache, first, dtype, plain_row=True)
        self.row_by_row = plan.row_by_row
        self._columns: dict[LayerKind, list[list[Tensor]]] = {}
        self._folded: dict[tuple[LayerKind, int], Tensor | None] = {}

    def mask(self, kind: LayerKind, groups: int) -> Tensor | None:
        """The additive mask repeated for every query head of a group: [B, 1, groups * n, K]."""
        key = (kind, groups)
        if key not in self._folded:
            mask = self._masks.additive(kind)
            if mask is not None and groups > 1 and mask.shape[2] > 1:
                mask = mask.repeat(1, 1, groups, 1)
            self._folded[key] = mask
        return self._folded[key]

    def columns(self, kind: LayerKind) -> list[list[Tensor]]:
        """The columns that each row of each request sees, in order."""
        if kind not in self._columns:
            self._columns[kind] = [[row.nonzero()[:, 0] for row in seen] for seen in self._masks.boolean(kind)]
        return self._columns[kind]


class _Layer:
    """One decoder layer as a function, on the stock module's weights."""

    def __init__(self, layer: Any, config: Any, copy: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.head_dim = int(attention.head_dim)
        self.kv_heads = int(config.num_key_value_heads)
        self.groups = int(config.num_attention_heads) // self.kv_heads
        self.scaling = float(attention.scaling)
        self.input_norm, self.post_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.query_norm = getattr(attention, "q_norm", None)
        self.key_norm = getattr(attention, "k_norm", None)
        self.qkv = Product([attention.q_proj, attention.k_proj, attention.v_proj], copy)
        self.output = Product([attention.o_proj], copy)
        self.gate_up = Product([mlp.gate_proj, mlp.up_proj], copy)
        self.down = Product([mlp.down_proj], copy)

    def __call__(self, x: Tensor, index: int, rows: _Rows, kind: LayerKind, cache: SlotCache) -> Tensor:
        batch, n, _ = x.shape
        kv, groups, dim = self.kv_heads, self.groups, self.head_dim
        heads = kv * groups
        normed = _rms_norm(x, self.input_norm.weight, self.input_norm.variance_epsilon)
        qkv = self.qkv(normed).view(batch, n, heads + 2 * kv, dim)
        qk = qkv[:, :, : heads + kv]
        if self.query_norm is not None and self.key_norm is not None:
            query = _rms_norm(qk[:, :, :heads], self.query_norm.weight, self.query_norm.variance_epsilon)
            key = _rms_norm(qk[:, :, heads:], self.key_norm.weight, self.key_norm.variance_epsilon)
            qk = torch.cat([query, key], 2)
        qk = torch.addcmul(qk * rows.cosine, qk.roll(dim // 2, -1), rows.sine)
        keys, values = cache.update(qk[:, :, heads:].transpose(1, 2), qkv[:, :, heads + kv :].transpose(1, 2), index)
        query = qk[:, :, :heads].view(batch, n, kv, groups, dim).permute(0, 2, 3, 1, 4)
        query = query.reshape(batch, kv, groups * n, dim)
        if rows.row_by_row:
            mixed = _attend_row_by_row(query, keys, values, rows.columns(kind), self.scaling)
        else:
            mixed = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=rows.mask(kind, groups), scale=self.scaling
            )
        mixed = mixed.view(batch, kv, groups, n, dim).permute(0, 3, 1, 2, 4).reshape(batch, n, heads * dim)
        x = x + self.output(mixed)
        normed = _rms_norm(x, self.post_norm.weight, self.post_norm.variance_epsilon)
        gate, up = self.gate_up(normed).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def _attend_row_by_row(
    query: Tensor, keys: Tensor, values: Tensor, columns: list[list[Tensor]], scaling: float
) -> Tensor:
    """The attention calls of one-row passes: a column that is masked away would still change the order of sums."""
    mixed = torch.empty_like(query)
    for b, of_rows in enumerate(columns):
        for i, index in enumerate(of_rows):
            own = slice(i, None, len(of_rows))  # row i in every head of the group
            key, value = (t[b : b + 1].index_select(2, index) for t in (keys, values))
            mixed[b : b + 1, :, own] = F.scaled_dot_product_attention(
                query[b : b + 1, :, own], key, value, scale=scaling
            )
    return mixed
