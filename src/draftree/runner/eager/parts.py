"""The parts of a stock decoder layer, and products with its weights.

The eager runner's families differ here and nowhere else:

| | norms before | norms behind | on heads | MLP | heads turn |
|---|---|---|---|---|---|
| llama, mistral, qwen2 | both | | | SiLU | halves |
| qwen3 | both | | each head | SiLU | halves |
| phi3 | both | | | SiLU, fused | halves, or the first entries |
| glm, glm4 | both | glm4: both | | SiLU, fused | neighbours, half of them |
| olmo2, olmo3 | | both | all heads at once | SiLU | halves |
| gemma | both, 1 + w | | | GELU | halves |
| gemma2 | both, 1 + w | both | | GELU | halves; scores are capped |
| gemma3 | both, 1 + w | both | each head | GELU | halves, other angles in sliding layers |
| qwen3_5_text | both, 1 + w | | each head | SiLU | the first entries; gated attention, or Gated DeltaNet |
| lfm2 | both | | each head | SiLU | halves; or a short convolution |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftree.checkpoints import free_bytes
from draftree.runner.target import Target
from draftree.runner.weights.packed import PackedLinear, part_of
from draftree.runner.weights.stock import weight_bytes

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "glm", "glm4"),
    *("olmo2", "olmo3", "gemma", "gemma2", "gemma3_text"),
)
HYBRIDS = ("qwen3_5_text", "lfm2")  # with recurrent layers, for the compiled form alone
TURN_NEIGHBOURS = ("glm", "glm4")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
# By the class of the module that transformers, of any release, makes for them.
OF_CLASS = {
    **dict.fromkeys(("SiLU", "SiLUActivation"), "silu"),
    **dict.fromkeys(("GELUTanh", "PytorchGELUTanh"), "gelu_pytorch_tanh"),
}
WEIGHT_FROM_ONE = ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm", "Qwen3_5RMSNorm")
ROUNDED_ONCE = (*WEIGHT_FROM_ONE, "Olmo2RMSNorm", "Olmo3RMSNorm")

CAP_LOGITS = ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "PaliGemmaForConditionalGeneration")


class Heads(NamedTuple):
    """Attention heads of a layer."""

    kv: int  # key/value heads
    groups: int  # query heads to each of them
    dim: int  # width of a head

    def side_by_side(self, mixed: Tensor) -> Tensor:
        """Return attention's result [B, kv, groups * n, dim] as [B, n, kv * groups * dim], for the next linear."""
        kv, groups, dim = self
        batch, n = len(mixed), mixed.shape[2] // groups
        return mixed.view(batch, kv, groups, n, dim).permute(0, 3, 1, 2, 4).reshape(batch, n, kv * groups * dim)


class Norm(NamedTuple):
    """A root-mean-square norm."""

    weight: Tensor  # [d]
    epsilon: float  # added to the mean square
    twice: bool = True  # whether the stock module rounds to 16 bits before it multiplies by the weight, too

    @classmethod
    def of(cls, module: Any) -> Norm:
        """Read the norm of a stock module."""
        weight, kind = module.weight.detach(), type(module).__name__
        if kind in WEIGHT_FROM_ONE:
            weight = 1.0 + weight.float()
        epsilon = float(module.eps if hasattr(module, "eps") else module.variance_epsilon)
        return cls(weight, epsilon, kind not in ROUNDED_ONCE)

    def __call__(self, x: Tensor) -> Tensor:
        """Scale [..., d] to a mean square of 1, times the weight."""
        return F.rms_norm(x.to(self.weight.dtype), (x.shape[-1],), self.weight, self.epsilon).to(x.dtype)


def normed(norm: Norm | None, x: Tensor) -> Tensor:
    """Return `x` normed, or unchanged without a norm."""
    return x if norm is None else norm(x)


