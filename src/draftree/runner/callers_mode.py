"""The mode in which a step calls code of the caller's: logits processors, stopping criteria, streamers, callbacks.

Some runners make their steps in torch's inference mode. There code that takes gradients fails, and a tensor that it
makes and keeps can be neither changed nor trained on afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def callers_mode() -> Iterator[None]:
    """A context without gradients, whose tensors are usual ones: that of Hugging Face's `generate`."""
    with torch.inference_mode(False), torch.no_grad():
        yield
