"""Write tiny drafters with speculators 0.9.0 and record what they answer.

The package needs another transformers than draftree, and is installed apart (torchvision and torchaudio, which it
pulls, do not fit a torch for CPUs and are not needed):

    python -m venv reference
    reference/bin/pip install torch==2.13.0 speculators==0.9.0
    reference/bin/pip uninstall -y torchvision torchaudio
    reference/bin/python recipes/reference_drafters/with_speculators.py tests/data/drafters
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from common import DRAFT_VOCAB, HIDDEN, VOCAB, joined, randomize, record, taps, text, write_target
from speculators.models.eagle3 import Eagle3DraftModel
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

STEPS = 3


def layer(kind: type, **given: Any) -> Any:
    """Return the configuration of a drafter's own layers: two query heads of width 16, one of keys and values."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }
    return kind(**{**sizes, **given})


def reduced(seed: int) -> dict[str, Tensor | int]:
    """Return a draft vocabulary of 40 random target tokens, as `d2t` (offsets) and `t2d` (a mask)."""
    kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:DRAFT_VOCAB].sort().values
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[kept] = True
    return {"d2t": kept - torch.arange(DRAFT_VOCAB), "t2d": mask, "draft_vocab_size": DRAFT_VOCAB}


def whole() -> dict[str, Any]:
    """Return a draft vocabulary that is the target's."""
    return {"d2t": None, "t2d": None, "draft_vocab_size": VOCAB}


class Heard:
    """Collect the outputs of a module's calls."""

    def __init__(self, module: nn.Module) -> None:
        self.calls: list[Tensor] = []
        module.register_forward_hook(lambda _, given, output: self.calls.append(output[0].detach()))


@torch.no_grad()
def eagle3(name: str, seed: int, target: nn.Module, config: Any, vocab: dict[str, Any], **given: Any) -> None:
    """Record one pass over true rows (`logits.0`) and two recursions from each row (`logits.1`, `logits.2`)."""
    model = Eagle3DraftModel.from_training_args(
        config,
        verifier_name_or_path="target",
        ttt_steps=STEPS,
        draft_attn_impl="eager",
        **{"norm_before_residual": False, **vocab, **given},
    )
    randomize(model, seed)
    folder = Path(name)
    model.save_pretrained(folder)
    ids = text(seed)
    hidden = taps(target, ids)
    heard = Heard(model.lm_head)
    rows = len(ids) - 1
    states = joined(hidden, model.target_layer_ids)[:, :rows]
    model(states, ids[None, 1:], document_ids=torch.zeros(1, rows, dtype=torch.long), ttt_steps=STEPS)
    used = {f"hidden.{layer}": hidden[f"hidden.{layer}"] for layer in model.target_layer_ids}
    logits = {f"logits.{step}": rows_of[: rows - step] for step, rows_of in enumerate(heard.calls)}
    record(folder, {"input_ids": ids, **used, **logits})


def main() -> None:
    """Write all folders that speculators knows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(out)  # config.json keeps the target's name as given
    write_target(Path("target"))
    target = LlamaForCausalLM.from_pretrained("target").eval()
    eagle3("speculators_eagle3", 11, target, layer(LlamaConfig), reduced(11))
    eagle3("speculators_eagle3_qwen3", 12, target, layer(Qwen3Config), reduced(12), norm_before_residual=True)
    eagle3("speculators_eagle3_norms", 13, target, layer(LlamaConfig), whole(), fc_norm=True, norm_output=True)
    eagle3("speculators_eagle3_norm_fc", 14, target, layer(LlamaConfig), reduced(14), norm_before_fc=True,
           target_layer_ids=[0, 3, 8])  # fmt: skip


if __name__ == "__main__":
    main()
