"""The tiny models of the zoo: families and their settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

VOCABULARY = 97
WINDOW = 8  # of every sliding or chunked layer, far shorter than the contexts of the tests
HYBRID = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]

LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT_LIKE = IDS | {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256, "tie_word_embeddings": False}
T5_LIKE = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 112,
    "num_layers": 4,  # Hugging Face's own generate fails where encoder and decoder differ
    "num_decoder_layers": 4,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
BART_LIKE = IDS | {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 112,
    "decoder_ffn_dim": 112,
    "max_position_embeddings": 256,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}


@dataclass(frozen=True)
class Member:
    """One tiny model: its id, Hugging Face's family name, its settings, what is special about it."""

    id: str
    model_type: str
    settings: dict[str, Any]
    note: str = ""
    attention: str = "sdpa"
    encoder_decoder: bool = False


def _llama(
    name: str, model_type: str | None = None, note: str = "", attention: str = "sdpa", **settings: Any
) -> Member:
    settings = {k: v for k, v in (LLAMA_LIKE | settings).items() if v is not ...}
    return Member(name, model_type or name, settings, note, attention)


def _gpt(name: str, note: str = "", attention: str = "sdpa", **settings: Any) -> Member:
    return Member(name, name, GPT_LIKE | settings, note, attention)


def _seq2seq(name: str, like: dict[str, Any], model_type: str | None = None, note: str = "", **settings: Any) -> Member:
    return Member(name, model_type or name, like | settings, note, "sdpa", encoder_decoder=True)


_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 128,
}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

