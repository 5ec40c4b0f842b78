#!/usr/bin/env bash
# dflash 0.1.0 (z-lab) and speculators 0.9.0: the same DFlash weights see other rows, and speculators' converter says
# nothing. With full attention the converted drafter gives the logits of the original. With the original's own
# `is_causal: true`, or with a `sliding_attention` layer, it does not:
#   - `is_causal` is kept in the converted config.json, but no row is hidden from an earlier one of its block;
#   - a window of W is W context rows for *every* row of the block in speculators, and W keys up to and with the row
#     itself in dflash, so that row k sees W - 1 - k context rows.
#
# usage: bash findings/speculators_dflash_masks.sh    (installs into a temporary folder; exits 0 while it is so)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'torch==2.13.0' 'speculators==0.9.0' 'transformers==5.19.0' 'dflash==0.1.0' 2>/dev/null
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio 2>/dev/null # they do not fit a torch for CPUs
cd "$folder"
venv/bin/python - <<'P'
import contextlib
import io
import sys
from importlib.metadata import version

import torch
import transformers
from dflash.model import DFlashDraftModel as Theirs
from loguru import logger
from speculators.convert.dflash import DFlashConverter
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

transformers.logging.set_verbosity_error()
logger.remove()
V, H, B, MASK, ROWS, WINDOW = 64, 16, 4, 63, 12, 3
torch.manual_seed(0)
sizes = dict(vocab_size=V, hidden_size=H, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
target = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=8)).eval()
with torch.no_grad():
    for weight in target.parameters():
        weight.copy_(torch.randn_like(weight) if weight.dim() > 1 else torch.ones_like(weight))
target.save_pretrained("target")
ids = torch.randint(0, V - 1, (1, ROWS))


@torch.no_grad()
def difference(**variant):
    """Return the largest difference of logits, over the blocks of all anchors, after the conversion."""
    config = Qwen3Config(**sizes, num_hidden_layers=2, **variant)
    config.num_target_layers, config.block_size = 8, B
    config.dflash_config = {"mask_token_id": MASK, "target_layer_ids": [1, 4]}
    theirs = Theirs(config).eval()
    for weight in theirs.parameters():
        if weight.dim() > 1:
            weight.copy_(torch.randn_like(weight) / weight.shape[-1] ** 0.5)
    theirs.save_pretrained("theirs")
    with contextlib.redirect_stderr(io.StringIO()):
        DFlashConverter().convert("theirs", "ours", base_model="target", validate=False)
        settings = DFlashSpeculatorConfig.from_pretrained("ours")
        settings.transformer_layer_config._attn_implementation = "eager"
        ours = DFlashDraftModel.from_pretrained("ours", config=settings).eval()
    states = target(ids, output_hidden_states=True).hidden_states
    context = torch.cat([states[2], states[5]], -1)
    seen = []
    ours.lm_head.register_forward_hook(lambda _, given, logits: seen.append(logits[0].view(-1, B, V)))
    ours(context, ids, torch.ones(1, ROWS), states[-1], torch.zeros(1, ROWS, dtype=torch.long),
         max_anchors=ROWS - B, loss_config=resolve_loss_config("kl_div", "eager"))
    worst = 0.0
    for anchor in range(1, ROWS - B):
        rows = target.model.embed_tokens(torch.tensor([[ids[0, anchor], *[MASK] * (B - 1)]]))
        out = theirs(torch.arange(anchor + B)[None], noise_embedding=rows, target_hidden=context[:, :anchor])
        worst = max(worst, (target.lm_head(out)[0] - seen[0][anchor]).abs().max().item())
    return worst, seen[0].std().item()


print(" ".join(f"{name} {version(name)}" for name in ("dflash", "speculators", "transformers", "torch")))
full, _ = difference()
causal, _ = difference(is_causal=True)
sliding, size = difference(layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW, use_sliding_window=True)
print(f"logits of size {size:.1f}, largest difference after conversion:")
print(f"full attention {full:.1e}, is_causal {causal:.1e}, sliding window {sliding:.1e}")
as_said = full < 1e-3 and causal > 0.1 and sliding > 0.1
print("As described." if as_said else "It has changed.")
sys.exit(0 if as_said else 1)
P
