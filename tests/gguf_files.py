"""Writes tiny GGUF files for tests: a llama of the zoo with the embedded model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from numpy.typing import NDArray

from benchmarks.peers.engines.gguf_file import interleaved
from draftree.gguf.model import ARCHITECTURES

# Kinds that the package gguf reads and does not write.
RANDOM = ("Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")


def random_blocks(kind: str, outputs: int, inputs: int, seed: int = 0) -> NDArray[np.uint8]:
    """Blocks of a format with any numbers in them and scales that fit them: uint8 [outputs, bytes of a row]."""
    rng = np.random.default_rng((seed, outputs, inputs))
    inside, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rows = rng.integers(0, 256, (outputs, inputs // inside, size), dtype=np.uint8)
    most = {"Q8_0": 128, "Q6_K": 32 * 128, "Q4_K": 15 * 63, "Q5_K": 31 * 63, "Q3_K": 4 * 32, "IQ4_NL": 127}.get(
        kind, 16
    )
    scales = rng.uniform(0.5, 2, (2, *rows.shape[:2])) / (most * np.sqrt(inputs) / 2)
    scale, minimum = scales.astype(np.float16)[..., None].view(np.uint8)
    if kind in ("Q3_K", "Q6_K"):
        rows[..., -2:] = scale
    else:
        rows[..., :2] = scale
    if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        rows[..., 2:4] = minimum
    return rows.reshape(outputs, -1)


def write_gguf(path: Path, model: Any, tokenizer: Any, kind: str = "F32", **extra: float | str) -> None:
    """Write a model of an architecture that is read in blocks; matrices in blocks of `kind`, such as Q4_1.

    Those of K-quants are random ones. `extra`: further metadata, by keys whose dots are double underscores.
    """
    config = model.config
    architecture = next(ours for ours, theirs in ARCHITECTURES.items() if theirs == config.model_type)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1)))
    writer.add_vocab_size(config.vocab_size)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    for key, value in extra.items():
        add = (
            writer.add_string
            if isinstance(value, str)
            else writer.add_uint32
            if isinstance(value, int)
            else writer.add_float32
        )
        add(key.replace("__", "."), value)  # type: ignore[arg-type]
    if architecture in ("gemma2", "gemma3", "phi3"):
        _add_sentencepiece(writer, tokenizer)
    else:
        _add_tokenizer(writer, tokenizer)
    if rope.get("rope_type") == "llama3":
        inverse = model.model.rotary_emb.inv_freq.numpy()
        plain = rope["rope_theta"] ** (-np.arange(len(inverse)) / len(inverse))
        writer.add_tensor("rope_freqs.weight", (plain / inverse).astype(np.float32))
    if rope.get("rope_type") == "longrope":
        for which in ("long", "short"):
            writer.add_tensor(f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32))
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], len(model.model.layers))
    form = gguf.GGMLQuantizationType[kind]
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        numbers = tensor.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            numbers = interleaved(numbers, heads if "q_proj" in name else kv_heads).copy()
        if architecture.startswith("gemma") and "norm.weight" in name:
            numbers = numbers + 1
        place, _, last = name.rpartition(".")
        if numbers.ndim == 2 and numbers.shape[1] % gguf.GGML_QUANT_SIZES[form][0] == 0:
            blocks = random_blocks(kind, *numbers.shape) if kind in RANDOM else quantize(numbers, form)
            writer.add_tensor(f"{names.get_name(place)}.{last}", blocks, raw_dtype=form)
        else:
            writer.add_tensor(f"{names.get_name(place)}.{last}", numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sentencepiece(writer: Any, tokenizer: Any) -> None:
    """Add a vocabulary of the same size as SentencePiece writes it, with scores in place of merges."""
    tokens = [token.replace("\u0120", "\u2581") for token in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([float(-i) for i in range(len(tokens))])
    writer.add_token_types(
        [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(tokens))]
    )
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_unk_token_id(0)
    writer.add_chat_template(tokenizer.chat_template)


def _add_tokenizer(writer: Any, tokenizer: Any) -> None:
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(tokens))]
    )
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
