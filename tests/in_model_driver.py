"""What tests of drafters inside the model share: random weights, and a record of what each step drafted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from draftree.drafting import BiTA, HiddenTransfer, Medusa, Step
from draftree.drafting.in_model import InModelDrafter

D = TypeVar("D", bound=InModelDrafter)


def randomised(drafter: D, scale: float = 0.2, seed: int = 1) -> D:
    """Weights moved by random amounts, so that draft tokens are many and mostly wrong."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in drafter.weights.parameters():
            weight += scale * torch.randn(weight.shape, generator=generator)
    return drafter


# Between them every method, option and kind of tree.
MAKERS: dict[str, Callable[[Any], InModelDrafter]] = {
    "medusa": lambda m: Medusa.fresh(m),
    "medusa-own-heads-choices": lambda m: Medusa.fresh(m, heads=2, own_head=True, tree=[[0], [1], [0, 0], [1, 2]]),
    "bpd": lambda m: Medusa.fresh(m, heads=3, tree="chain"),
    "bita": lambda m: BiTA.fresh(m),
    "bita-efficient": lambda m: BiTA.fresh(m, tree="efficient-5"),
    "bita-full": lambda m: BiTA.fresh(m, masks=2, prompts=3, tree="full-3"),
    "bita-masks-only-groups": lambda m: BiTA.fresh(m, prompts=0, groups=3),
    "bita-straightforward": lambda m: BiTA.fresh(m, tree="chain", groups=1),
    "hidden-transfer": lambda m: HiddenTransfer.fresh(m),
    "hidden-transfer-one-layer": lambda m: HiddenTransfer.fresh(m, transfer_layers=[1, 3, 3], tree="efficient-code-4"),
    "hidden-transfer-masked-groups": lambda m: HiddenTransfer.fresh(m, masked=True, groups=2, depth=2),
}


def make(name: str, model: Any) -> InModelDrafter:
    """A drafter of `MAKERS` with random weights, the same in every call."""
    torch.manual_seed(0)
    return randomised(MAKERS[name](model))


class Seen(NamedTuple):
    """What a drafter had ready after a step.

    Attributes:
        tokens: the request's tokens, the new root last.
        accepted: how many draft tokens the step accepted.
        candidates: LongTensor [D, K].
        logp: FloatTensor [D, K].
    """

    tokens: list[int]
    accepted: int
    candidates: Tensor
    logp: Tensor


def recorded(drafter: InModelDrafter) -> list[Seen]:
    """A list that fills with what `drafter` has ready after every step of every request."""
    seen: list[Seen] = []
    observe = drafter.observe

    def watching(step: Step) -> None:
        observe(step)
        for b, request in enumerate(step.requests):
            held = drafter._held.get(request.id)
            if held is not None and held.length == len(request.tokens):
                accepted = int(step.trees.depth[b, step.accepted[b][-1]])
                drafted = (torch.from_numpy(a) for a in (held.tokens, held.logp))
                seen.append(Seen(list(request.tokens), accepted, *drafted))

    drafter.observe = watching  # type: ignore[method-assign]
    return seen


def agree(seen: Seen, logits: Tensor, what: str = "") -> None:
    """The candidates and log-probabilities are those of logits [D, V], as far as D reaches."""
    depth = len(logits)
    truth = logits.float().log_softmax(-1)
    best = truth.topk(seen.logp.shape[1], -1).values
    assert torch.allclose(seen.logp[:depth], best, atol=2e-4), what
    assert torch.allclose(truth.gather(1, seen.candidates[:depth]), seen.logp[:depth], atol=2e-4), what
    assert (seen.logp[depth:] == -torch.inf).all(), what


@torch.no_grad()
def read_by_head(model: Any, tokens: list[int]) -> Tensor:
    """[n, d], what the model's head reads in a stock pass over `tokens`."""
    read: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: read.append(args[0]))
    try:
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    finally:
        handle.remove()
    return read[-1][0]
