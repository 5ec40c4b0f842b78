"""Llama-shaped models in one plain loop of tensor operations: embed, layers, norm, head, without the stock `forward`.

The arithmetic is that of the stock modules, read from their weights. Query, key and value projections are one matrix
product, so are gate and up; grouped query heads are folded into query rows instead of repeating keys and values. The
runners of `cpu` and `cuda_graphs` are this one with other layers; models that do not fit are refused with a reason.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftree.runner.base import Runner
from draftree.runner.eager.parts import (
    ACTIVATIONS,
    FAMILIES,
    TURN_NEIGHBOURS,
    FusedProduct,
    Norm,
    Parts,
    StockProduct,
    closing_norm,
    known_shape,
    logit_cap,
    may_copy,
    normed,
)
from draftree.runner.kv.cache import SlotCache
from draftree.runner.plan import PassResult, Plan, Segment, logit_slice, operate
from draftree.runner.positions import LayerKind, PassMasks, Rotation, is_length_dependent, per_row_angles
from draftree.runner.target import Target
from draftree.runner.weights.packed import PackedLinear, is_packed, linear_bytes
from draftree.runner.weights.stock import has_eight_bits

BLOCK = 1024  # positions by which tables of angles grow


class Attention(NamedTuple):
    """The attention of a layer."""

    groups: int  # query heads to a key/value head
    scaling: float  # of the scores
    cap: float | None  # soft cap of the scores; None for none

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Return the attention of queries [B, kv, n, dim] under an additive mask."""
        if self.cap is None:
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=self.scaling)
        scores = self.cap * torch.tanh(query @ keys.mT * (self.scaling / self.cap))
        if mask is not None:
            scores = scores + mask
        return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ values


def attend(layer: Any, x: Tensor, index: int, rows: Any, kind: LayerKind, cap: float | None) -> Tensor:
    """Run a layer: first half, attention, second half; may change and return x [B, n, d].

    `rows` has the angles and the attention that all layers of one segment share, see `SegmentRows`.
    """
    angles = rows.angles(kind)
    query, keys, values = layer.enter(x, angles, index)
    heads = Attention(layer.parts.heads.groups, layer.parts.scaling, cap)
    return layer.leave(x, rows.mix(heads, query, keys, values, kind), angles)


class Angles(NamedTuple):
    """Rotary angles of a segment's rows, and where their keys and values go."""

    cosine: Tensor  # [B, n, 1, dim]
    sine: Tensor  # [B, n, 1, dim], with the signs of the turn
    cache: Any  # the slots, or what stands in for them; has `update`
    rotation: Rotation  # which entries turn with which


