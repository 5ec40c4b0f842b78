"""A batch of requests that start together, as Hugging Face's `generate` has it: streamers and padded output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from draftree.engine.config import EngineConfig
from draftree.engine.engine import Engine
from draftree.engine.limits import as_seed, check_mask
from draftree.engine.request import Emitted, SamplingParams
from draftree.engine.stats import RunStats
from draftree.errors import given_as

MOST_SLOTS = 64  # larger batches queue, so that the cache stays bounded
MOST_COLUMNS = 1 << 15  # of the cache to begin with, all slots together; it grows with what is really needed


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a batch."""

    prompt: list[int]  # token ids
    params: SamplingParams  # of the request
    padded_prompt: Tensor  # LongTensor [1, L], what logits processors and streamers see as the prompt
    # encoder_input, encoder_states: see `Engine.add`.
    encoder_input: Tensor | None = None
    encoder_states: Tensor | None = None


def real_tokens(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The prompts [batch, length] without what their mask hides.

    Raises:
        ValueError: a mask of another shape, a prompt that is all padding, or tokens between others are hidden.
    """
    check_mask(input_ids, attention_mask)
    if not input_ids.shape[1]:
        raise ValueError("The prompt is empty: give at least one token (the tokenizer's BOS, say).")
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    prompts = [row[keep].tolist() for row, keep in zip(input_ids, real, strict=True)]
    if not all(prompts):
        raise ValueError(
            "A prompt of the batch is all padding: give every row at least one token, and a mask if that is the pad "
            "token."
        )
    begins = real & ~pad(real[:, :-1], (1, 0))  # of the stretches of real tokens in a row
    if bool((begins.sum(1) > 1).any()):  # families read what is hidden between two of them differently
        raise ValueError(
            "Tokens in the midst of a prompt are hidden, by attention_mask or, without one, as pad tokens: leave them "
            "out of input_ids, or give a mask that shows them."
        )
    return prompts


def seeds_of(sample: bool | None, seed: Any, count: int) -> list[int | None]:
    """A seed for each of `count` requests; None where nothing is drawn, or by torch's default generator.

    Raises:
        TypeError, ValueError: a seed that is no whole number, or one of more than 64 bits.
    """
    seed = None if seed is None else as_seed(seed)
    if not sample or (seed is None and count == 1):
        return [None] * count
    if seed is None:
        seed = int(torch.randint(0, 2**31, (1,), device="cpu"))
    return [(seed + b) % 2**64 for b in range(count)]  # as torch takes negative ones


def check_streamer(streamer: Any, count: int) -> None:
    """Refuse a streamer that cannot follow a batch of `count` requests; None is none.

    Raises:
        TypeError: what is no streamer of Hugging Face's.
        ValueError: several requests.
    """
    if streamer is None:
        return
    if not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(f"streamer is {given_as(streamer)}: pass one of Hugging Face's, such as TextStreamer.")
    if count > 1:
        raise ValueError("A streamer follows one text: call generate with a batch of 1.")


@contextmanager
def ended(streamer: Any) -> Iterator[None]:
    """A context at whose end a streamer is ended, also by an error: whoever reads from it must not wait for ever."""
    try:
        yield
    except BaseException:
        with suppress(Exception):  # of a streamer that is none, or that fails itself: the first error is told
            streamer.end()
        raise
    if streamer is not None:
        streamer.end()


def run_batch(
    model: Any,
    config: EngineConfig,
    rows: list[Row],
    input_ids: Tensor,
    pad_token_id: int,
    streamer: Any,
    *,
    prompt_streamed: bool = False,
) -> tuple[Tensor, RunStats]:
    """Answer `rows` on an engine of their own; return LongTensor [batch, prompt + new] and their statistics.

    Args:
        model: whose weights have been compared with those of the config's runner just now.
        config: of the engine, but for its size.
        rows: one for each request.
        input_ids: LongTensor [batch, prompt], their prompts as the caller has them.
        pad_token_id: fills the ends of short rows.
        streamer: gets the prompt and every new token; None for none.
        prompt_streamed: whether the streamer has got the prompt already.

    Raises:
        Exception: the first error that ended one of the requests.
    """

    def put(emitted: Emitted) -> None:
        streamer.put(torch.tensor([emitted.token], dtype=torch.long, device="cpu"))

    length = max(len(row.prompt) + row.params.max_new_tokens for row in rows) + 64
    slots = min(len(rows), MOST_SLOTS)
    capacity = min(length, MOST_COLUMNS // slots)
    with Engine(model, replace(config, slots=slots, capacity=capacity, closed=True)) as engine:
        requests = []
        for row in rows:
            if streamer is not None and not prompt_streamed:
                streamer.put(row.padded_prompt.cpu())
            requests.append(
                engine.add(
                    row.prompt,
                    row.params,
                    padded_prompt=row.padded_prompt,
                    encoder_input=row.encoder_input,
                    encoder_states=row.encoder_states,
                    on_token=None if streamer is None else put,
                )
            )
        engine.run()
        stats = RunStats([request.stats for request in requests], engine.runner.name)
    for request in requests:
        if request.error is not None:
            raise request.error
    new = [torch.tensor(request.tokens, dtype=torch.long, device="cpu") for request in requests]
    answers = pad_sequence(new, batch_first=True, padding_value=pad_token_id)
    return torch.cat([input_ids, answers.to(input_ids.device)], 1), stats
