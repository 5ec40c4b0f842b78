#!/usr/bin/env bash
# speculators 0.9.0: an EAGLE-3 head made with draft_attn_impl="eager", saved and read back by from_pretrained, takes
# flex attention instead: the choice is not in config.json. The same call on the same text, which worked before the
# save, then is a ValueError on a CPU as soon as there is a second step, unless the text is a multiple of 128 tokens.
# What helps: read the configuration first, set `transformer_layer_config._attn_implementation = "eager"` on it, and pass
# it to from_pretrained.
#
# usage: bash findings/speculators_eager_forgotten.sh    (installs into a temporary folder; exits 0 while it is so)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'torch==2.13.0' 'speculators==0.9.0' 'transformers==5.19.0' 2>/dev/null
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio 2>/dev/null # they do not fit a torch for CPUs
cd "$folder"
venv/bin/python - 2>/dev/null <<'P'
import sys
from importlib.metadata import version

import torch
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=8)).save_pretrained("target")
head = Eagle3DraftModel.from_training_args(
    LlamaConfig(**sizes, num_hidden_layers=1), verifier_name_or_path="target", draft_vocab_size=64,
    norm_before_residual=False, ttt_steps=2, draft_attn_impl="eager",
)
head.save_pretrained("head")


@torch.no_grad()
def answer(model, rows):
    """Return the tokens of two steps, or the first words of the error."""
    states, ids = torch.arange(rows * 48.0).sin().view(1, rows, 48), torch.arange(rows)[None] % 64
    try:
        tokens = model(states, ids, torch.zeros(1, rows, dtype=torch.long), ttt_steps=2)
        return torch.cat(tokens).flatten().tolist()
    except ValueError as error:
        return str(error)[:70]


print(" ".join(f"{name} {version(name)}" for name in ("speculators", "transformers", "torch")))
back = Eagle3DraftModel.from_pretrained("head")
config = Eagle3SpeculatorConfig.from_pretrained("head")
config.transformer_layer_config._attn_implementation = "eager"
told = Eagle3DraftModel.from_pretrained("head", config=config)
made = answer(head, 5)
print("as made:      ", made)
print("read back:    ", answer(back, 5))
print("told 'eager': ", answer(told, 5))
as_said = isinstance(answer(back, 5), str) and isinstance(answer(back, 128), list) and answer(told, 5) == made
as_said = as_said and isinstance(made, list)
print("As described." if as_said else "It has changed.")
sys.exit(0 if as_said else 1)
P
