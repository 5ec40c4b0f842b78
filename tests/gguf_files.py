"""Writes tiny GGUF files for tests: a llama of the zoo with the embedded model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from numpy.typing import NDArray

from benchmarks.peers.engines.gguf_file import interleaved, renamed


def random_blocks(kind: str, outputs: int, inputs: int, seed: int = 0) -> NDArray[np.uint8]:
    """Blocks of a format with any numbers in them and scales that fit them: uint8 [outputs, bytes of a row]."""
    rng = np.random.default_rng((seed, outputs, inputs))
    inside, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rows = rng.integers(0, 256, (outputs, inputs // inside, size), dtype=np.uint8)
    most = {"Q8_0": 128, "Q6_K": 32 * 128, "Q4_K": 15 * 63, "Q5_K": 31 * 63}.get(kind, 16)
    scales = rng.uniform(0.5, 2, (2, *rows.shape[:2])) / (most * np.sqrt(inputs) / 2)
    scale, minimum = scales.astype(np.float16)[..., None].view(np.uint8)
    if kind == "Q6_K":
        rows[..., 208:210] = scale
    else:
        rows[..., :2] = scale
    if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        rows[..., 2:4] = minimum
    return rows.reshape(outputs, -1)


def write_gguf(path: Path, model: Any, tokenizer: Any, kind: str = "F32") -> None:
    """Write a llama model; matrices in blocks of `kind`, such as Q4_1. Those of K-quants are random ones."""
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // heads)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, tokenizer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if "q_proj" in name or "k_proj" in name:
            tensor = torch.from_numpy(interleaved(tensor.numpy(), heads if "q_proj" in name else kv_heads).copy())
        whole = tensor.dim() == 2 and tensor.shape[1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] == 0
        form = gguf.GGMLQuantizationType[kind if whole else "F32"]
        rows = random_blocks(kind, *tensor.shape) if kind.endswith("_K") and tensor.dim() == 2 else None
        writer.add_tensor(renamed(name), quantize(tensor.numpy(), form) if rows is None else rows, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
