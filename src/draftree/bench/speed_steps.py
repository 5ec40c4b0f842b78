"""Steps of some rows, ours and Hugging Face's, timed as they follow each other in decoding, beside the memory's speed.

`bench inflate` samples the memory before every step, which empties the caches; a model that they hold would pay for
that, and takes up to ten steps to be there again. Here steps of the same kind go before each timed one. The steps
themselves are those of `inflate_measure`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from draftree.bench.inflate.sizes import Size
from draftree.bench.inflate_measure import HF, LOOP, Bandwidth, _clock, _hf_steps, _host_steps, _rows, _wait
from draftree.host import Host
from draftree.progress import Watcher

SETTLING, LONG = 10, 0.02  # most steps before a timed one, and seconds of them that are enough


@dataclass(frozen=True, slots=True)
class Steps:
    """Timed steps of a model.

    Attributes:
        rows: for each method and number of rows, what `bench inflate` tells as well: median and fastest seconds, the
            samples, the median over that of one row, and the floor over the median.
        floor: `weight_bytes` of a step, `bandwidth` (bytes a second) and `seconds`, their quotient.
    """

    rows: list[dict[str, Any]]
    floor: dict[str, float]


def time_rows(
    model: Any,
    host: Host,
    counts: Sequence[int],
    context: int,
    rounds: int,
    watcher: Watcher,
    forms: Mapping[str, tuple[Host, Sequence[int]]] | None = None,
) -> Steps:
    """Time steps of `counts` rows behind `context` tokens, by the host and by Hugging Face's forward, interleaved.

    Args:
        model: a decoder-only model.
        host: opened for it.
        counts: rows, 1 among them.
        context: tokens before the rows.
        rounds: how often each is timed.
        watcher: hears how far it is.
        forms: hosts in other forms by their names in `inflate_measure.FORM_LABELS`, and rows to time them with, 1 among
            them.
    """
    device = model.device
    generator = torch.Generator().manual_seed(0)
    vocabulary = min(1000, int(model.config.vocab_size))
    tokens = torch.randint(0, vocabulary, (1, max(context, *counts)), generator=generator).to(device)
    steps = {HF: _hf_steps(model, tokens, context), LOOP: _host_steps(host, tokens, context)}
    rows = dict.fromkeys(steps, counts)
    for name, (other, some) in (forms or {}).items():
        steps[name], rows[name] = _host_steps(other, tokens, context), some
    clock, memory = _clock(device), Bandwidth(device)
    times: dict[tuple[str, int], list[float]] = {(name, n): [] for name in steps for n in rows[name]}
    watcher.stage("steps", rounds * len(times))
    for number in range(rounds):
        memory.sample()
        for n in counts:
            for name in list(steps) if number % 2 else list(steps)[::-1]:
                if n not in rows[name]:
                    continue
                settle(partial(steps[name], n), clock)
                _wait(device)
                start = clock()
                steps[name](n)
                _wait(device)
                times[name, n].append(clock() - start)
                watcher.step()
    read = weight_bytes(model)
    floor = {"weight_bytes": float(read), "bandwidth": memory.best, "seconds": read / memory.best}
    return Steps(_rows(times, floor["seconds"]), floor)


def settle(step: Callable[[], Any], clock: Callable[[], float]) -> None:
    """Take a step until the caches hold what it leaves there: some times, or once where it takes long."""
    begin = clock()
    for _ in range(SETTLING):
        step()
        if clock() - begin > LONG:
            break


def weight_bytes(model: Any) -> int:
    """Bytes of the weights that a step reads: all but the embedding, of which it takes rows; a tied head counts."""
    size = Size.of(model.config)
    return (size.parameters - size.vocab_size * size.hidden_size) * int(model.dtype.itemsize)


def check_context(context: int, most: int, limit: int | None) -> None:
    """Refuse a context that leaves no room for the rows.

    Raises:
        ValueError: such a one.
    """
    if limit is not None and context + most > limit:
        raise ValueError(
            f"A context of {context} and {most} rows do not fit the model's {limit} positions: give a shorter one."
        )