CAUSAL: tuple[Member, ...] = (
    _llama("llama"),
    _llama("llama-tied", "llama", "tied embeddings", tie_word_embeddings=True),
    _llama("llama-yarn", "llama", "yarn RoPE", rope_parameters=_YARN),
    _llama("llama-dynamic", "llama", "dynamic NTK RoPE", max_position_embeddings=64, rope_parameters=_DYNAMIC),
    _llama("mistral", sliding_window=None),
    _llama("mistral-window", "mistral", "sliding window", sliding_window=WINDOW),
    _llama("qwen2"),
    _llama(
        "qwen2-window",
        "qwen2",
        "two full layers, then sliding",
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
    ),
    _llama("qwen3", head_dim=16),
    _llama("qwen3_moe", note="experts", head_dim=16, **_MOE),
    _llama("qwen2_moe", note="experts", shared_expert_intermediate_size=32, **_MOE),
    _llama("gemma", head_dim=16),
    _llama(
        "gemma2",
        note="soft caps, sliding window",
        attention="eager",
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
    ),
    _llama(
        "gemma3",
        "gemma3_text",
        "sliding window, two rotary bases",
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        layer_types=HYBRID,
    ),
    _llama("phi"),
    _llama("phi3"),
    _llama("phi3-window", "phi3", "sliding window", sliding_window=WINDOW),
    _llama("phi3-longrope", "phi3", "longrope", original_max_position_embeddings=128, rope_parameters=_LONG),
    _llama("mixtral", note="experts", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    _llama("glm", head_dim=16),
    _llama("glm4", head_dim=16),
    _llama("stablelm"),
    _llama("starcoder2", sliding_window=None),
    _llama("starcoder2-window", "starcoder2", "sliding window", sliding_window=WINDOW),
    _llama("olmo"),
    _llama("olmo2"),
    _llama("olmo3", note="sliding window", sliding_window=WINDOW, layer_types=HYBRID),
    _llama("internlm3", head_dim=16),
    _llama("cohere", logit_scale=1.0),
    _llama(
        "cohere2",
        note="sliding window",
        logit_scale=1.0,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=HYBRID,
    ),
    _llama("granite"),
    _llama("nemotron"),
    _llama("smollm3"),
    _llama("seed_oss", head_dim=16),
    _llama("exaone4", note="sliding window", sliding_window=WINDOW, sliding_window_pattern=4),
    _llama(
        "gpt_oss",
        note="sinks, experts, sliding window",
        attention="eager",
        head_dim=16,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    _llama("deepseek_v3", note="latent attention, experts", **_MLA),
    _llama(
        "llama4",
        "llama4_text",
        "chunked attention",
        head_dim=16,
        num_local_experts=2,
        attention_chunk_size=WINDOW,
        intermediate_size_mlp=112,
        moe_layers=[],
        interleave_moe_layer_step=2,
    ),
    _llama("gpt_neox", num_key_value_heads=...),
    _llama("persimmon", num_key_value_heads=...),
    _llama("biogpt", num_key_value_heads=...),
    _llama("opt", ffn_dim=112, word_embed_proj_dim=64, intermediate_size=..., num_key_value_heads=...),
    _llama(
        "falcon",
        note="rotary",
        alibi=False,
        new_decoder_architecture=False,
        multi_query=True,
        intermediate_size=...,
        num_key_value_heads=...,
    ),
    _llama(
        "falcon-alibi",
        "falcon",
        "alibi",
        alibi=True,
        new_decoder_architecture=False,
        multi_query=False,
        intermediate_size=...,
        num_key_value_heads=...,
    ),
    Member("bloom", "bloom", IDS | {"hidden_size": 64, "n_layer": 4, "n_head": 4}, "alibi", "eager"),
    Member(
        "mpt",
        "mpt",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 4,
            "expansion_ratio": 2,
            "max_seq_len": 256,
        },
        "alibi",
        "eager",
    ),
    _gpt("gpt2"),
    _gpt("gptj", attention="eager", rotary_dim=8),
    _gpt("codegen", attention="eager", rotary_dim=8),
    _gpt("gpt_bigcode", "multi-query"),
    Member(
        "gpt_neo",
        "gpt_neo",
        IDS
        | {
            "hidden_size": 64,
            "num_layers": 4,
            "num_heads": 4,
            "intermediate_size": 112,
            "window_size": WINDOW,
            "attention_types": [[["global", "local"], 2]],
            "max_position_embeddings": 256,
        },
        "local layers",
        "eager",
    ),
    Member(
        "xglm",
        "xglm",
        IDS | {"d_model": 64, "ffn_dim": 112, "num_layers": 4, "attention_heads": 4, "max_position_embeddings": 256},
        "sinusoidal positions",
        "eager",
    ),
)

_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_SHARED = _MOE | {"shared_expert_intermediate_size": 32}
_KIMI = {"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 4], "full_attn_layers": [3]}
_CONV = {"layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3}
_PURE = IDS | {"hidden_size": 64, "num_hidden_layers": 4, "state_size": 16}
# Recurrent layers beside attention, or alone.
RECURRENT: tuple[Member, ...] = (
    _llama("qwen3_5", "qwen3_5_text", "gated delta rule", **_DELTA),
    _llama("qwen3_5_moe", "qwen3_5_moe_text", "gated delta rule, experts", **_DELTA, **_SHARED),
    _llama("qwen3_next", note="gated delta rule, experts", **_DELTA, **_SHARED),
    _llama("olmo_hybrid", note="gated delta rule", **_DELTA),
    _llama(
        "kimi_linear",
        note="Kimi Delta Attention, latent attention, experts",
        **{key: value for key, value in _MLA.items() if key not in ("q_lora_rank", "n_routed_experts", "n_group")},
        head_dim=16,
        num_local_experts=4,
        linear_attn_config=_KIMI,
    ),
    _llama(
        "granitemoehybrid",
        note="Mamba-2",
        **_MAMBA2,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=96,
        position_embedding_type="rope",
    ),
    _llama("bamba", note="Mamba-2", **_MAMBA2, attn_layer_indices=[2]),
    _llama("falcon_h1", note="Mamba-2 beside attention in each layer", **_MAMBA2, head_dim=16, mamba_d_ssm=128),
    _llama(
        "nemotron_h",
        note="Mamba-2",
        layers_block_type=["mamba", "attention", "mamba", "mlp"],
        head_dim=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=1,
        conv_kernel=4,
        expand=2,
        chunk_size=16,
    ),
    _llama(
        "zamba2",
        note="Mamba-2, shared attention",
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_headdim=16,
        n_mamba_heads=8,
        mamba_ngroups=1,
        chunk_size=16,
        attention_head_dim=32,
        num_mem_blocks=1,
        adapter_rank=4,
    ),
    _llama(
        "jamba",
        note="Mamba, experts",
        attn_layer_period=4,
        attn_layer_offset=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=8,
    ),
    _llama("lfm2", note="short convolutions", **_CONV, block_auto_adjust_ff_dim=False),
    _llama("lfm2_moe", note="short convolutions, experts", **_CONV, **_MOE, num_dense_layers=1),
    Member(
        "mamba2",
        "mamba2",
        _PURE | {"num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
        "no attention",
        "eager",
    ),
    Member("falcon_mamba", "falcon_mamba", _PURE, "no attention", "eager"),
    Member("mamba", "mamba", _PURE, "no attention", "eager"),
)

LEFT = "a left-padded source as alone"  # and not as in Hugging Face's padded batch
ENCODER_DECODER: tuple[Member, ...] = (
    _seq2seq("t5", T5_LIKE),
    _seq2seq("t5-gated", T5_LIKE, "t5", "gated, untied", feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    _seq2seq("mt5", T5_LIKE),
    _seq2seq("umt5", T5_LIKE, note="a relative bias in every layer"),
    _seq2seq("bart", BART_LIKE, note=LEFT),
    _seq2seq("mbart", BART_LIKE, note=LEFT),
    _seq2seq("pegasus", BART_LIKE, note=f"sinusoidal positions, {LEFT}"),
    _seq2seq("marian", BART_LIKE, note=f"sinusoidal positions, {LEFT}", decoder_vocab_size=VOCABULARY),
    _seq2seq("m2m_100", BART_LIKE, note="sinusoidal positions"),
)

# Families that differ in how they find positions, with far more tokens than positions, as most real models have.
MANY_TOKENS = {"vocab_size": 997, "decoder_vocab_size": 997, "n_positions": 64, "max_position_embeddings": 64}
POSITIONED = ("llama", "gpt2", "gptj", "codegen", "gpt_bigcode", "gpt_neo", "opt", "biogpt", "xglm", "bart", "marian")
MORE_TOKENS: tuple[Member, ...] = tuple(
    replace(m, id=f"{m.id}-more-tokens", settings={k: MANY_TOKENS.get(k, v) for k, v in m.settings.items()})
    for m in CAUSAL + ENCODER_DECODER
    if m.id in POSITIONED
)

# Families that keep a recurrent state of another kind: draftree refuses them.
RNN_LIKE = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 4}
REFUSED: tuple[Member, ...] = (
    Member("rwkv", "rwkv", RNN_LIKE | {"attention_hidden_size": 64, "intermediate_size": 112}, attention="eager"),
)
