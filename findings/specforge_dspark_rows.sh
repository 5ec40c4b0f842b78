#!/usr/bin/env bash
# SpecForge 0.2.0, DSpark: training teaches row k of a block that begins at position p the token at p + k + 1, row 0
# included. Its own `spec_generate` takes the token at p + 1 from row 1, at p + 2 from row 2 and so on, as for DFlash: each
# row is read one position too early, and row 0, the nearest, never. The text is right all the same, since the
# target verifies; but acceptance measured in this way is not that of the head.
# Shown on the two functions that decide it, with rows that can be told apart.
#
# usage: bash findings/specforge_dspark_rows.sh    (installs into a temporary folder; exits 0 while it is so)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
# The package pins another torch and SGLang, which these classes do not need.
"$folder/venv/bin/pip" install --quiet 'torch==2.13.0' 'transformers==5.8.1' 'numpy==2.3.5' 2>/dev/null
"$folder/venv/bin/pip" install --quiet --no-deps 'specforge==0.2.0' 2>/dev/null
cd "$folder"
venv/bin/python -W ignore - <<'P'
import sys
from importlib.metadata import version
from types import SimpleNamespace

import torch
from specforge.algorithms.common.dflash_family_model import OnlineDSparkModel
from specforge.modeling.draft.dspark import DSparkDraftModel
from torch import nn
from transformers import Qwen3Config

BLOCK, MASK, START = 4, 63, 2
config = Qwen3Config(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8,
)
config.num_target_layers, config.block_size = 8, BLOCK
config.dflash_config = {"mask_token_id": MASK, "target_layer_ids": [1]}
model = DSparkDraftModel(config)
training = OnlineDSparkModel(
    model, nn.Linear(16, 64, bias=False), nn.Embedding(64, 16), MASK, block_size=BLOCK, attention_backend="eager"
)
text = torch.arange(10)[None]  # each token is its own position
taught, counted, _ = training._build_dspark_labels_and_mask(
    text, torch.ones(1, 10), torch.tensor([[START]]), torch.ones(1, 1, dtype=torch.bool)
)
rows = torch.eye(16)[None, :BLOCK]  # row k answers k
block = torch.tensor([[START, *[MASK] * (BLOCK - 1)]])
read = model._sample_draft_tokens(SimpleNamespace(lm_head=nn.Identity()), rows, block)

print(" ".join(f"{name} {version(name)}" for name in ("specforge", "transformers", "torch")))
learned = {position: row for row, position in enumerate(taught[0, 0].tolist()) if counted[0, 0, row]}
used = {START + 1 + index: row for index, row in enumerate(read[0].tolist())}
for position in sorted(used):
    print(f"position {START} + {position - START}: taught to row {learned[position]}, read from row {used[position]}")
as_said = all(used[position] == learned[position] + 1 for position in used) and len(used) == BLOCK - 1
print("As described." if as_said else "It has changed.")
sys.exit(0 if as_said else 1)
P
