"""A llama of 16 layers and 20M parameters for the papers' tables: deeper than the embedded model, and trained on.

What drafters inside the model can know depends on how deep and how good the model is. From scratch a model of this
size takes more than a day of two CPU cores. So it begins as the embedded model inflated (`benchmarks.inflate`): it says
the same, its new heads, MLP units and layers are random where they read and zero where they write. Then all of it is
trained on the embedded model's own training sets, and the new parts are put to use. What is stored is an ordinary
llama.

    python -m recipes.deeper_base --data ../shared/data/train --dev ../shared/data/dev --out deeper --minutes 45

A run that was stopped goes on from its last checkpoint when started again; the schedule spans all of `--minutes`. The
losses of both models on the answers of the dev sets are written beside the result, in recipe.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

import draftree
from benchmarks.inflate import inflate
from benchmarks.inflate.sizes import Size
from recipes.translation_pair import bfloat16_is_fast

LAYERS, HIDDEN, HEADS, KV_HEADS, UNITS = 16, 320, 8, 4, 768
LEFT_OUT = ("multi30k", "ntrex_deen", "mbpp")  # as in the training of the embedded model
BLOCK = 256  # tokens of a training row, packed from texts
CHECKPOINT_EVERY = 240.0  # seconds
LONGEST = 512  # tokens of a dev text


def text_of(row: dict[str, Any]) -> tuple[str, str]:
    """Prompt in the embedded model's format, and answer; a row that is a text alone has no prompt."""
    if "text" in row:
        if not isinstance(row["text"], str):
            raise TypeError("a text is a string")
        return "", row["text"]
    return f"<|user|>\n{row['prompt'].strip()}\n<|assistant|>\n", row["response"].strip()


