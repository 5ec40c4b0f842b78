"""Write tiny drafters with dflash 0.1.0 (z-lab) and record what they answer.

python -m venv reference
reference/bin/pip install dflash==0.1.0 torch==2.13.0 transformers==5.24.0
reference/bin/python recipes/reference_drafters/with_dflash.py tests/data/drafters
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path
from typing import Any

import torch
from common import HIDDEN, LAYERS, VOCAB, joined, randomize, record, taps, text
from dflash.model import DFlash2DraftModel, DFlashDraftModel, extract_context_feature
from transformers import LlamaForCausalLM, Qwen3Config

BLOCK = 4
MASK = VOCAB - 1


def configuration(inner: dict[str, Any], **given: Any) -> Qwen3Config:
    """Return two Qwen3 layers with two query heads of width 16; `inner` is `dflash_config`."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=False,
        **given,
    )
    config.num_target_layers = LAYERS
    config.dflash_config = {"mask_token_id": MASK, **inner}
    return config


@torch.no_grad()
def block(kind: type, out: Path, name: str, seed: int, config: Qwen3Config) -> None:
    """Record a block from each anchor: `logits` [anchors, block, vocabulary], and DFlash2's greedy `path`."""
    target = LlamaForCausalLM.from_pretrained(out / "target").eval()
    model = kind(config).eval()
    randomize(model, seed)
    folder = out / name
    model.save_pretrained(folder)
    ids = text(seed)
    hidden = taps(target, ids)
    # The numbers mean outputs of layers; that of the last layer is read after the final norm.
    layers = ["final" if layer == LAYERS - 1 else layer + 1 for layer in model.target_layer_ids]
    context = joined(hidden, layers)
    states = target(ids[None], output_hidden_states=True).hidden_states
    assert torch.equal(context, extract_context_feature(states, model.target_layer_ids))
    anchors = torch.arange(1, len(ids) - BLOCK)
    found: dict[str, list[torch.Tensor]] = {"logits": [], "path": []}
    for anchor in anchors.tolist():
        tokens = torch.tensor([[ids[anchor], *[MASK] * (BLOCK - 1)]])
        rows = target.get_input_embeddings()(tokens) * config.dflash_config.get("input_embedding_scale", 1.0)
        places = torch.arange(anchor + BLOCK)[None]
        states = model(target_hidden=context[:, :anchor], noise_embedding=rows, position_ids=places)
        scaled = isinstance(model, DFlashDraftModel)
        logits = model.compute_logits(states, target.lm_head) if scaled else target.lm_head(states)
        found["logits"].append(logits[0])
        if kind is DFlash2DraftModel:
            found["path"].append(model.propose(states[:, 1:], tokens[:, 0], target.lm_head, temperature=0)[0][0])
    used = {f"hidden.{layer}": hidden[f"hidden.{layer}"] for layer in layers}
    answers = {key: torch.stack(values) for key, values in found.items() if values}
    record(folder, {"input_ids": ids, "anchors": anchors, **used, **answers})


def main() -> None:
    """Write all folders that dflash knows; `target` is there already, from `with_speculators.py`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("jetspec", type=Path, help="draft_head.py of JetSpec")
    options = parser.parse_args()
    out, jetspec = options.out, runpy.run_path(str(options.jetspec))["DFlashDraftModel"]
    plain = {"block_size": BLOCK, "target_layer_ids": [0, 6]}
    last = {**plain, "target_layer_ids": [2, 7]}
    block(DFlashDraftModel, out, "zlab_dflash", 41, configuration({"target_layer_ids": [0, 6]}, block_size=BLOCK))
    block(DFlashDraftModel, out, "zlab_dflash_default", 42, configuration({"block_size": BLOCK}))
    block(DFlashDraftModel, out, "zlab_dflash_causal", 43, configuration(plain, is_causal=True))
    block(DFlashDraftModel, out, "zlab_dflash_last", 46, configuration(last))
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "use_sliding_window": True}
    block(DFlashDraftModel, out, "zlab_dflash_sliding", 44, configuration(plain, **sliding))
    causal = {"target_layer_ids": [0, 6], "causal_head": True}
    block(jetspec, out, "jetspec", 47, configuration(causal, block_size=BLOCK))
    selector = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 8, "selector_top_k": 6}
    scaled = {"input_embedding_scale": 1.5, "output_multiplier": 0.7, "final_logit_softcapping": 5.0}
    block(DFlash2DraftModel, out, "zlab_dflash2", 45, configuration({**plain, **selector, **scaled}))


if __name__ == "__main__":
    main()
