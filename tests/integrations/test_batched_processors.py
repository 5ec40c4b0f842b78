"""Functions that keep something from call to call, as logits processors of a batch: every text has its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from drafters_for_tests import RandomTree
from generate_driver import NEW, hf, left_pad, noisy, prompts, references_of, same
from torch import Tensor
from zoo import build

from draftree.integrations import custom_generate
from draftree.shaping import Fixed

IDS, MASK = left_pad(prompts())


def every_second(scores: Tensor, call: int) -> Tensor:
    """`scores` without even ids at every second call."""
    return scores.index_fill(1, torch.arange(0, 97, 2), -torch.inf) if call % 2 else scores


def through(**options: Any) -> list[Tensor]:
    """The texts with no drafter, and with two whose draft tokens are often wrong."""
    texts = []
    references = references_of(prompts(), hf(build("llama"), IDS, MASK))
    for drafter in (None, RandomTree(references, 0), RandomTree(references, 1)):
        given = {name: make() for name, make in options.items()}
        loop = custom_generate(drafter, shape=None if drafter is None else Fixed(16))
        options_of_theirs = {"attention_mask": MASK, "max_new_tokens": NEW, "do_sample": False}
        texts.append(build("llama").generate(IDS, custom_generate=loop, **options_of_theirs, **given))
    return texts


@torch.no_grad()
def decorated(ids: Tensor, scores: Tensor) -> Tensor:
    return every_second(scores, int(ids[0, -1]))


def test_functions_over_what_does_not_change() -> None:
    """Also over a model, which is not copied, over a module and over the function itself."""
    model, banned = noisy("llama"), [4, 8]

    def processor(ids: Tensor, scores: Tensor, deeper: bool = True) -> Tensor:
        if deeper:
            return processor(ids, scores, deeper=False)
        assert model is noisy("llama")
        return scores.index_fill(1, torch.tensor(banned), -torch.inf)

    expected = hf(build("llama"), IDS, MASK, logits_processor=[processor, decorated])
    for text in through(logits_processor=lambda: [processor, decorated]):
        same(text, expected)


def counting_by_row() -> Callable[[int, Tensor], list[int]]:
    calls: Counter[int] = Counter()

    def allowed(row: int, prefix: Tensor) -> list[int]:
        calls[row] += 1
        return [t for t in range(3, 97) if t % 2 == calls[row] % 2]

    return allowed


def test_a_prefix_function_is_called_for_its_own_row_alone() -> None:
    """It is one for all rows, and what it keeps by row changes with that row's tokens alone."""
    expected = hf(build("llama"), IDS, MASK, prefix_allowed_tokens_fn=counting_by_row())
    for text in through(prefix_allowed_tokens_fn=counting_by_row):
        same(text, expected)
