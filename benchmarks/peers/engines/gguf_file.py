"""A llama of Hugging Face as llama.cpp reads it: a GGUF file, without a tokenizer, as prompts come as token ids."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import safe_open

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write(folder: Path, file: Path, kind: str) -> None:
    """Write the llama of `folder` with its matrices as `kind`, one of gguf's types; norms stay in float32.

    A model of another family is a ValueError.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise ValueError(f"a '{config['model_type']}' model; only llamas are written as GGUF here")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    with_type = gguf.GGMLQuantizationType[kind]
    for source in sorted(folder.glob("*.safetensors")):
        with safe_open(source, framework="pt") as held:
            for name in held.keys():  # noqa: SIM118 -- no mapping
                value = held.get_tensor(name).to(torch.float32).numpy()
                if name.endswith(("q_proj.weight", "k_proj.weight")):
                    value = interleaved(value, heads if "q_proj" in name else kv_heads)
                known = gguf.GGMLQuantizationType.F32 if value.ndim == 1 else with_type
                writer.add_tensor(renamed(name), gguf.quants.quantize(value, known), raw_dtype=known)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads x size, inputs] of queries or keys, the two halves of every head in turns: llama.cpp turns pairs."""
    outputs, inputs = weight.shape
    return weight.reshape(heads, 2, outputs // heads // 2, inputs).swapaxes(1, 2).reshape(outputs, inputs)


def renamed(name: str) -> str:
    """Return a tensor's name in GGUF; raise a ValueError if it has none here."""
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    part, _, kind = name.rpartition(".")
    if part in whole:
        return f"{whole[part]}.{kind}"
    _, _, number, part = part.split(".", 3)
    if part not in NAMES:
        raise ValueError(f"a tensor {name}, which a llama does not have")
    return f"blk.{number}.{NAMES[part]}.{kind}"


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