def rows_of(folder: Path, most: int | None = None) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Set by set the texts of a folder of JSON lines.

    Raises:
        ValueError: a line that is no text, and no prompt with its response.
    """
    for path in sorted(folder.glob("*.jsonl")):
        if path.stem in LEFT_OUT:
            continue
        rows = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[:most], 1):
            try:
                rows.append(text_of(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(
                    f'line {number} of {path} is no row: write {{"text": ...}} or {{"prompt": ..., "response": ...}}'
                ) from None
        yield path.stem, rows


def packed(folder: Path, tokenizer: Any) -> Tensor:
    """All texts in a random order, one behind the other, as one LongTensor of token ids.

    Raises:
        ValueError: fewer tokens than a row to train on has.
    """
    texts = []
    for _, rows in rows_of(folder):
        for ids in tokenizer([prompt + answer for prompt, answer in rows], add_special_tokens=False)["input_ids"]:
            if len(ids) + 2 <= 4 * BLOCK:
                texts.append([tokenizer.bos_token_id, *ids, tokenizer.eos_token_id])
    order = np.random.default_rng(1).permutation(len(texts))
    if sum(map(len, texts)) < BLOCK + 2:
        raise ValueError(f"the texts in {folder} have fewer than {BLOCK + 2} tokens together: give more of them")
    return torch.from_numpy(np.fromiter((t for i in order for t in texts[i]), dtype=np.int16)).long()


@torch.no_grad()
def answer_losses(model: Any, tokenizer: Any, folder: Path, each: int) -> dict[str, float]:
    """Cross entropy of the answers' tokens, in nats, over the first `each` rows of every dev set, and over all."""
    total, count, losses = 0.0, 0, {}
    for name, rows in rows_of(folder, each):
        of_set, tokens = 0.0, 0
        for prompt, answer in rows:
            head = [tokenizer.bos_token_id, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
            tail = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            if len(head) + len(tail) <= LONGEST:
                ids = torch.tensor([head + tail])
                logits = model(ids, use_cache=False).logits[0, len(head) - 1 : -1]
                of_set += float(cross_entropy(logits.float(), ids[0, len(head) :], reduction="sum"))
                tokens += len(tail)
        if tokens:
            losses[name] = round(of_set / tokens, 3)
            total, count = total + of_set, count + tokens
    return {"all": round(total / max(count, 1), 3), **losses}


def start(small: Any) -> LlamaForCausalLM:
    """The embedded model, inflated, as a model that knows nothing of it."""
    size = Size(HIDDEN, LAYERS, HEADS, KV_HEADS, small.config.head_dim, UNITS, small.config.vocab_size)
    model: LlamaForCausalLM = inflate(small, shape=size, dtype=torch.float32)
    del model.config.inflated_from  # the package's drafters fit it no longer once it is trained
    return model


def rate_at(share: float, step: int, peak: float) -> float:
    """The learning rate after this share of the time: a hundred steps up, then a cosine down to a twentieth."""
    return peak * min(1.0, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """Cross entropy of every token of `ids` [rows, tokens] but the first, in nats."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16_is_fast()):
        logits = model(ids[:, :-1], use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def fit(model: Any, tokens: Tensor, options: argparse.Namespace) -> dict[str, float]:
    """Train all weights in place for `options.minutes`, with a checkpoint every few."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.95), fused=True)
    kept, step, before, average = options.out / "state.pt", 0, 0.0, 0.0
    if kept.exists():
        state = torch.load(kept, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, before, average = state["step"], state["seconds"], state["loss"]

    def save(seconds: float) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "step": step, "seconds": seconds, "loss": average}, kept.with_suffix(".new"))
        kept.with_suffix(".new").replace(kept)

    model.train()
    began = saved = time.monotonic()
    whole = 60 * options.minutes
    while (used := before + time.monotonic() - began) < whole:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(used / whole, step, options.rate)
        at = np.random.default_rng([2, step]).integers(0, len(tokens) - BLOCK - 1, options.batch)
        ids = torch.stack([tokens[i : i + BLOCK + 1] for i in at])
        loss = loss_of(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average += (loss.item() - average) / min(step + 1, 50)
        step += 1
        if step % 20 == 0:
            print(f"step {step}, loss {average:.3f}, {used / 60:.1f} of {options.minutes:g} min", flush=True)
        if time.monotonic() - saved > CHECKPOINT_EVERY:
            save(used)
            saved = time.monotonic()
    save(used)
    model.eval()
    return {"steps": step, "tokens": step * options.batch * BLOCK, "minutes": round(used / 60, 1), "loss": average}


def main() -> None:
    """Grow, train, measure both models on the dev sets, and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of training sets, JSON lines")
    parser.add_argument("--dev", type=Path, required=True, help="folder of dev sets, JSON lines")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and its checkpoints")
    parser.add_argument("--minutes", type=float, default=45.0, help="of training, all runs together")
    parser.add_argument("--batch", type=int, default=8, help=f"rows of {BLOCK} tokens")
    parser.add_argument("--rate", type=float, default=8e-4, help="peak learning rate")
    parser.add_argument("--dev-rows", type=int, default=12, help="rows of each dev set to measure on")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    small, tokenizer = draftree.demo_model()
    try:
        for folder in (options.data, options.dev):
            if not [name for name, _ in rows_of(folder)]:
                raise ValueError(f"there are no sets of texts (*.jsonl) in {folder}: name a folder that has some")
        tokens = packed(options.data, tokenizer)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    options.out.mkdir(parents=True, exist_ok=True)
    before = answer_losses(small, tokenizer, options.dev, options.dev_rows)
    model = start(small)
    trained = fit(model, tokens, options)
    after = answer_losses(model, tokenizer, options.dev, options.dev_rows)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    report = {
        "parameters": sum(p.numel() for p in model.parameters()),
        **trained,
        "dev_loss_of_embedded": before,
        "dev_loss": after,
        "options": {k: v for k, v in vars(options).items() if k not in ("data", "dev", "out")},
    }
    (options.out / "recipe.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
