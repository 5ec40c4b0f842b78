"""Log-probabilities of a prompt's own tokens, as evaluation harnesses ask for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from draftree.engine.passes import tree_pass
from draftree.engine.request import TokenScores
from draftree.runner import Runner
from draftree.runner.kv.cache import SlotCache
from draftree.tree import TokenTree

CHUNK = 256  # tokens of a pass; each has logits of the whole vocabulary


def score_prompt(runner: Runner, prompt: Sequence[int], count: int, cache: SlotCache) -> Iterator[list[TokenScores]]:
    """The scores of `prompt[1:]`, given what stands before each; the first token has none.

    Yields them chunk by chunk, so that others may have passes in between.

    Args:
        runner: of a decoder-only model.
        prompt: token ids.
        count: how many of the likeliest tokens to tell with each.
        cache: of one slot, which nobody else uses before the last chunk; what it holds is forgotten.
    """
    cache.clear(0)
    for begin in range(0, len(prompt) - 1, CHUNK):
        chunk = list(prompt[begin : min(begin + CHUNK, len(prompt) - 1)])
        with runner.guard(), runner.lock:
            root = TokenTree.roots(torch.tensor(chunk[-1:], dtype=torch.long, device=runner.plan_device))
            turn = tree_pass([chunk[:-1]], root, [begin], floors=[len(prompt)], limit=runner.target.max_positions)
            result = runner.run(replace(turn.plan, first_logit_row=0), cache)
            cache.commit(turn.committed([[0]]), result.segments)
            following = prompt[begin + 1 : begin + 1 + len(chunk)]
            scored = [TokenScores.of(result.logits[0, i], token, count) for i, token in enumerate(following)]
        yield scored
