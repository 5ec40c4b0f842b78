"""A small hybrid model for tests and figures: Qwen 3.5's text architecture, about 4M parameters.

Three of four layers are recurrent (gated delta rule). The model has the embedded model's tokenizer, and begins with its
embeddings and feed-forward layers. It learns the embedded model's probabilities on the texts of its training sets. An
hour on two cores is enough; a stopped run resumes:

    python recipes/hybrid_chat.py --data FOLDER_OF_JSONL --out chat-hybrid --minutes 60
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

import draftree
from draftree.models import encode_prompt

SETS = (
    *("e2e", "sgd_chat", "gsm8k", "wikisql", "tldr_shell", "py_functions", "leetcode_py", "squad", "fairytaleqa"),
    *("wikisplit", "scitldr", "tm4_coffee", "policyqa"),
)
WARM_UP = 100  # steps


def read(folder: Path, tokenizer: object) -> np.ndarray:
    """Return the token ids of all texts in a random order, uint16 [n]."""
    texts = []
    for name in SETS:
        for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            answer = tokenizer(row["response"].strip(), add_special_tokens=False)["input_ids"]
            texts.append([*encode_prompt(tokenizer, row["prompt"].strip()), *answer, tokenizer.eos_token_id])
    order = np.random.default_rng(0).permutation(len(texts))
    return np.fromiter((token for i in order for token in texts[i]), dtype=np.uint16)


def begin(base: AutoModelForCausalLM) -> AutoModelForCausalLM:
    """Return an untrained hybrid model with the embeddings and feed-forward layers of `base`."""
    theirs = base.config
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "max_position_embeddings", "bos_token_id", "eos_token_id")
    config = Qwen3_5TextConfig(
        **{name: getattr(theirs, name) for name in (*names, "pad_token_id")},
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.get_input_embeddings().load_state_dict(base.get_input_embeddings().state_dict())
    for layer, other in zip(model.get_decoder().layers, base.get_decoder().layers, strict=True):
        layer.mlp.load_state_dict(other.mlp.state_dict())
    return model


def loss_of(model: torch.nn.Module, base: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Return the cross entropy of the model's next tokens against the base model's probabilities."""
    with torch.no_grad():
        wanted = base(input_ids=tokens, use_cache=False).logits.softmax(-1)
    found = model(input_ids=tokens, use_cache=False).logits.log_softmax(-1)
    return -(wanted * found).sum(-1).mean()


def main() -> None:
    """Train, save and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with NAME.jsonl of each set")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60, help="of the whole schedule, over all runs")
    parser.add_argument("--batch", type=int, default=16, help="texts of a step")
    parser.add_argument("--block", type=int, default=256, help="tokens of a text")
    parser.add_argument("--rate", type=float, default=2e-3)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    base, tokenizer = draftree.demo_model()
    texts = read(options.data, tokenizer)
    model = begin(base)
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    rest = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    state, step, used = options.out / "state.pt", 0, 0.0
    if state.exists():
        held = torch.load(state, weights_only=True)
        model.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])
        step, used = held["step"], held["used"]

    def save() -> None:
        held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "used": used}
        torch.save(held, state)

    generator, losses = np.random.default_rng(step + 1), []
    began, saved = time.monotonic() - used, time.monotonic()
    while used < 60 * options.minutes:
        part = min(1.0, used / (60 * options.minutes))
        rate = options.rate * min(1, (step + 1) / WARM_UP) * (0.05 + 0.475 * (1 + math.cos(math.pi * part)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = generator.integers(0, len(texts) - options.block, options.batch)
        rows = np.stack([texts[i : i + options.block] for i in starts]).astype(np.int64)
        loss = loss_of(model, base, torch.from_numpy(rows))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step, used = step + 1, time.monotonic() - began
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step}, loss {np.mean(losses[-20:]):.3f}, {used / 60:.1f} minutes", flush=True)
        if time.monotonic() - saved > 240:
            save()
            saved = time.monotonic()
    save()
    model.half().save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    report = {"steps": step, "tokens": step * options.batch * options.block, "minutes": used / 60}
    report |= {"loss": float(np.mean(losses[-50:])), "parameters": model.num_parameters(), "sets": SETS}
    (options.out / "recipe.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