class TensorLayer:
    """The two halves of a layer; `product` multiplies rows by weights."""

    def __init__(self, parts: Parts, product: type[StockProduct]) -> None:
        self.parts = parts
        self._qkv = product(parts.qkv)
        self._output = product([parts.output])
        self._gate_up = product(parts.gate_up)
        self._down = product([parts.down])
        self._activation = ACTIVATIONS[parts.activation]

    def enter(self, x: Tensor, angles: Angles, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries of x [B, n, d], and put keys and values into the cache of `angles` as its layer `index`.

        Returns:
            queries [B, kv, groups * n, dim], keys and values [B, kv, K, dim] with the context; of all slots where the
            cache is `FixedSlots`.
        """
        query, key, value = self.project(x, angles)
        return query, *angles.cache.update(key, value, index)

    def project(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, kv, groups * n, dim], keys and values [B, kv, n, dim] of the rows themselves."""
        batch, n, _ = x.shape
        kv, groups, dim = self.parts.heads
        queries = kv * groups
        qkv = self._qkv(normed(self.parts.norms[0], x)).view(batch, n, queries + 2 * kv, dim)
        qk = qkv[:, :, : queries + kv]
        if self.parts.head_norms is not None:
            query, key = qk[:, :, :queries], qk[:, :, queries:]
            if self.parts.wide:
                query, key = query.flatten(2), key.flatten(2)
            of_query, of_key = self.parts.head_norms
            query, key = of_query(query), of_key(key)
            qk = torch.cat([query.view(batch, n, queries, dim), key.view(batch, n, kv, dim)], 2)
        # OLMo's angles are float32 whatever the model's type; the others' are of its type.
        qk = torch.addcmul(qk * angles.cosine, angles.rotation.partners(qk), angles.sine).to(qkv.dtype)
        query = qk[:, :, :queries].view(batch, n, kv, groups, dim).permute(0, 2, 3, 1, 4)
        key, value = qk[:, :, queries:].transpose(1, 2), qkv[:, :, queries + kv :].transpose(1, 2)
        return query.reshape(batch, kv, groups * n, dim), key, value

    def leave(self, x: Tensor, mixed: Tensor, angles: Angles) -> Tensor:
        """Return the layer's result from the attention's [B, kv, groups * n, dim]; may change x [B, n, d]."""
        behind_attention, behind_mlp = self.parts.behind
        x = x + normed(behind_attention, self._output(self.parts.heads.side_by_side(mixed)))
        gate, up = self._gate_up(normed(self.parts.norms[1], x)).chunk(2, -1)
        return x + normed(behind_mlp, self._down(self._activation(gate) * up))


class TensorHead:
    """Final norm and head, in tensor operations."""

    ROWS = 16  # rows of one product with the head on a CPU: its buffers grow with rows times vocabulary

    def __init__(self, norm: Norm, head: Any, product: type[StockProduct], cap: float | None = None) -> None:
        self._norm, self._cap = norm, cap
        self._head = product([head])

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits [B, n, V] of hidden states [B, n, d]."""
        x = self._norm(x)
        rows = x.shape[0] * x.shape[1]
        if rows <= self.ROWS or not x.is_cpu:
            logits = self._head(x)
        else:
            parts = [self._head(part) for part in x.reshape(1, rows, -1).split(self.ROWS, 1)]
            logits = torch.cat(parts, 1).view(*x.shape[:2], -1)
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)


class AngleTables:
    """The angles of one model.

    Attributes:
        rotation: which entries of a head turn with which.
        tables: cosines by position [P, dim], and sines with their signs, by kind of layer or under None for all kinds.
            Replaced as a whole, as passes of several threads and recorded ones read them.
        by_length: whether angles depend on a text's length; the tables are not used then.
    """

    def __init__(self, target: Target, dim: int) -> None:
        self._rotary = target.decoder.rotary_emb
        self.by_length = is_length_dependent(self._rotary)
        kinds = {k.name for k in target.kinds} if isinstance(self._rotary.rope_type, dict) else {None}
        frequencies = next(t for name, t in self._rotary.named_buffers() if name.endswith("inv_freq"))
        self.rotation = Rotation(2 * len(frequencies), dim, target.model_type in TURN_NEIGHBOURS, target.device)
        empty = torch.empty(0, dtype=torch.float32, device="cpu")
        self.tables = dict.fromkeys(kinds, (empty, empty))

    def name(self, kind: LayerKind) -> str | None:
        """Return the name of the angles of layers of that kind; None if all layers share them."""
        return None if None in self.tables else kind.name

    def reach(self, longest: int, dtype: torch.dtype, device: torch.device) -> dict[str | None, tuple[Tensor, Tensor]]:
        """Return the tables, extended to positions below `longest`."""
        tables = self.tables
        if longest > min(len(cosines) for cosines, _ in tables.values()):
            positions = torch.arange(-(-longest // BLOCK) * BLOCK, device=device)
            like = torch.empty(1, 1, 1, dtype=dtype, device=device)
            of_kind = {kind: () if kind is None else (kind,) for kind in tables}
            angles = {kind: self._rotary(like, positions[None], *given) for kind, given in of_kind.items()}
            tables = self.tables = {kind: self.rotation.spread(c[0], s[0]) for kind, (c, s) in angles.items()}
        return tables

    def of(
        self, positions: Tensor, prompt_lengths: tuple[int, ...], dtype: torch.dtype, cache: SlotCache, kind: LayerKind
    ) -> Angles:
        """Return the angles of a segment's rows in layers of that kind.

        Args:
            prompt_lengths: see `Plan`.
        """
        if self.by_length:
            like = torch.empty(0, dtype=dtype, device=positions.device)
            cosine, sine = self.rotation.spread(*per_row_angles(self._rotary, like, positions, prompt_lengths))
        else:
            tables = self.reach(int(positions.max()) + 1, dtype, positions.device)
            cosine, sine = (F.embedding(positions, table) for table in tables[self.name(kind)])
        return Angles(cosine[:, :, None], sine[:, :, None], cache, self.rotation)


class SegmentRows:
    """Angles, masks and attention of the rows that enter a run of layers."""

    def __init__(self, tables: AngleTables, masks: PassMasks, cache: Any, plan: Plan | None = None) -> None:
        self.tables, self.masks, self.cache, self._plan = tables, masks, cache, plan
        self._angles: dict[str | None, Any] = {}
        self._folded: dict[tuple[LayerKind, int], Tensor | None] = {}

    def angles(self, kind: LayerKind) -> Any:
        """Return the angles in layers of that kind, computed once."""
        name = self.tables.name(kind)
        if name not in self._angles:
            self._angles[name] = self.look_up(kind)
        return self._angles[name]

    def look_up(self, kind: LayerKind) -> Any:
        """Compute the angles in layers of that kind."""
        plan, positions = self._plan, self.masks.segment.positions
        assert plan is not None
        positions = plan.angle_positions(positions)
        return self.tables.of(positions, plan.prompt_lengths, self.masks.dtype, self.cache, kind)

    def mix(self, heads: Attention, query: Tensor, keys: Tensor, values: Tensor, kind: LayerKind) -> Tensor:
        """Return the attention of queries [B, kv, groups * n, dim] in a layer of that kind."""
        return heads(query, keys, values, self.mask(kind, heads.groups))

    def mask(self, kind: LayerKind, groups: int) -> Tensor | None:
        """Return the additive mask, repeated for every query head of a group: [B, 1, groups * n, K]."""
        key = (kind, groups)
        if key not in self._folded:
            mask = self.masks.additive(kind)
            if mask is not None and groups > 1 and mask.shape[2] > 1:
                mask = mask.repeat(1, 1, groups, 1)
            self._folded[key] = mask
        return self._folded[key]


class EagerRunner(Runner):
    """Drives models of the families in `parts`; see `Runner`."""

    name = "eager"
    fuses = True  # linears that read the same rows, into one product with copies of their weights
    families: tuple[str, ...] = FAMILIES
    reads_8_bits = False  # weights that torchao keeps so, see `eight_bits`
    inference = True  # a tenth faster; safe since no stock module runs that could keep a tensor

    @classmethod
    def refusal(cls, target: Target) -> str | None:
        """See `Runner.refusal`: other families, models that were altered, weights on several devices."""
        reason = target.alteration
        if not known_shape(target, cls.families):
            reason = f"only of the families {', '.join(cls.families)}"
        elif reason is None and len({p.device for p in target.model.parameters()}) > 1:
            reason = "its weights lie on several devices"
        elif reason is None and not cls.reads_8_bits and has_eight_bits(target.model):
            reason = "its weights have 8 bits"
        if reason is None:
            return None
        return (
            f"This '{target.model_type}' model does not qualify for runner={cls.name!r}, which drives stock models "
            f"alone, and {reason}: use runner='hooked' or runner='auto'."
        )

    def __init__(self, target: Target) -> None:
        refusal = self.refusal(target)
        if refusal is not None:
            raise ValueError(refusal)
        super().__init__(target)
        parts = [Parts.of(layer, target.config) for layer in target.layers]
        attention = next(part for part in parts if part.delta is None)
        self.tables = AngleTables(target, attention.heads.dim)
        self._cap = attention.cap  # of attention scores
        self._norm, self._embedding = Norm.of(closing_norm(target.decoder)), target.model.get_input_embeddings()
        self._layers: list[Any]
        self._head: Any
        self._load(parts, target.model.get_output_embeddings(), logit_cap(target))

    def _load(self, parts: list[Parts], head: nn.Module, cap: float | None) -> None:
        """Lay out the weights of the layers' parts and the head: set `_layers` and `_head`; `cap` is the logits'."""
        product = StockProduct
        model = self.target.model
        if self.fuses and not is_packed(model) and may_copy(model, self.target.device, much_faster=False):
            product, self.copied_bytes = FusedProduct, linear_bytes(self.target)
        self._layers = [TensorLayer(part, product) for part in parts]
        self._head = TensorHead(self._norm, head, product, cap)

    # ---------------------------------------------------------------- a pass

    @torch.inference_mode()
    def run(self, plan: Plan, cache: SlotCache, first: int = 0, encoder: Any = None) -> PassResult:
        plan = plan.to(self.target.device)
        count = len(self._layers)
        cache.open(first, plan.batch, plan.width + plan.appended, bare=plan.bare)
        surgeries = {s.layer: s for s in plan.surgeries}
        segment = Segment(0, None, plan.positions, plan.visible, plan.prefix_rows)
        segments, hidden = [segment], {}
        x = self._enter(plan)
        rows = self._rows(segment, plan, cache, first)
        stops = sorted({*surgeries, *plan.taps, count} - {0})
        for i, stop in zip([0, *stops], stops, strict=False):
            if i in surgeries:
                segment, x = operate(segment, surgeries[i], self._of_model(x), plan.width)
                x = self._own(x)
                segments.append(segment)
                rows = self._rows(segment, plan, cache, first)
            if i in plan.taps:
                hidden[i] = self._of_model(x).clone()  # layers may add to x in place
            x = self._advance(x, i, stop, rows)
        if count in plan.taps:
            hidden[count] = self._of_model(x)
        return PassResult(self._head(x[:, logit_slice(plan, segment)]), segments, hidden, self)

    def _enter(self, plan: Plan) -> Tensor:
        """Return the rows of a plan as they enter the first layer, [B, n, d]."""
        x = self._embedding(plan.tokens)
        if plan.embeddings is not None:
            x = torch.cat([x[:, : -plan.embeddings.shape[1]], plan.embeddings.to(x.dtype)], 1)
        return self._own(x)

    def _own(self, x: Tensor) -> Tensor:
        """Return rows of the model's dtype in the layers' dtype."""
        return x

    def _of_model(self, x: Tensor) -> Tensor:
        """Return the layers' rows in the model's dtype."""
        return x

    def _rows(self, segment: Segment, plan: Plan, cache: SlotCache, first: int) -> SegmentRows:
        """Return the angles and masks of a segment's rows."""
        masks = PassMasks(segment, cache, first, self.target.dtype, plain_row=True)
        return SegmentRows(self.tables, masks, cache, plan)

    def _advance(self, x: Tensor, first: int, last: int, rows: SegmentRows) -> Tensor:
        """Run the model's layers [first, last) on x [B, n, d], which may be changed."""
        for number in range(first, last):
            x = attend(self._layers[number], x, number, rows, self.target.kinds[number], self._cap)
        return x

    # ---------------------------------------------------------------- behind the layers

    @torch.inference_mode()
    def close(self, hidden: Tensor) -> Tensor:
        return self._norm(hidden)

    @torch.inference_mode()
    def head(self, closed: Tensor) -> Tensor:
        head = self.target.model.get_output_embeddings()
        logits: Tensor = head(closed) if isinstance(head, PackedLinear) else F.linear(closed, head.weight)
        return logits

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(hidden)
        return logits


class InPlaceRunner(EagerRunner):
    """The eager runner on the model's own weights, without a copy."""

    name = "in_place"
    fuses = False
