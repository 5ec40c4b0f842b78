"""A small causal language model that drafts for the embedded one: about 0.6M parameters, plain Hugging Face code.

The small model learns what the large one says: its labels are the large model's greedy answers to the questions of the
training sets, and its targets beside them the large model's own probabilities on the same text (alignment). It has the
large model's tokenizer, and starts from the main directions of its embedding. One thread and half an hour are enough:

    draftree train data questions.jsonl --out answers
    python recipes/small_causal.py --data answers --out small

`--unaligned` trains on the text alone, to tell what the probabilities bring. With `--steps` two runs have the same
texts in the same order.

Nothing here needs draftree but the embedded model and its name; another pair needs another
`Auto...from_pretrained`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import draftree
from draftree.drafting.folder import base_of

BEST = 32  # of the large model's probabilities, what is kept of each position
LONGEST = 512  # tokens of a text; what lies before is cut off
DEV_EVERY = 40  # one row in so many is kept out of training


class Text(NamedTuple):
    """Prompt and answer, with what the large model thinks of them.

    Attributes:
        ids: LongTensor [n].
        answer: index of the answer's first token.
        tokens: int16 [n, BEST], the large model's best next tokens; [n, 1] where it was not asked: the text's own.
        logp: float16 [n, BEST] or [n, 1], their log-probabilities.
    """

    ids: Tensor
    answer: int
    tokens: Tensor
    logp: Tensor


def read(path: Path) -> list[tuple[Tensor, int]]:
    """Token ids of prompts and answers, and where answers begin."""
    texts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = row["prompt_ids"][-max(LONGEST - len(row["answer_ids"]), 1) :]
        texts.append((torch.tensor(prompt + row["answer_ids"]), len(prompt)))
    return texts


def batches(lengths: list[int], tokens: int, shuffle: random.Random | None) -> list[list[int]]:
    """Numbers of texts of about equal length, at most `tokens` tokens with their padding."""
    # A little noise in the lengths mixes neighbours differently in each epoch.
    noise = (lambda: shuffle.uniform(0, 16)) if shuffle else (lambda: 0.0)
    order = sorted(range(len(lengths)), key=lambda i: lengths[i] + noise())
    groups: list[list[int]] = [[]]
    for i in order:
        if groups[-1] and (len(groups[-1]) + 1) * lengths[i] > tokens:
            groups.append([])
        groups[-1].append(i)
    if shuffle:
        shuffle.shuffle(groups)
    return groups


@torch.no_grad()
def ask(large: LlamaForCausalLM, texts: list[tuple[Tensor, int]]) -> list[Text]:
    """What the large model thinks of all texts."""
    asked: dict[int, Text] = {}
    for group in batches([len(ids) for ids, _ in texts], 4096, None):
        padded = torch.nn.utils.rnn.pad_sequence([texts[i][0] for i in group], batch_first=True)
        best = large(padded).logits.log_softmax(-1).topk(BEST, -1)
        for row, i in enumerate(group):
            ids, answer = texts[i]
            n = len(ids)
            asked[i] = Text(ids, answer, best.indices[row, :n].short(), best.values[row, :n].half())
    return [asked[i] for i in range(len(texts))]


def unasked(texts: list[tuple[Tensor, int]]) -> list[Text]:
    """The text as its own teacher, sure of each next token: all that is learned is plain cross entropy."""
    # What the last token is followed by is never learned, so any token may stand there.
    return [Text(ids, at, ids.roll(-1)[:, None].short(), torch.zeros(len(ids), 1).half()) for ids, at in texts]


def start(large: LlamaForCausalLM, options: argparse.Namespace) -> LlamaForCausalLM:
    """An untrained small model; its embedding is the large one's in its main directions."""
    torch.manual_seed(options.seed)
    theirs = large.config
    config = LlamaConfig(
        vocab_size=theirs.vocab_size,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=1,
        head_dim=options.hidden // options.heads,
        intermediate_size=options.mlp,
        max_position_embeddings=theirs.max_position_embeddings,
        rms_norm_eps=theirs.rms_norm_eps,
        tie_word_embeddings=True,
        bos_token_id=theirs.bos_token_id,
        eos_token_id=theirs.eos_token_id,
        pad_token_id=theirs.pad_token_id,
    )
    small = LlamaForCausalLM(config)
    embedding = large.get_input_embeddings().weight.detach()
    _, _, directions = torch.linalg.svd(embedding, full_matrices=False)
    with torch.no_grad():
        small.get_input_embeddings().weight.copy_(embedding @ directions[: options.hidden].T)
    return small


