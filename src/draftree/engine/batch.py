"""A batch of requests that start together, as Hugging Face's `generate` has it: streamers and padded output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftree.engine.config import EngineConfig
from draftree.engine.engine import Engine
from draftree.engine.limits import as_seed
from draftree.engine.request import Emitted, Request
from draftree.engine.stats import RunStats
from draftree.errors import given_as

MOST_SLOTS = 64  # larger batches queue, so that the cache stays bounded
MOST_COLUMNS = 1 << 14  # of the cache to begin with; it grows with what is really needed


def engine_for(model: Any, config: EngineConfig, count: int, length: int) -> Engine:
    """An engine for `count` requests of at most `length` tokens each, answers included, and no others.

    Its runner has been opened just now, when the weights were compared.
    """
    sized = replace(config, slots=min(count, MOST_SLOTS), capacity=min(length + 64, MOST_COLUMNS), closed=True)
    engine = Engine(model, sized)
    engine.compared = True
    return engine


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


def feed(streamer: Any, prompt: Tensor | None) -> Callable[[Emitted], None] | None:
    """Give a Hugging Face streamer the prompt [1, L], if any; return what hands it each new token (None without one).

    Raises:
        TypeError: what is no streamer.
    """
    if streamer is None:
        return None
    if not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(f"streamer is {given_as(streamer)}: pass one of Hugging Face's, such as TextStreamer.")
    if prompt is not None:
        streamer.put(prompt.cpu())
    return lambda emitted: streamer.put(torch.tensor([emitted.token], dtype=torch.long, device="cpu"))


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


def finish(engine: Engine, requests: list[Request], input_ids: Tensor, pad_token_id: int) -> tuple[Tensor, RunStats]:
    """Run `requests` to their ends; return LongTensor [batch, prompt + new] and their statistics.

    Raises:
        Exception: the first error that ended one of the requests.
    """
    with engine:
        engine.run()
    for request in requests:
        if request.error is not None:
            raise request.error
    longest = max(len(r.output) for r in requests)
    new = torch.full((len(requests), longest), pad_token_id, dtype=torch.long, device="cpu")
    for b, request in enumerate(requests):
        new[b, : len(request.output)] = torch.tensor(request.tokens, dtype=torch.long, device="cpu")
    return torch.cat([input_ids, new.to(input_ids.device)], 1), RunStats([r.stats for r in requests])
