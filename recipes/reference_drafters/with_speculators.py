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
from common import HIDDEN, VOCAB, joined, randomize, record, reduced, taps, text, write_target
from safetensors.torch import load_file
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dflash2 import DFlash2DraftModel
from speculators.models.dspark import DSparkDraftModel
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.mtp import MTPDraftModel
from speculators.models.peagle import PEagleDraftModel
from speculators.models.peagle import core as peagle_core
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, Qwen3Config

STEPS = 3
BLOCK = 4
MASK = VOCAB - 1
LOSS = {"loss_config": resolve_loss_config("kl_div", "eager")}  # the default needs Triton


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


def whole() -> dict[str, Any]:
    """Return a draft vocabulary that is the target's."""
    return {"d2t": None, "t2d": None, "draft_vocab_size": VOCAB}


class Heard:
    """Collect the outputs of a module's calls."""

    def __init__(self, module: nn.Module) -> None:
        self.calls: list[Tensor] = []
        module.register_forward_hook(lambda _, given, output: self.calls.append(output.detach()))


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
    logits = {f"logits.{step}": rows_of[0, : rows - step] for step, rows_of in enumerate(heard.calls)}
    record(folder, {"input_ids": ids, **used, **logits})


@torch.no_grad()
def peagle(name: str, seed: int, target: nn.Module, config: Any, vocab: dict[str, Any]) -> None:
    """Record rows of all depths in one pass: `logits` [rows, draft vocabulary], `anchors` and `depths` [rows]."""
    model = PEagleDraftModel.from_training_args(
        config, verifier_name_or_path="target", mask_token_id=MASK, num_depths=4, draft_attn_impl="eager", **vocab
    )
    randomize(model, seed)
    folder = Path(name)
    model.save_pretrained(folder)
    ids = text(seed)
    hidden = taps(target, ids)
    rows = len(ids) - 1
    torch.manual_seed(seed)  # of the rows that the library draws
    heard, chosen = Heard(model.lm_head), []
    choose = peagle_core.generate_cod_sample_indices
    peagle_core.generate_cod_sample_indices = lambda **given: chosen.append(choose(**given)) or chosen[-1]
    model(
        joined(hidden, model.target_layer_ids)[:, :rows],
        ids[None, 1:],
        document_ids=torch.zeros(1, rows, dtype=torch.long),
        verifier_last_hidden_states=hidden["hidden.8"][None, :rows],
        num_depths=4,
        down_sample_ratio=1.0,
        **LOSS,
    )
    peagle_core.generate_cod_sample_indices = choose
    used = {f"hidden.{layer}": hidden[f"hidden.{layer}"] for layer in model.target_layer_ids}
    found = {"anchors": chosen[0][0], "depths": chosen[0][1], "logits": heard.calls[0][0]}
    record(folder, {"input_ids": ids, **used, **found})


@torch.no_grad()
def block(
    kind: type, name: str, seed: int, target: nn.Module, config: Any, vocab: dict[str, Any], **given: Any
) -> None:
    """Record a block from each anchor: `logits` [anchors, block, draft vocabulary] and what the variant adds to it."""
    model = kind.from_training_args(
        config,
        verifier_name_or_path="target",
        block_size=BLOCK,
        mask_token_id=MASK,
        draft_attn_impl="eager",
        **{**vocab, **given},
    )
    randomize(model, seed)
    model.load_verifier_weights()  # the embedding, and the head of a whole vocabulary, stay the target's
    folder = Path(name)
    model.save_pretrained(folder)
    ids = text(seed)
    hidden = taps(target, ids)
    tokens = len(ids)
    states, logits = Heard(model.norm), Heard(model.lm_head)
    confidence = Heard(model.confidence_head) if kind is DSparkDraftModel else None
    options = {} if kind is DFlashDraftModel else {"tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0]}
    model(
        joined(hidden, model.target_layer_ids),
        ids[None],
        loss_mask=torch.ones(1, tokens),
        verifier_last_hidden_states=hidden["hidden.8"][None],
        document_ids=torch.zeros(1, tokens, dtype=torch.long),
        max_anchors=tokens - BLOCK,  # so many that all are taken, in order
        **LOSS,
        **options,
    )
    anchors = torch.arange(tokens - BLOCK)
    shape = (len(anchors), BLOCK, -1)
    found = {"anchors": anchors, "logits": logits.calls[0].view(shape)}
    places = anchors[:, None] + torch.arange(BLOCK)
    if kind is DSparkDraftModel:
        found["markov"] = model.markov_head.block_bias(
            prev_token_ids=ids[places], hidden_states=states.calls[0].view(shape)
        )
        found["confidence"] = confidence.calls[0].view(shape[:2])
    if kind is DFlash2DraftModel:
        previous = model._predecessor_ids(ids[None], places.flatten())
        candidates, scores = model.candidate_selector.select(logits.calls[0], states.calls[0], previous.view(1, -1))
        found |= {"candidates": candidates.view(shape), "scores": scores.view(shape)}
    used = {f"hidden.{layer}": hidden[f"hidden.{layer}"] for layer in model.target_layer_ids}
    # A block without any context never occurs.
    record(folder, {"input_ids": ids, **used, **{name: tensor[1:] for name, tensor in found.items()}})


@torch.no_grad()
def mtp(name: str, verifier: str) -> None:
    """Record a head taken from a target: `logits.0`, and `training.1`, `training.2` as training sees recursions.

    Each step of training is a pass of its own whose rows see each other and not those of earlier steps; engines keep
    the true rows instead, so that `logits.1` and `logits.2` are those of the target's own recording.
    """
    model = MTPDraftModel.from_training_args(
        AutoConfig.from_pretrained(verifier), num_speculative_steps=STEPS, verifier_name_or_path=verifier
    )
    folder = Path(name)
    model.save_pretrained(folder)
    theirs = load_file(f"{verifier}/recorded.safetensors")
    steps, _, _ = model.eval()(theirs["input_ids"][None], theirs["hidden.final"][None])
    found = {"logits.0": steps[0][0], **{f"training.{step}": steps[step][0] for step in range(1, STEPS)}}
    torch.testing.assert_close(found["logits.0"], theirs["logits.0"][: len(steps[0][0])], atol=1e-5, rtol=0)
    record(folder, {**{key: theirs[key] for key in ("input_ids", "hidden.final")}, **found})


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
    peagle("speculators_peagle", 21, target, layer(LlamaConfig, num_hidden_layers=2), reduced(21))
    two = {"num_hidden_layers": 2}
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "use_sliding_window": True}
    block(DFlashDraftModel, "speculators_dflash", 31, target, layer(Qwen3Config, **two), reduced(31))
    block(DFlashDraftModel, "speculators_dflash_whole", 32, target, layer(Qwen3Config, **two), whole(),
          target_layer_ids=[1, 8])  # fmt: skip
    block(DFlashDraftModel, "speculators_dflash_sliding", 33, target, layer(Qwen3Config, **two, **sliding), reduced(33))
    block(DSparkDraftModel, "speculators_dspark", 34, target, layer(Qwen3Config), reduced(34), markov_rank=8)
    block(DFlash2DraftModel, "speculators_dflash2", 35, target, layer(Qwen3Config, **two), whole(),
          conv_group_size=4, selector_rank=8, selector_top_k=6)  # fmt: skip
    mtp("speculators_mtp", "qwen3_5_mtp")  # from `with_transformers.py`


if __name__ == "__main__":
    main()
