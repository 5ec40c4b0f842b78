"""Write tiny drafters with SpecForge 0.2.0, one as the first EAGLE-3 heads were, and record what they answer.

The package pins another torch; its wheel runs unzipped in the environment of `with_speculators.py`:

    reference/bin/pip download --no-deps specforge==0.2.0
    unzip -q specforge-0.2.0-py3-none-any.whl -d specforge-wheel
    PYTHONPATH=specforge-wheel reference/bin/python recipes/reference_drafters/with_specforge.py tests/data/drafters
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from common import HIDDEN, LAYERS, VOCAB, joined, randomize, record, reduced, taps, text
from specforge.export.checkpoint_io import apply_legacy_rope_scaling
from specforge.modeling.draft.dspark import DSparkDraftModel
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

STEPS = 3
BLOCK = 4
MASK = VOCAB - 1
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "tie_word_embeddings": False,
}


def head(seed: int, embedding: Tensor | None, **given: Any) -> LlamaForCausalLMEagle3:
    """Return a random EAGLE-3 head; without its own, the target's `embedding` is used."""
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 1, "draft_vocab_size": VOCAB, "pad_token_id": 0, **given})
    config.architectures = ["LlamaForCausalLMEagle3"]
    model = LlamaForCausalLMEagle3(config).eval()
    randomize(model, seed)
    if not model.norm_output:
        model.lm_head.weight.data *= 0.3
    if embedding is not None:
        model.embed_tokens.weight.data.copy_(embedding)
    if config.draft_vocab_size < VOCAB:
        vocab = reduced(seed)
        model.d2t.copy_(vocab["d2t"])
        model.t2d.copy_(vocab["t2d"])
    return model


@torch.no_grad()
def answers(model: LlamaForCausalLMEagle3, ids: Tensor, states: Tensor) -> dict[str, Tensor]:
    """Return `logits.0` of the true rows, and `logits.1` and `logits.2` of two recursions from each of them."""
    rows = len(ids) - 1
    places = torch.arange(rows)[None]
    mask = model.prepare_decoder_attention_mask(torch.ones(1, rows, dtype=torch.bool), states, 1, rows, 0)
    known: list[list[Tensor]] = [[], []]
    state, tokens, found = model.project_hidden_states(states), ids[None, 1:], {}
    for step in range(STEPS):
        state = model.backbone(model.embed_input_ids(tokens), state, known, mask, places)
        found[f"logits.{step}"] = model.compute_logits(state)[0, : rows - step]
        tokens = torch.cat([tokens[:, 1:], tokens.new_zeros(1, 1)], dim=1)
    return found


def eagle3(out: Path, name: str, seed: int, target: nn.Module, layers: list[int], **given: Any) -> None:
    """Write a head as SpecForge exports it: for SGLang without an embedding, or for Hugging Face with its own."""
    own = given.pop("own_embedding")
    model = head(seed, None if own else target.get_input_embeddings().weight, **given)
    state = {key: value for key, value in model.state_dict().items() if own or "embed" not in key}
    model.save_pretrained(out / name, state_dict=state)
    apply_legacy_rope_scaling(out / name)
    ids = text(seed)
    hidden = taps(target, ids)
    used = {f"hidden.{layer}": hidden[f"hidden.{layer}"] for layer in layers}
    record(out / name, {"input_ids": ids, **used, **answers(model, ids, joined(hidden, layers)[:, :-1])})


def first_form(out: Path, name: str, seed: int, target: nn.Module) -> None:
    """Write the form of the first published heads: flat configuration, `pytorch_model.bin`, the target's embedding."""
    model = head(seed, target.get_input_embeddings().weight, draft_vocab_size=40, head_dim=8)  # hidden / heads
    folder = out / name
    folder.mkdir(exist_ok=True)
    torch.save(
        {key: value for key, value in model.state_dict().items() if "embed" not in key}, folder / "pytorch_model.bin"
    )
    flat = {key: value for key, value in SIZES.items() if key not in ("rope_parameters", "head_dim")}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rope_theta": 500.0,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "draft_vocab_size": 40,
        **flat,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    layers = [2, LAYERS // 2, LAYERS - 3]
    ids = text(seed)
    hidden = taps(target, ids)
    used = {f"hidden.{layer}": hidden[f"hidden.{layer}"] for layer in layers}
    record(folder, {"input_ids": ids, **used, **answers(model, ids, joined(hidden, layers)[:, :-1])})


@torch.no_grad()
def dspark(out: Path, name: str, seed: int, target: nn.Module) -> None:
    """Record a block from each anchor: `logits` without the bias, `markov`, `confidence`, as for speculators."""
    config = Qwen3Config(**SIZES, num_hidden_layers=1)
    config.num_target_layers, config.block_size = LAYERS, BLOCK
    config._attn_implementation = "eager"
    config.dflash_config = {
        "mask_token_id": MASK,
        "target_layer_ids": [0, 6],
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    model = DSparkDraftModel(config).eval()
    randomize(model, seed)
    model.save_pretrained(out / name)
    ids = text(seed)
    hidden = taps(target, ids)
    layers = [layer + 1 for layer in model.target_layer_ids]
    anchors = torch.arange(1, len(ids) - BLOCK)
    found: dict[str, list[Tensor]] = {"logits": [], "markov": [], "confidence": []}
    for anchor in anchors.tolist():
        tokens = torch.tensor([[ids[anchor], *[MASK] * (BLOCK - 1)]])
        states = model(
            position_ids=torch.arange(anchor + BLOCK)[None],
            noise_embedding=target.get_input_embeddings()(tokens),
            target_hidden=joined(hidden, layers)[:, :anchor],
        )
        block = {"prev_token_ids": ids[None, anchor : anchor + BLOCK], "hidden_states": states}
        plain = target.lm_head(states)
        found["logits"].append(plain[0])
        found["markov"].append(model.apply_logits_head(torch.zeros_like(plain), **block)[0])
        found["confidence"].append(model.predict_confidence(states, prev_token_ids=block["prev_token_ids"])[0])
    used = {f"hidden.{layer}": hidden[f"hidden.{layer}"] for layer in layers}
    stacked = {key: torch.stack(values) for key, values in found.items()}
    record(out / name, {"input_ids": ids, "anchors": anchors, **used, **stacked})


def main() -> None:
    """Write all folders; `target` is there already, from `with_speculators.py`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    target = LlamaForCausalLM.from_pretrained(out / "target").eval()
    eagle3(out, "specforge_eagle3", 51, target, [2, 4, 5], own_embedding=False)
    ids = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 3, 6]}  # outputs of these layers
    eagle3(out, "specforge_eagle3_unnormed", 52, target, [1, 4, 7], own_embedding=True, norm_output=False,
           draft_vocab_size=40, fc_norm=True, eagle_config=ids)  # fmt: skip
    first_form(out, "original_eagle3", 53, target)
    dspark(out, "specforge_dspark", 54, target)


if __name__ == "__main__":
    main()
