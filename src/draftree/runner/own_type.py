"""Passes in the model's own type, also where a caller generates under autocast.

Autocast has torch's operations choose their types one by one. A runner that keeps weights, keys and values in memory of
fixed types, for compiled code or for replay, cannot follow that; the hooked runner, which runs the model's own
`forward`, can and does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Method = TypeVar("Method", bound=Callable[..., Any])


def in_own_type(method: Method) -> Method:
    """The method with autocast off, on all devices that it is on for."""

    @wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return call(*args, **options)
        return method(*args, **options)

    return call  # type: ignore[return-value]
