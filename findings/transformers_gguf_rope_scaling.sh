#!/usr/bin/env bash
# transformers 5.24.0 leaves out how positions are scaled when it loads a GGUF file. Llama 3.1 and 3.2 files hold the tensor
# rope_freqs.weight, by which llama.cpp divides rotary frequencies, and other files the keys *.rope.scaling.*. The loaded
# configuration says "default", without a warning, and logits are those of another model. The same model without scaling
# is loaded with its own logits.
#
# usage: bash findings/transformers_gguf_rope_scaling.sh    (installs into a temporary folder; exits 0 while it is so)
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
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
CASES = {
    "llama, no scaling": ("llama", {"rope_type": "default", "rope_theta": 5e5}),
    "llama, rope_freqs.weight": ("llama", LLAMA3 | {"original_max_position_embeddings": 64}),
    "qwen2, rope.scaling.type yarn": ("qwen2", YARN),
}


def written(architecture, rope):
    config = AutoConfig.for_model(architecture, **SIZES, num_key_value_heads=2, rope_parameters=rope, max_position_embeddings=512)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    writer = gguf.GGUFWriter("model.gguf", architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(64)
    if rope["rope_type"] == "llama3":
        inverse = model.model.rotary_emb.inv_freq.double().numpy()
        plain = rope["rope_theta"] ** (-np.arange(16) / 16)
        writer.add_tensor("rope_freqs.weight", (plain / inverse).astype(np.float32))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(128)
    names = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture), 2)
    for name, tensor in model.state_dict().items():
        value = tensor.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):  # llama.cpp turns pairs side by side
            value = value.reshape(2, 2, 16, 64).swapaxes(1, 2).reshape(64, 64).copy()
        stem, _, last = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{last}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


print(f"transformers {transformers.__version__}, gguf 0.19.0, torch {torch.__version__}")
ids = torch.arange(200)[None] % 64
far = {}
for case, (architecture, rope) in CASES.items():
    model = written(architecture, rope)
    loaded = AutoModelForCausalLM.from_pretrained(".", gguf_file="model.gguf", dtype=torch.float32).eval()
    with torch.no_grad():
        far[case] = float((model(ids).logits - loaded(ids).logits).abs().max())
    print(f"{case:30} loaded as {loaded.config.rope_parameters['rope_type']!r}, logits off by {far[case]:.2g}")
first, *scaled = far.values()
as_said = first < 1e-3 and all(off > 0.5 for off in scaled)
print("As described." if as_said else "It has changed.")
sys.exit(0 if as_said else 1)
P
