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


def check_strict(runner: Runner) -> bool:
    """Return whether a model needs strict mode, and refuse a runner that cannot keep it.

    Raises:
        ValueError: rows depend on each other on that runner, or an encoder-decoder.
    """
    target = runner.target
    if target.encoder_decoder:
        raise ValueError("strict=True is for decoder-only models: use fp32 weights with this encoder-decoder.")
    if target.dtype == torch.float32:
        return False
    if not runner.independent_rows:
        name = str(target.dtype).removeprefix("torch.")
        raise ValueError(
            f"strict=True cannot be kept for this '{target.model_type}' model in {name} on the runner "
            f"{runner.name!r}, where scores depend on the other rows of a pass: use float32, or leave strict out and "
            "accept that tokens that are nearly tied may change places."
        )
    return True


def check_prefix(runner: Runner, drafter: Drafter) -> None:
    """Refuse a drafter, after `bind`, whose deep prefix recorded passes cannot leave out.

    Raises:
        ValueError: it has one.
    """
    if runner.name == "cuda_graphs" and drafter.deep_prefix(runner.target) is not None:
        raise ValueError("strict=True cannot be kept in recorded passes with a drafter that has a deep prefix.")
