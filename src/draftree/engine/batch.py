"""A batch of requests that start together, as Hugging Face's `generate` has it: streamers and padded output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftree.engine.engine import Engine
from draftree.engine.request import Emitted, Request
from draftree.engine.stats import RunStats


def feed(streamer: Any, prompt: Tensor) -> Callable[[Emitted], None] | None:
    """Give a Hugging Face streamer the prompt [1, L]; return what hands it each new token (None without one)."""
    if streamer is None:
        return None
    streamer.put(prompt.cpu())
    return lambda emitted: streamer.put(torch.tensor([emitted.token]))


def finish(
    engine: Engine, requests: list[Request], input_ids: Tensor, pad_token_id: int, streamer: Any
) -> tuple[Tensor, RunStats]:
    """Run `requests` to their ends; return LongTensor [batch, prompt + new] and their statistics.

    Raises:
        Exception: the first error that ended one of the requests.
    """
    engine.run()
    if streamer is not None:
        streamer.end()
    for request in requests:
        if request.error is not None:
            raise request.error
    longest = max(len(r.output) for r in requests)
    new = torch.full((len(requests), longest), pad_token_id, dtype=torch.long)
    for b, request in enumerate(requests):
        new[b, : len(request.output)] = torch.tensor(request.tokens)
    return torch.cat([input_ids, new.to(input_ids.device)], 1), RunStats([r.stats for r in requests])
