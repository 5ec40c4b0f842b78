"""Layers of recorded passes compiled by torch's inductor: for types and devices that the C library has nothing for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from draftree.host.target import Target


class Inductor:
    """Compiles functions."""

    def __init__(self, target: Target) -> None:
        pass

    def compile(self, fn: Callable[..., None]) -> Callable[..., None]:
        """`fn`, compiled."""
        return torch.compile(fn, dynamic=False)
