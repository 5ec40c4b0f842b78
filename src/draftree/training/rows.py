"""Training rows: reading the data sets that `make_data` wrote, splitting off a dev part, putting rows into batches.

A row is a prompt and the model's own greedy answer, as token ids. Split points are the places from which something is
drafted: the prompt's last token and the answer's, as long as two more tokens follow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from draftree.drafting.folder import model_hash
from draftree.engine.limits import decoder_start
from draftree.errors import brief
from draftree.prompts import jsonl_rows
from draftree.runner.target import Target
from draftree.training.journal import META, ROWS, read_meta

DEV_OF = 20  # one row in so many is kept for the dev set
POOL = 32  # batches among whose rows like lengths are sought


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt and its answer."""

    tokens: tuple[int, ...]  # prompt and answer ids; for encoder-decoders the decoder's
    start: int  # where the answer begins in them
    source: tuple[int, ...] = ()  # what the encoder reads; empty for decoder-only models

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Data:
    """What to train on and what to report on, and the data set's own words about itself."""

    train: list[Row]  # rows to train on
    dev: list[Row]  # rows to report on
    about: dict[str, Any]  # of the data set: model, template, counts
    left_out: int  # rows longer than `max_length`, or with answers too short to draft in


def spread(rows: Sequence[Row], count: int) -> list[Row]:
    """At most so many rows, evenly over all, as those of one set may stand together."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def read_data(folder: Path, target: Target, max_length: int | None = None) -> Data:
    """Rows of a data set that `draftree train data` made with `target`'s model.

    Args:
        folder: the data set.
        target: the model to train for.
        max_length: leave out rows with more tokens; None takes all that the context holds.

    Raises:
        ValueError: no finished data set, one of another model, rows without answers or beyond the context, or too few.
    """
    if not (folder / META).is_file():
        raise ValueError(f"{str(folder)!r} is no data set: make one with draftree train data.")
    about = read_meta(folder)
    if not about["complete"]:
        raise ValueError(f"The data set {str(folder)!r} is unfinished: run the draftree train data of it again.")
    made_by = about.get("model")
    if not isinstance(made_by, dict) or made_by.get("hash") != model_hash(target.model):
        name = brief(made_by.get("name")) if isinstance(made_by, dict) else "another model"
        raise ValueError(
            f"The data set {str(folder)!r} was made by {name!r} with other weights (or another dtype)"
            " than this model's: make data with this model, for a drafter must draft what it writes."
        )
    train: list[Row] = []
    dev: list[Row] = []
    left_out = 0
    for number, entry in enumerate(_entries(folder), 1):
        row = _row(entry, f"Row {number} of {str(folder)!r}", target)
        if len(row) - row.start < 2 or (max_length is not None and len(row) > max_length):
            left_out += 1
        else:
            (dev if kept_out(str(entry.get("set")), str(entry.get("id"))) else train).append(row)
    if not train or not dev:
        raise ValueError(
            f"{str(folder)!r} leaves {len(train)} rows to train on and {len(dev)} to report on, after {left_out} were "
            "left out as too long or too short: make more data, or raise --max-length."
        )
    kept = {key: value for key, value in about.items() if key != "complete"}
    return Data(train, dev, kept, left_out)


def _entries(folder: Path) -> Iterable[dict[str, Any]]:
    path = folder / ROWS
    if not path.exists():
        raise ValueError(f"The data set {str(folder)!r} has no {path.name}: make it again.")
    for _, entry in jsonl_rows(path):
        yield entry


def _row(entry: dict[str, Any], where: str, target: Target) -> Row:
    prompt, answer = entry.get("prompt_ids"), entry.get("answer_ids")
    if not prompt or not answer:
        raise ValueError(
            f"{where} has no {'answer' if prompt else 'prompt'}: let the model answer its questions with draftree "
            "train data."
        )
    for ids in (prompt, answer):
        outside = [ids]
        if isinstance(ids, Sequence):
            outside = [token for token in ids if type(token) is not int or not 0 <= token < target.vocab_size]
        if outside:
            raise ValueError(
                f"{where} holds token {brief(repr(outside[0]))}, outside the model's vocabulary: make the data anew "
                "with this model."
            )
    source: tuple[int, ...] = ()
    if target.encoder_decoder:
        source, prompt = tuple(prompt), [decoder_start(target.model.generation_config)]
    limit, length = target.max_positions, max(len(prompt) + len(answer), len(source))
    if limit is not None and length > limit:
        raise ValueError(
            f"{where} has {length} tokens and the model's context is {limit}: make the data anew with this model."
        )
    return Row((*prompt, *answer), len(prompt), source)


def kept_out(question_set: str, name: str) -> bool:
    """Whether the question `name` of a set belongs to the dev part."""
    digest = hashlib.sha256(f"{question_set} {name}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % DEV_OF == 0


@dataclass(slots=True)
class Batch:
    """Rows side by side, padded behind; every tensor is on the same device."""

    tokens: Tensor  # LongTensor [B, T]
    length: Tensor  # LongTensor [B], real tokens of each row
    start: Tensor  # LongTensor [B], where answers begin
    splits: Tensor  # LongTensor [B, S], split points (token indices), padded with the last one
    real: Tensor  # BoolTensor [B, S], which of them are no padding
    source: Tensor | None = None  # LongTensor [B, E], what an encoder reads, or None
    source_length: Tensor | None = None  # LongTensor [B], or None

    def truth(self, ahead: int) -> tuple[Tensor, Tensor]:
        """The tokens `ahead` places after the split points [B, S], and where there is one [B, S]."""
        index = self.splits + ahead
        there = self.real & (index < self.length[:, None])
        return self.tokens.gather(1, index.clamp(max=self.tokens.shape[1] - 1)), there


class RowSet(Dataset[tuple[Row, int | None]]):
    """Rows by key, as samplers name them: key = epoch * rows + row, so that a row knows its epoch.

    For training they get `windows`: the seed of a split window, another in every epoch.
    """

    def __init__(self, rows: Sequence[Row], *, windows: bool) -> None:
        self.rows, self.windows = rows, windows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: int) -> tuple[Row, int | None]:
        return self.rows[key % len(self.rows)], key if self.windows else None


class ByLength(Sampler[int]):
    """Every row once an epoch, those of like length near each other, so that batches hold little padding."""

    def __init__(self, rows: Sequence[Row], batch: int, seed: int) -> None:
        self.lengths = torch.tensor([len(row) for row in rows], dtype=torch.long, device="cpu")
        self.batch, self.seed, self.epoch = batch, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of another epoch; the same order for the same epoch, also after a resume."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator, device="cpu")
        pools = [pool[self.lengths[pool].argsort()] for pool in order.split(self.batch * POOL)]
        batches = [batch for pool in pools for batch in pool.split(self.batch)]
        # A batch that is not full stays last, where data loaders expect it.
        whole = len(batches) - (len(order) % self.batch > 0)
        for b in [*torch.randperm(whole, generator=generator, device="cpu").tolist(), *range(whole, len(batches))]:
            yield from (self.epoch * len(order) + i for i in batches[b].tolist())


def collate(picked: Sequence[tuple[Row, int | None]], most: int | None, nearest: int = 2) -> dict[str, Tensor]:
    """A batch as keyword arguments of `Batch`.

    Args:
        picked: rows and the seeds of their split windows; without a seed the window begins where the answer does.
        most: consecutive split points of a row, packed into one pass (BiTA: 64); None for all.
        nearest: places from a split point to the first token that is predicted there, which every one must have: 2
            behind a model that predicts the next one itself.
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
    batch = {
        "tokens": _pad([torch.tensor(row.tokens, dtype=torch.long, device="cpu") for row in rows]),
        "length": torch.tensor([len(row) for row in rows], dtype=torch.long, device="cpu"),
        "start": torch.tensor([row.start for row in rows], dtype=torch.long, device="cpu"),
        "splits": torch.stack([_stretch(s, max(map(len, splits))) for s in splits]),
        "real": _pad([torch.ones(len(s), dtype=torch.bool, device="cpu") for s in splits]),
    }
    if rows[0].source:
        batch["source"] = _pad([torch.tensor(row.source, dtype=torch.long, device="cpu") for row in rows])
        batch["source_length"] = torch.tensor([len(row.source) for row in rows], dtype=torch.long, device="cpu")
    return batch


def _pad(parts: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def _stretch(part: Tensor, count: int) -> Tensor:
    return torch.cat([part, part[-1:].expand(count - len(part))])
