"""Read the rows of a data set, split off the dev rows, and put rows into batches.

A row is a prompt and the model's own greedy answer, as token ids. Its split points are the tokens after which a drafter
drafts: the prompt's last token and the answer's, as long as two more tokens follow.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler

from draftree.drafting.folder import model_hash
from draftree.engine.limits import decoder_start
from draftree.errors import brief
from draftree.prompts import jsonl_rows
from draftree.runner.target import Target
from draftree.training.answers import META, ROWS

DEV_OF = 20  # One row in this many is a dev row.
POOL = 32  # Rows of similar lengths are sought among the rows of this many batches.


@dataclass(frozen=True, slots=True)
class Row:
    """Hold one prompt and its answer."""

    tokens: tuple[int, ...]  # Prompt and answer; in encoder-decoders those of the decoder.
    start: int  # Index of the answer's first token.
    source: tuple[int, ...] = ()  # Tokens of the encoder; empty for decoder-only models.
    number: int = 0  # Its place in the data set.

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Data:
    """Hold the rows of a data set."""

    train: list[Row]
    dev: list[Row]
    about: dict[str, Any]  # Contents of meta.json: model, template, counts.
    left_out: int  # Rows longer than `max_length`, or with answers of fewer than two tokens.


def spread(rows: Sequence[Row], count: int) -> list[Row]:
    """Return at most `count` rows, evenly spaced: the rows of one question set may stand together."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def read_data(folder: Path, target: Target, max_length: int | None = None) -> Data:
    """Return the rows of a data set that `draftree train data` made with `target`'s model.

    Args:
        folder: the data set.
        target: the model to train for.
        max_length: leave out rows with more tokens; None for no limit.

    Raises:
        ValueError: not a finished data set, a data set of another model, or too few rows.
    """
    if not (folder / META).is_file():
        raise ValueError(f"{str(folder)!r} is no data set: make one with draftree train data.")
    about = json.loads((folder / META).read_text("utf-8"))
    if not about.pop("complete"):
        raise ValueError(f"The data set {str(folder)!r} is unfinished: run the draftree train data of it again.")
    if about["model"]["hash"] != model_hash(target.model):
        raise ValueError(
            f"The data set {str(folder)!r} was made by {brief(about['model']['name'])!r} with other weights (or "
            "another dtype) than this model's: make data with this model, for a drafter must draft its text."
        )
    train: list[Row] = []
    dev: list[Row] = []
    left_out = 0
    for number, (_, entry) in enumerate(jsonl_rows(folder / ROWS)):
        prompt, source = entry["prompt_ids"], ()
        if target.encoder_decoder:
            source, prompt = tuple(prompt), [decoder_start(target.model.generation_config)]
        row = Row((*prompt, *entry["answer_ids"]), len(prompt), source, number)
        if len(row) - row.start < 2 or (max_length is not None and len(row) > max_length):
            left_out += 1
        else:
            (dev if is_dev(entry["set"], entry["id"]) else train).append(row)
    if not train or not dev:
        raise ValueError(
            f"{str(folder)!r} leaves {len(train)} rows to train on and {len(dev)} to report on, after {left_out} were "
            "left out as too long or too short: make more data, or raise --max-length."
        )
    return Data(train, dev, about, left_out)


def is_dev(question_set: str, name: str) -> bool:
    """Return whether the question `name` of a set is a dev row."""
    digest = hashlib.sha256(f"{question_set} {name}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % DEV_OF == 0


@dataclass(slots=True)
class Batch:
    """Hold rows with padding at their ends; all tensors are on one device."""

    tokens: Tensor  # LongTensor [B, T].
    length: Tensor  # LongTensor [B], tokens of each row without padding.
    start: Tensor  # LongTensor [B], index of each answer's first token.
    splits: Tensor  # LongTensor [B, S], split points (token indices), padded with the last one.
    real: Tensor  # BoolTensor [B, S], False for padding.
    source: Tensor | None = None  # LongTensor [B, E], tokens of the encoder.
    source_length: Tensor | None = None  # LongTensor [B].
    number: Tensor | None = None  # LongTensor [B], places of the rows in the data set.

    def truth(self, ahead: int) -> tuple[Tensor, Tensor]:
        """Return the tokens `ahead` places after the split points [B, S], and a mask [B, S] of existing ones."""
        index = self.splits + ahead
        there = self.real & (index < self.length[:, None])
        return self.tokens.gather(1, index.clamp(max=self.tokens.shape[1] - 1)), there


class RowSet(Dataset[tuple[Row, int | None]]):
    """Return rows by key = epoch * rows + row; with `windows`, the key is the seed of the row's split window."""

    def __init__(self, rows: Sequence[Row], *, windows: bool) -> None:
        self.rows, self.windows = rows, windows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: int) -> tuple[Row, int | None]:
        return self.rows[key % len(self.rows)], key if self.windows else None


class ByLength(Sampler[int]):
    """Yield every row once an epoch, with rows of similar lengths in a batch, so that it has little padding."""

    def __init__(self, rows: Sequence[Row], batch: int, seed: int) -> None:
        self.lengths = _ints([len(row) for row in rows])
        self.batch, self.seed, self.epoch = batch, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Select the order of an epoch; it is the same after a resume."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator, device="cpu")
        pools = [pool[self.lengths[pool].argsort()] for pool in order.split(self.batch * POOL)]
        batches = [batch for pool in pools for batch in pool.split(self.batch)]
        # Data loaders expect a partial batch at the end.
        whole = len(batches) - (len(order) % self.batch > 0)
        for b in [*torch.randperm(whole, generator=generator, device="cpu").tolist(), *range(whole, len(batches))]:
            yield from (self.epoch * len(order) + i for i in batches[b].tolist())


def collate(picked: Sequence[tuple[Row, int | None]], most: int | None, nearest: int = 2) -> dict[str, Tensor]:
    """Return a batch as keyword arguments of `Batch`.

    Args:
        picked: rows and the seeds of their split windows; None for a window at the answer's first token.
        most: consecutive split points of a row in one pass (BiTA: 64); None for all.
        nearest: places from a split point to its first predicted token; 2 if the model itself predicts the next one.
    """
    splits = []
    rows = [row for row, _ in picked]
    for row, seed in picked:
        first, last = row.start - 1, len(row) - 1 - nearest
        count = last - first + 1
        if most is not None and count > most:
            if seed is not None:
                generator = torch.Generator().manual_seed(seed)
                first += int(torch.randint(count - most + 1, (1,), generator=generator, device="cpu"))
            count = most
        splits.append(torch.arange(first, first + count, device="cpu"))
    widest = max(map(len, splits))
    batch = {
        "tokens": _pad([row.tokens for row in rows]),
        "length": _ints([len(row) for row in rows]),
        "start": _ints([row.start for row in rows]),
        "splits": torch.stack([torch.cat([s, s[-1:].expand(widest - len(s))]) for s in splits]),
        "real": torch.arange(widest, device="cpu") < _ints([len(s) for s in splits])[:, None],
        "number": _ints([row.number for row in rows]),
    }
    if rows[0].source:
        batch["source"] = _pad([row.source for row in rows])
        batch["source_length"] = _ints([len(row.source) for row in rows])
    return batch


def _pad(parts: Sequence[Sequence[int]]) -> Tensor:
    return pad_sequence([_ints(part) for part in parts], batch_first=True)


def _ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device="cpu")
