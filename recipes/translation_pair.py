"""A T5 pair that translates German captions to English: a large model and a small one, plain Hugging Face code.

Two models with one vocabulary are what BiLD and speculative decoding need, and no public pair is small enough to be
measured on two CPU cores. The large model is deep rather than wide, because there a step costs by its layers: 13M
parameters, 3 encoder and 10 decoder layers. The small one has 1.3M parameters, 3 encoder and 2 decoder layers; a step
of it is mostly its head. Both learn from the references alone:

    python recipes/translation_pair.py --size large --data train.jsonl --dev dev.jsonl --out pair --minutes 60
    python recipes/translation_pair.py --size small --data train.jsonl --dev dev.jsonl --out pair --minutes 12

Then the small model learns all that the large one says to the training inputs, at a high rate first and a low one last:

    draftree train align --model pair/large --small pair/small --data train.jsonl --field de --max-new-tokens 80 \
        --epochs 4 --batch 64 --learning-rate 1e-3 --bf16 --out first
    draftree train align --model pair/large --small first --data first/answers --max-new-tokens 80 \
        --epochs 2 --batch 64 --learning-rate 2e-4 --bf16 --out aligned

Rows are {"de": ..., "en": ...}, those of multi30k or of your own. The tokenizer is made by the first run, the second
takes it from the same folder. A run that was stopped goes on from its last checkpoint when started again. Time is the
process's own, on one thread, so that a busy machine takes longer but trains as much. Nothing here needs draftree.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from sacrebleu.metrics import BLEU
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"  # T5's, with T5's ids 0, 1 and 2
SIZES = {
    "large": {"d_model": 256, "d_kv": 64, "d_ff": 768, "num_layers": 3, "num_decoder_layers": 10, "num_heads": 4},
    "small": {"d_model": 96, "d_kv": 32, "d_ff": 256, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 3},
}
DROPOUT = {"large": 0.1, "small": 0.0}  # the small model is too small to learn anything by heart
LONGEST = 80  # tokens of a sentence that is trained on
LEAST_SIZE = 0.01  # of a tensor, as its learning rate sees it
STEP = 4  # lengths are rounded up to a multiple of it
CHECKPOINT_EVERY = 120.0  # seconds

Pair = tuple[list[int], list[int]]  # token ids of a German and an English sentence, each with its </s>


def tokenizer_of(folder: Path, rows: list[dict[str, str]], vocabulary: int) -> PreTrainedTokenizerFast:
    """The folder's tokenizer: byte pairs over both languages, made from the rows where there is none yet."""
    if not folder.exists():
        tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
        # Punctuation apart: else half the vocabulary goes to words with their full stops.
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation("isolated")]
        )
        tokenizer.decoder = decoders.Metaspace()
        specials = [PAD, END, UNKNOWN]
        trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=specials, show_progress=False)
        tokenizer.train_from_iterator((row[side] for row in rows for side in ("de", "en")), trainer)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {END}", special_tokens=[(END, specials.index(END))]
        )
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN
        ).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def batches(pairs: list[Pair], tokens: int, shuffle: random.Random) -> list[list[Pair]]:
    """One epoch: batches of sentences of about equal length, at most `tokens` target tokens each."""
    order = sorted(pairs, key=lambda pair: (-(-len(pair[1]) // STEP), len(pair[0]) + shuffle.random() * STEP))
    groups: list[list[Pair]] = []
    for width, of_width in itertools.groupby(order, key=lambda pair: -(-len(pair[1]) // STEP) * STEP):
        rows, count = list(of_width), max(tokens // width, 1)
        groups += [rows[at : at + count] for at in range(0, len(rows), count)]
    shuffle.shuffle(groups)
    return groups


def padded(sentences: list[list[int]], value: int) -> Tensor:
    """LongTensor [sentences, longest], the longest rounded up.

    Products of few different shapes are fast: for a new one the CPU's library first makes a kernel.
    """
    width = -(-max(map(len, sentences)) // STEP) * STEP
    return torch.tensor([s + [value] * (width - len(s)) for s in sentences])


class SentenceDropout(nn.Dropout):
    """Dropout with one mask for all tokens of a sentence: drawing one for each took a quarter of the time."""

    def forward(self, x: Tensor) -> Tensor:  # [sentences, tokens, units]
        if not self.training or not self.p:
            return x
        keep = torch.rand(x.shape[0], 1, x.shape[2]) >= self.p
        return x * (keep / (1 - self.p)).to(x.dtype)


@functools.cache
def bfloat16_is_fast() -> bool:
    """Whether this machine multiplies bfloat16 faster than float32.

    A CPU with instructions for it does, twice; one without takes ten times as long, and would learn nothing.
    """
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.ones(1024, 256, dtype=dtype), torch.ones(256, 256, dtype=dtype)
        times = []
        for _ in range(4):
            begin = time.perf_counter()
            x @ weight
            times.append(time.perf_counter() - begin)
        seconds[dtype] = min(times)
    return seconds[torch.bfloat16] < seconds[torch.float32]


def loss_of(model: T5ForConditionalGeneration, group: list[Pair], smoothing: float) -> Tensor:
    """Cross entropy of the English tokens."""
    german, english = padded([g for g, _ in group], 0), padded([e for _, e in group], -100)
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16_is_fast()):
        logits = model(input_ids=german, attention_mask=(german != 0).long(), labels=english, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), english.flatten(), ignore_index=-100, label_smoothing=smoothing
    )


@torch.no_grad()
def bleu(model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]) -> float:
    """BLEU of the greedy translations, by sacrebleu."""
    answers = []
    for at in range(0, len(rows), 50):
        german = tokenizer([row["de"] for row in rows[at : at + 50]], padding=True, return_tensors="pt")
        out = model.generate(
            input_ids=german["input_ids"], attention_mask=german["attention_mask"], max_new_tokens=LONGEST
        )
        answers += tokenizer.batch_decode(out, skip_special_tokens=True)
    return round(BLEU().corpus_score(answers, [[row["en"] for row in rows]]).score, 2)


def untrained(size: str, dropout: float, tokenizer: PreTrainedTokenizerFast) -> T5ForConditionalGeneration:
    """A model of the wanted size: T5's own architecture and start."""
    config = T5Config(
        vocab_size=len(tokenizer),
        dropout_rate=dropout,
        decoder_start_token_id=tokenizer.pad_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
        decoder_layers=SIZES[size]["num_decoder_layers"],  # where `generate` looks for the depth of its cache
        **SIZES[size],
    )
    model = T5ForConditionalGeneration(config)
    for module in list(model.modules()):
        if isinstance(module, T5Attention):
            module.dropout = 0.0
        for name, part in module.named_children():
            if type(part) is nn.Dropout:
                setattr(module, name, SentenceDropout(part.p))
    for block in model.decoder.block[1:-1]:
        for name, weight in block.named_parameters():
            if name.endswith((".o.weight", ".wo.weight")):  # what is added to the stream: nothing yet
                nn.init.zeros_(weight)
    return model


def optimizer_of(model: T5ForConditionalGeneration) -> torch.optim.AdamW:
    """AdamW with a group for each tensor, as each has a learning rate of its own (see `set_rates`)."""
    groups = [{"params": [p], "weight_decay": 0.01 if p.dim() > 1 else 0.0} for p in model.parameters()]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98))


def set_rates(optimizer: torch.optim.AdamW, rate: float) -> None:
    """Have every tensor move in proportion to its size.

    T5 starts with queries a hundred times smaller than its embedding, in place of scaled products; at one rate for all,
    attention saturates before it has learned where to look, and the model never does.
    """
    for part in optimizer.param_groups:
        size = float(part["params"][0].detach().square().mean().sqrt())
        part["lr"] = rate * max(size, LEAST_SIZE)


def endless(pairs: list[Pair], options: argparse.Namespace, done: int) -> Iterator[list[Pair]]:
    """Batches without end, from batch `done` of the same sequence on."""
    shuffle = random.Random(options.seed)
    while True:
        for group in batches(pairs, options.tokens, shuffle):
            if done:
                done -= 1
            else:
                yield group


def take_layers(model: T5ForConditionalGeneration, layers: list[nn.Module], shallow: bool) -> None:
    """Have all of the decoder's layers take part, or the first (which knows positions) and the last alone."""
    ends = [layers[0], layers[-1]] if shallow and len(layers) > 2 else layers
    model.decoder.block = nn.ModuleList(ends)


def train(model: T5ForConditionalGeneration, pairs: list[Pair], dev: list[Pair], options: argparse.Namespace) -> int:
    """Train for the time given, from the checkpoint where there is one; the number of steps."""
    optimizer = optimizer_of(model)
    checkpoint = options.out / options.size / "checkpoint.pt"
    step, before = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, before = state["step"], state["seconds"]
    layers = list(model.decoder.block)
    begin = saved = time.process_time()
    average = 0.0
    for group in endless(pairs, options, step):
        seconds = before + time.process_time() - begin
        share = seconds / (60 * options.minutes)
        if share >= 1:
            break
        warm = min((step + 1) / options.warm_up, 0.5 + 0.5 * math.cos(math.pi * share))
        set_rates(optimizer, options.rate * warm)
        # What a deep model learns first it learns as well, and three times as fast, with two decoder layers. The others
        # begin as identities, so nothing is lost when they join.
        take_layers(model, layers, share < options.shallow)
        optimizer.zero_grad()
        loss = loss_of(model, group, options.smoothing)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        average = loss.item() if not average else 0.99 * average + 0.01 * loss.item()
        if time.process_time() - saved > CHECKPOINT_EVERY:
            saved = time.process_time()
            take_layers(model, layers, False)
            model.eval()
            with torch.no_grad():
                held_out = sum(loss_of(model, [pair], 0.0).item() for pair in dev[:50]) / len(dev[:50])
            model.train()
            print(f"step {step}, {seconds / 60:.1f} min, loss {average:.3f}, held out {held_out:.3f}", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "seconds": seconds}
            torch.save(state, checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").replace(checkpoint)  # whole or not at all
    take_layers(model, layers, False)
    return step


def main() -> None:
    """Train one model of the pair, report its BLEU on the dev rows, and save it with the tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with de and en to train on")
    parser.add_argument("--dev", type=Path, required=True, help="JSON lines with de and en to report BLEU on")
    parser.add_argument("--out", type=Path, required=True, help="folder of the pair and its tokenizer")
    parser.add_argument("--minutes", type=float, default=60.0, help="of the processor's time")
    parser.add_argument("--vocabulary", type=int, default=8000, help="tokens, both languages together")
    parser.add_argument("--tokens", type=int, default=2048, help="of a batch")
    parser.add_argument("--rate", type=float, default=1.5e-2, help="peak learning rate of a tensor of size 1")
    parser.add_argument("--dropout", type=float)
    parser.add_argument("--warm-up", type=int, default=300, help="steps")
    parser.add_argument("--shallow", type=float, default=0.5, help="share of the time with two decoder layers")
    parser.add_argument("--smoothing", type=float, default=0.1, help="of the labels")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.dropout = DROPOUT[options.size] if options.dropout is None else options.dropout
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    folder = options.out / options.size
    folder.mkdir(parents=True, exist_ok=True)

    rows, held = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in (options.data, options.dev)
    )
    tokenizer = tokenizer_of(options.out / "tokenizer", rows, options.vocabulary)
    pairs, dev = (
        list(zip(*(tokenizer([row[side] for row in part])["input_ids"] for side in ("de", "en")), strict=True))
        for part in (rows, held)
    )
    pairs = [pair for pair in pairs if max(map(len, pair)) <= LONGEST]
    model = untrained(options.size, options.dropout, tokenizer).train()
    steps = train(model, pairs, dev, options)

    model.eval()
    report = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "sentences": len(pairs),
        "tokens": sum(len(english) for _, english in pairs),
        "steps": steps,
        "dev_bleu": bleu(model, tokenizer, held),
        "options": {k: v for k, v in vars(options).items() if not isinstance(v, Path)},
    }
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "recipe.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
