#!/usr/bin/env bash
# transformers 5.24.0, MiniMax with a recurrent first layer: prompts of different lengths,
# padded on the left with an attention mask, get other texts in a batch than alone, from the second new token on.
# `MiniMaxCache.get_seq_length()` asks layer 0, which keeps no keys, and is 0 at any length, so the mask of a decoding
# step covers the wrong positions. With attention in the first layer the texts are equal.
#
# usage: bash findings/transformers_minimax_padding.sh    (installs into a temporary folder; exits 0 while it is so)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'torch==2.13.0' 'transformers==5.24.0' 'numpy==2.3.5' 2>/dev/null
cd "$folder"
venv/bin/python - <<'P'
import sys

import torch
import transformers
from transformers import MiniMaxConfig, MiniMaxForCausalLM

transformers.logging.set_verbosity_error()
ROWS = ([5, 9, 23, 41, 7, 30, 12, 55], [44, 3, 17])
NEW = 6


def texts(layer_types):
    """Return the new tokens of each prompt in a padded batch, and alone."""
    torch.manual_seed(0)
    config = MiniMaxConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, block_size=16, num_local_experts=2, num_experts_per_tok=1,
        layer_types=layer_types, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )
    model = MiniMaxForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn_like(weight) * 1.4 / weight.shape[-1] ** 0.5)
    width = max(map(len, ROWS))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in ROWS])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ROWS])
    options = {"max_new_tokens": NEW, "do_sample": False}
    batch = model.generate(ids, attention_mask=mask, **options)[:, width:].tolist()
    alone = [model.generate(torch.tensor([row]), **options)[0, len(row) :].tolist() for row in ROWS]
    return batch, alone


print(f"transformers {transformers.__version__}, torch {torch.__version__}")
linear, full = "linear_attention", "full_attention"
equal = []
for first, other in ((linear, full), (full, linear)):
    batch, alone = texts([first, other, first, other])
    print(f"first layer {first}: short prompt in the batch {batch[1]}, alone {alone[1]}")
    equal.append(batch == alone)
as_said = equal == [False, True]
print("As described." if as_said else "It has changed.")
sys.exit(0 if as_said else 1)
P