class Parts(NamedTuple):
    """The parts of a stock layer, for any way of running it."""

    heads: Heads  # of its attention
    scaling: float  # of its scores
    cap: float | None  # soft cap of the scores; None for none
    norms: tuple[Norm | None, Norm | None]  # before attention and before the MLP, None where there is none
    behind: tuple[Norm | None, Norm | None]  # behind attention and behind the MLP, before they are added to the stream
    head_norms: tuple[Norm, Norm] | None  # on queries and on keys, or None
    wide: bool  # whether these take all heads at once
    activation: str  # of the MLP, by name
    qkv: list[Any]  # stock linears; those in a list read the same input
    output: Any
    gate_up: list[Any]
    down: Any
    gated: bool = False  # whether each head's query is followed by a gate of its result
    # Gated DeltaNet in the place of attention: `heads` are key heads, value heads to each, its width; or a convolution.
    delta: Any = None

    @classmethod
    def of(cls, layer: Any, config: Any) -> Parts:
        """Read the parts of a stock decoder layer."""
        if recurrent_part(layer) is not None:
            return cls._recurrent(layer, config)
        if config.model_type == "lfm2":
            return cls._of_lfm2(layer, config)
        attention, mlp = layer.self_attn, layer.mlp
        kv = int(config.num_key_value_heads)
        heads = Heads(kv, int(config.num_attention_heads) // kv, int(attention.head_dim))
        head_norms = None
        if getattr(attention, "q_norm", None) is not None:
            head_norms = Norm.of(attention.q_norm), Norm.of(attention.k_norm)
        capped = config.model_type == "gemma2" and config._attn_implementation == "eager"  # no other applies it
        fused, fused_mlp = getattr(attention, "qkv_proj", None), getattr(mlp, "gate_up_proj", None)
        return cls(
            heads,
            float(attention.scaling),
            config.attn_logit_softcapping if capped else None,
            *_norms(layer),
            head_norms,
            head_norms is not None and head_norms[0].weight.shape[0] != heads.dim,
            str(_activation(layer)),
            [attention.q_proj, attention.k_proj, attention.v_proj] if fused is None else [fused],
            attention.o_proj,
            [mlp.gate_proj, mlp.up_proj] if fused_mlp is None else [fused_mlp],
            mlp.down_proj,
            "qwen3_5" in config.model_type,
        )

    @classmethod
    def _of_lfm2(cls, layer: Any, config: Any) -> Parts:
        attention, mlp, kv = layer.self_attn, layer.feed_forward, int(config.num_key_value_heads)
        heads = Heads(kv, int(config.num_attention_heads) // kv, int(attention.head_dim))
        norms = (Norm.of(layer.operator_norm), Norm.of(layer.ffn_norm)), (None, None)
        head_norms = Norm.of(attention.q_layernorm), Norm.of(attention.k_layernorm)
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        own = heads, float(attention.scaling), None, *norms, head_norms, False, "silu", qkv, attention.out_proj
        return cls(*own, [mlp.w1, mlp.w3], mlp.w2)

    @classmethod
    def _recurrent(cls, layer: Any, config: Any) -> Parts:
        if hasattr(layer, "conv"):
            count, mlp = int(config.num_attention_heads), layer.feed_forward
            heads = Heads(count, 1, config.hidden_size // count)
            norms = (Norm.of(layer.operator_norm), Norm.of(layer.ffn_norm)), (None, None)
            own = heads, 1.0, None, *norms, None, False, "silu", [layer.conv.in_proj], layer.conv.out_proj
            return cls(*own, [mlp.w1, mlp.w3], mlp.w2, delta=layer.conv)
        delta, mlp = layer.linear_attn, layer.mlp
        return cls(
            Heads(delta.num_k_heads, delta.num_v_heads // delta.num_k_heads, delta.head_v_dim),
            *(1.0, None, *_norms(layer), None, False, str(_activation(layer))),
            [delta.in_proj_qkv, delta.in_proj_z, delta.in_proj_b, delta.in_proj_a],
            *(delta.out_proj, [mlp.gate_proj, mlp.up_proj], mlp.down_proj),
            delta=delta,
        )

    def linears(self) -> list[list[Any]]:
        """Return the stock linears, each list one matrix to the compiled form: attention's two, then the MLP's."""
        return [self.qkv, [self.output], *([linear] for linear in self.gate_up), [self.down]]

    def products(self) -> list[list[Any]]:
        """Return the matrices of the compiled form: query, key and value; output; gate; up; down."""
        gate_up: list[Any] = self.gate_up
        if len(gate_up) == 1:
            both, half = gate_up[0], gate_up[0].out_features // 2
            gate_up = [part_of(both, 0, half), part_of(both, half, 2 * half)]
        return [self.qkv, [self.output], [gate_up[0]], [gate_up[1]], [self.down]]


def recurrent_part(layer: Any) -> Any:
    """Return what a stock layer has in the place of attention; None for attention."""
    return getattr(layer, "linear_attn", None) or getattr(layer, "conv", None)


def closing_norm(decoder: Any) -> Any:
    """Return the stock norm behind the last layer."""
    return decoder.embedding_norm if hasattr(decoder, "embedding_norm") else decoder.norm


def products_of(target: Target) -> list[list[Any]]:
    """Return the linears of all layers of a model of known shape, grouped by the input that they read."""
    found = []
    for layer in target.layers:
        qkv, output, gate, up, down = Parts.of(layer, target.config).products()
        found += [qkv, output, [*gate, *up], down]
    return found


def _norms(layer: Any) -> tuple[tuple[Norm | None, Norm | None], tuple[Norm | None, Norm | None]]:
    """Return the norms before attention and MLP, and behind them; None for none."""
    if hasattr(layer, "pre_feedforward_layernorm"):
        before, behind = ("input", "pre_feedforward"), ("post_attention", "post_feedforward")
    elif hasattr(layer, "post_feedforward_layernorm"):
        before, behind = ("", ""), ("post_attention", "post_feedforward")
    else:
        before, behind = ("input", "post_attention"), ("post_self_attn", "post_mlp")
    return (_norm(layer, before[0]), _norm(layer, before[1])), (_norm(layer, behind[0]), _norm(layer, behind[1]))


def _norm(layer: Any, name: str) -> Norm | None:
    module = getattr(layer, f"{name}_layernorm", None)
    return None if module is None else Norm.of(module)


def _activation(layer: Any) -> str | None:
    """Return the name of the MLP's activation; None for an unknown one."""
    if hasattr(layer, "feed_forward"):
        return "silu"  # LFM2's, in its code
    mlp = getattr(layer, "mlp", None)
    return OF_CLASS.get(type(getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)).__name__)


def logit_cap(target: Target) -> float | None:
    """Return the soft cap of a model's logits; other classes may have the setting without applying it."""
    caps = any(known.__name__ in CAP_LOGITS for known in type(target.model).__mro__)
    return getattr(target.config, "final_logit_softcapping", None) if caps else None


def known_shape(target: Target, families: tuple[str, ...] = FAMILIES) -> bool:
    """Return whether the layers of a model of these families are made of parts known here."""
    config = target.config
    if target.model_type not in families or target.encoder_decoder:
        return False
    if target.recurrence is not None and not _compiled_recurrence(target.layers):
        return False
    if getattr(config, "use_bidirectional_attention", False) or None in map(_activation, target.layers):
        return False
    # Angles that differ by layer, and by length or in width as well, are left to the hooked runner.
    kinds = getattr(target.decoder.rotary_emb, "rope_type", None)
    return not isinstance(kinds, dict) or {*kinds.values()} <= {"default", "linear"}


MOST_KERNEL = 8  # inputs of a convolution that C can read (`kernels.h`)


def _compiled_recurrence(layers: list[Any]) -> bool:
    """Return whether C has the recurrent layers of a hybrid, which must have attention in some layer."""
    mixers = [mixer for mixer in map(recurrent_part, layers) if mixer is not None]
    small = all(m.conv_kernel_size <= MOST_KERNEL and getattr(m, "activation", "silu") == "silu" for m in mixers)
    return small and len(mixers) < len(layers)


COPY_LIMIT = 1024**3  # bytes of weights that may always be copied
SHARE = 0.25  # of the free memory, which a copy that is much faster may take beyond that


def may_copy(model: Any, device: torch.device, *, much_faster: bool) -> bool:
    """Return whether the weights of `model` may be copied into a faster layout.

    Up to 1 GiB always; where the copy is several times as fast at a dozen rows (`much_faster`: compiled), as
    long as three times the copy stays free.
    """
    size = sum(weight_bytes(p) for p in model.parameters())
    if size <= COPY_LIMIT:
        return True
    free = free_bytes(device) if much_faster else None
    return free is not None and size <= SHARE * free


class StockProduct:
    """Linears on the same input, by the stock weights: nothing is copied."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        self._linears: list[Any] = list(linears)

    def linears(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return weight [out, in] and bias [out] of each, as a call would read them; not for packed linears."""
        return [(m._parameters["weight"], m._parameters["bias"]) for m in self._linears]

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply [..., in] to [..., the linears' outputs side by side]."""
        outputs = self.outputs(x)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def outputs(self, x: Tensor) -> list[Tensor]:
        """Return the output of each linear, or a single one if the weights are fused."""
        return [m(x) if isinstance(m, PackedLinear) else F.linear(x, m.weight, m.bias) for m in self._linears]


class FusedProduct(StockProduct):
    """Linears on the same input as one product with a copy of the weights."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        weight = torch.cat([m.weight.detach() for m in linears])
        self.bias = None if linears[0].bias is None else torch.cat([m.bias.detach() for m in linears])
        self.weight = self._laid_out(weight)

    @staticmethod
    def _laid_out(weight: Tensor) -> Tensor:
        # One row reads float32 laid out [in, out] fastest; bfloat16 takes twice as long that way.
        return weight.t().contiguous().t() if weight.dtype == torch.float32 else weight

    def linears(self) -> list[tuple[Tensor, Tensor | None]]:
        return [(self.weight, self.bias)]

    def outputs(self, x: Tensor) -> list[Tensor]:
        return [self(x)]

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return F.linear(x, self.weight, self.bias)
        rows, weight = x.reshape(-1, x.shape[-1]), self.weight.t()
        out = torch.mm(rows, weight) if self.bias is None else torch.addmm(self.bias, rows, weight)
        return out.view(*x.shape[:-1], -1)
