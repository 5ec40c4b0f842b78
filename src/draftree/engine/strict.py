"""Strict mode: in 16 bits an answer has, bit for bit, the scores of plain decoding alone.

In 16 bits a row's logits change in their last bits with the other rows of a pass, and two tokens that are nearly tied
may change places. The runners `cpu` and `cuda_graphs` compute a row without regard to the others, so they keep the
promise: each row attends over its context and its branch, and a prompt passes without draft tokens and without other
requests, in chunks of one size. All other runners multiply and attend by torch, whose sums depend on the rows of a
pass, and are refused. In float32 no mode is needed.
"""

from __future__ import annotations

import torch

from draftree.drafting import Drafter
from draftree.runner import Runner


def check_strict(runner: Runner, drafter: Drafter | None) -> None:
    """Refuse a runner whose rows depend on each other in 16 bits.

    Args:
        runner: of the model.
        drafter: after `bind`; None for none.

    Raises:
        ValueError: it is such a runner, an encoder-decoder, or a drafter with a deep prefix in recorded passes.
    """
    target = runner.target
    if target.encoder_decoder:
        raise ValueError("strict=True is for decoder-only models: use fp32 weights with this encoder-decoder.")
    if target.dtype == torch.float32:
        return
    if not runner.independent_rows:
        name = str(target.dtype).removeprefix("torch.")
        raise ValueError(
            f"strict=True cannot be kept for this '{target.model_type}' model in {name} on the runner "
            f"{runner.name!r}, where scores depend on the other rows of a pass: use float32, or leave strict out and "
            "accept that tokens that are nearly tied may change places."
        )
    if runner.name == "cuda_graphs" and drafter is not None and drafter.deep_prefix(target) is not None:
        raise ValueError("strict=True cannot be kept in recorded passes with a drafter that has a deep prefix.")