def loss_of(small: LlamaForCausalLM, group: list[Text], options: argparse.Namespace) -> Tensor:
    """Cross entropy with the greedy answers, and with the large model's probabilities on answers and prompts."""
    ids = torch.nn.utils.rnn.pad_sequence([t.ids for t in group], batch_first=True)
    tokens = torch.nn.utils.rnn.pad_sequence([t.tokens for t in group], batch_first=True).long()
    p = torch.nn.utils.rnn.pad_sequence([t.logp.float() for t in group], batch_first=True, padding_value=-math.inf)
    place = torch.arange(ids.shape[1] - 1)
    length = torch.tensor([len(t.ids) for t in group])[:, None]
    speaks = (place >= torch.tensor([t.answer - 1 for t in group])[:, None]) & (place < length - 1)
    reads = (place < length - 1) & ~speaks
    logq = small(ids).logits[:, :-1].log_softmax(-1)
    soft = -(p[:, :-1].exp() * logq.gather(-1, tokens[:, :-1])).sum(-1)
    hard = -logq.gather(-1, ids[:, 1:, None])[..., 0]
    of_answers = (options.hard * hard + (1 - options.hard) * soft)[speaks].mean()
    return of_answers + options.prompt_weight * soft[reads].mean()


@torch.no_grad()
def agreement(small: LlamaForCausalLM, dev: list[Text]) -> dict[str, float]:
    """How often the answer's next token is the small model's first, or among its best few; perplexity of answers."""
    hits, count, surprise = torch.zeros(8), 0, 0.0
    for text in dev:
        logq = small(text.ids[None]).logits[0, text.answer - 1 : -1].log_softmax(-1)
        next_tokens = text.ids[text.answer :]
        hits += (logq.topk(8, -1).indices == next_tokens[:, None]).float().sum(0)
        surprise -= logq.gather(-1, next_tokens[:, None]).sum().item()
        count += len(next_tokens)
    share = (hits.cumsum(0) / count).tolist()
    shares = {f"top {k}": round(share[k - 1], 4) for k in (1, 2, 4, 8)}
    return shares | {"perplexity": round(math.exp(surprise / count), 2)}


def main() -> None:
    """Train, report what was reached on the rows kept out, and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that `draftree train data` wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--minutes", type=float, default=20.0, help="of training, what the large model takes aside")
    parser.add_argument("--steps", type=int, help="of training, instead of minutes")
    parser.add_argument("--unaligned", action="store_true", help="learn the text alone, without probabilities")
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--mlp", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096, help="of a batch")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--hard", type=float, default=0.5, help="weight of the greedy answers against probabilities")
    parser.add_argument("--prompt-weight", type=float, default=0.25, help="of prompts against answers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.steps is not None and options.steps < 1:
        parser.error("--steps must be 1 or more")
    torch.set_num_threads(1)
    large, _ = draftree.demo_model()
    rows = read(options.data / "rows.jsonl")
    texts = unasked(rows) if options.unaligned else ask(large, rows)
    dev, train = texts[DEV_EVERY - 1 :: DEV_EVERY], [t for i, t in enumerate(texts) if i % DEV_EVERY != DEV_EVERY - 1]
    small = start(large, options)
    shuffle = random.Random(options.seed)
    lengths = [len(t.ids) for t in train]

    steps = options.steps
    if steps is None:
        # How many fit into the time is found out by the first ones, whose work is then thrown away.
        trial = batches(lengths, options.tokens, random.Random(options.seed))[:8]
        begin = time.thread_time()
        for group in trial:
            loss_of(small, [train[i] for i in group], options).backward()
        steps = max(1, int(60 * options.minutes / ((time.thread_time() - begin) / len(trial))))
    optimizer = torch.optim.AdamW(small.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 30, steps)
    queue: list[list[int]] = []
    average = 0.0
    for step in range(steps):
        queue = queue or batches(lengths, options.tokens, shuffle)
        optimizer.zero_grad()
        loss = loss_of(small, [train[i] for i in queue.pop()], options)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(small.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        average += (loss.item() - average) / min(step + 1, 100)
        if (step + 1) % max(1, steps // 8) == 0:
            small.eval()
            print(f"step {step + 1} of {steps}, loss {average:.3f}, held out: {agreement(small, dev)}", flush=True)
            small.train()
    small.eval()
    report = {
        "base_model": asdict(base_of(large)),
        "parameters": sum(p.numel() for p in small.parameters()),
        "steps": steps,
        "seconds": round(time.thread_time()),
        "texts": len(train),
        "answer_tokens": sum(len(t.ids) - t.answer for t in train),
        "held_out": agreement(small, dev) | {"texts": len(dev)},
        "options": {k: v for k, v in vars(options).items() if k not in ("data", "out")},
    }
    small.half().save_pretrained(options.out)
    (options.out / "recipe.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
