#!/usr/bin/env bash
# transformers 5.24.0: a DeepSeek-V3 checkpoint with its MTP layer generates with `use_mtp=True`. The same model, read by
# from_pretrained and written by save_pretrained (as after fine-tuning), has lost the layer: `use_mtp=True` reads it again
# from the first folder, and the plain class has no such parameters. No warning says so; the new folder's
# config.json still counts one MTP layer, and generation from it with `use_mtp=True` is a RuntimeError.
# Qwen3.5's `mtp.*` tensors vanish in the same way.
#
# usage: bash findings/transformers_mtp_lost_on_save.sh    (installs into a temporary folder; exits 0 while it is so)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'torch==2.13.0' 'transformers==5.24.0' 'numpy==2.3.5' 2>/dev/null
cd "$folder"
venv/bin/python - <<'P'
import json
import sys
import warnings

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

transformers.logging.disable_progress_bar()
torch.manual_seed(0)
LAYERS = 61  # the only depth at which transformers looks for this model's MTP layer
config = DeepseekV3Config(
    vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=LAYERS + 1,
    num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
    q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
    bos_token_id=1, eos_token_id=None, pad_token_id=0, num_nextn_predict_layers=1,
)
# One layer more than the model: with the joints of an MTP layer it is one.
DeepseekV3ForCausalLM(config).save_pretrained("published")
tensors = load_file("published/model.safetensors")
last = f"model.layers.{LAYERS}."
tensors |= {f"{last}{name}.weight": torch.ones(32) for name in ("enorm", "hnorm", "shared_head.norm")}
tensors[f"{last}eh_proj.weight"] = torch.randn(32, 64) * 0.1
save_file(tensors, "published/model.safetensors", metadata={"format": "pt"})
settings = json.load(open("published/config.json"))
json.dump({**settings, "num_hidden_layers": LAYERS}, open("published/config.json", "w"))


def run(folder):
    """Return the model of a folder, and the number of new tokens that it makes with its MTP layer, or the error."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[5, 9, 23, 41]])
    try:
        return model, model.generate(ids, max_new_tokens=8, do_sample=False, use_mtp=True).shape[1] - 4
    except RuntimeError as error:
        return model, f"RuntimeError: {str(error)[:60]}"


print(f"transformers {transformers.__version__}, torch {torch.__version__}")
model, first = run("published")
print("tokens from the published folder:", first)
again = AutoModelForCausalLM.from_pretrained("published", dtype=torch.float32)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    again.save_pretrained("saved")
left = [name for name in load_file("saved/model.safetensors") if name.startswith(last)]
counted = json.load(open("saved/config.json")).get("num_nextn_predict_layers", json.load(open("saved/config.json")).get("num_mtp_layers"))
print(f"after save_pretrained: {len(left)} tensors of the layer, {len(said)} warnings, config counts {counted}")
_, second = run("saved")
print("tokens from the saved folder:", second)
as_said = first == 8 and not left and not said and counted == 1 and isinstance(second, str)
print("As described." if as_said else "It has changed.")
sys.exit(0 if as_said else 1)
P
