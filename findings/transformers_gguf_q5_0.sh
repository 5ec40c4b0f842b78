#!/usr/bin/env bash
# transformers 5.24.0 loads a GGUF file with tensors of type Q5_0 if its architecture is llama, and refuses the same
# type if it is lfm2 ("ggml type 6, which is not supported yet"). It has two readers of GGUF files: an older one,
# which knows Q5_0 and Q5_1, and a newer one for lfm2, qwen35 and qwen35moe, whose table of types lacks both. llama.cpp's
# quantiser writes these types where it is asked for them, and in K-quants for rows that are no multiple of 256.
#
# usage: bash findings/transformers_gguf_q5_0.sh    (installs into a temporary folder; exits 0 while it is so)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'torch==2.13.0'
"$folder/venv/bin/pip" install --quiet 'transformers==5.24.0' 'gguf==0.19.0' 'accelerate==1.15.0'
cd "$folder"
venv/bin/python - <<'P' 2>/dev/null
import sys

import gguf
import numpy as np
import torch
import transformers
from gguf.quants import quantize
from transformers import AutoModelForCausalLM, Lfm2Config, LlamaConfig

COMMON = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
CONFIGS = {
    "llama": LlamaConfig(**COMMON, num_hidden_layers=1, num_key_value_heads=2, tie_word_embeddings=True),
    "lfm2": Lfm2Config(**COMMON, num_hidden_layers=2, num_key_value_heads=2, full_attn_idxs=[1], block_auto_adjust_ff_dim=False),
}
RENAMED = {"feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up"}


def write(architecture, kind):
    config = CONFIGS[architecture]
    model = AutoModelForCausalLM.from_config(config)
    layers = config.num_hidden_layers
    writer = gguf.GGUFWriter(f"{architecture}-{kind}.gguf", architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2 if architecture == "llama" else [0, 2])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(64)])
    writer.add_token_merges([])
    writer.add_eos_token_id(2)
    if architecture == "lfm2":
        writer.add_shortconv_l_cache(3)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(arch, layers)
    for name, tensor in model.named_parameters():
        stem, _, last = name.rpartition(".")
        found = names.get_name(stem)
        if found is None:
            continue
        value = tensor.detach().squeeze().numpy()
        form = gguf.GGMLQuantizationType[kind if value.ndim == 2 and "conv.conv" not in name else "F32"]
        writer.add_tensor(f"{found}.{last}", quantize(value, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def loads(architecture, kind):
    write(architecture, kind)
    try:
        AutoModelForCausalLM.from_pretrained(".", gguf_file=f"{architecture}-{kind}.gguf", dtype=torch.float32)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"
    return "loads"


print(f"transformers {transformers.__version__}, gguf 0.19.0, torch {torch.__version__}")
found = {(arch, kind): loads(arch, kind) for arch in CONFIGS for kind in ("Q8_0", "Q5_0")}
for (arch, kind), what in found.items():
    print(f"{arch:6} {kind}: {what}")
as_said = found["llama", "Q8_0"] == found["llama", "Q5_0"] == found["lfm2", "Q8_0"] == "loads" and "ggml type 6" in found["lfm2", "Q5_0"]
print("As described." if as_said else "It has changed.")
sys.exit(0 if as_said else 1)
P
