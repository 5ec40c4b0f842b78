"""Loss and agreement of a small model on a large one's answers (BiLD, section 3.5): what `draftree train align` trains.

Unlike the objectives of drafters this one drives no runner: the small model is a stock one, trained as a whole by its
own forward pass, so that what comes out is a stock model again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from draftree.training.objective import cross_entropy, hits_of


class AlignObjective(nn.Module):
    """Cross entropy of the small model with every token that the large one wrote.

    Args:
        small: a stock Hugging Face causal language model, or an encoder-decoder; all of it is trained.

    Attributes:
        places: as of `Objective`: one depth, the next token.
    """

    places: tuple[int, ...] = (1,)

    def __init__(self, small: Any) -> None:
        super().__init__()
        self.small = small

    def forward(
        self,
        tokens: Tensor,
        length: Tensor,
        start: Tensor,
        splits: Tensor,
        real: Tensor,
        source: Tensor | None = None,
        source_length: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The loss of a batch (see `Batch`); in evaluation also `hits` and `seen`, as of `Objective.forward`.

        Every token of an answer counts, its end token included; split points are for drafters and are not looked at.
        """
        if source is None or source_length is None:
            logits = self.small(input_ids=tokens, attention_mask=_upto(length, tokens)).logits
        else:
            read = _upto(source_length, source)
            logits = self.small(input_ids=source, attention_mask=read, decoder_input_ids=tokens).logits
        truth, there = answers_in(tokens, length, start)
        loss = cross_entropy(logits[:, :-1], truth, there)
        if self.training:
            return {"loss": loss}
        hits, seen = hits_of(logits[:, :-1], truth, there)
        return {"loss": loss, "hits": hits[None], "seen": seen[None]}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Every tensor for itself: files of checkpoints cannot hold one that has two names, as tied embeddings do."""
        held: dict[str, Any] = super().state_dict(*args, **kwargs)
        seen: set[int] = set()
        for name, tensor in held.items():
            if tensor.data_ptr() in seen:
                held[name] = tensor.clone()
            seen.add(tensor.data_ptr())
        return held


def answers_in(tokens: Tensor, length: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """The token behind each place of a batch [B, T - 1] but the last, and where it is one of an answer."""
    place = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    return tokens[:, 1:], (place >= start[:, None] - 1) & (place < length[:, None] - 1)


def _upto(length: Tensor, of: Tensor) -> Tensor:
    return (torch.arange(of.shape[1], device=of.device) < length[:, None]).long()
