"""The common interface of runners: a cache for the model, passes over it, a check for changed weights.

The functions below the class are shared by the code around a pass: the mode of callbacks, the lock of a model, the
count of passes that record, and the best tokens of logits.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from draftree.native import load_library
from draftree.native.structures import address, array_address
from draftree.runner.kv.cache import BLOCK, SlotCache
from draftree.runner.kv.encoder import EncoderState
from draftree.runner.plan import PassResult, Plan
from draftree.runner.recurrent.cache import RecurrentCache
from draftree.runner.target import Target
from draftree.runner.weights.stock import fingerprint


class Runner(ABC):
    """Passes rows through a stock model; independent of drafters and requests."""

    name: ClassVar[str]
    packs: ClassVar[bool] = False  # whether rows beyond a plan's `sizes` cost nothing
    copies: ClassVar[bool] = True  # whether it computes with anything but the model's own weights as they are
    inference: ClassVar[bool] = False  # whether its passes run in torch's inference mode
    independent_rows: bool = False  # whether no bit of a row depends on the other rows of its pass

    @classmethod
    def refusal(cls, target: Target) -> str | None:
        """Return in one sentence why a model cannot be driven this way; None where it can."""
        return None

    @classmethod
    def qualifies(cls, target: Target) -> bool:
        """Return whether a model can be driven this way."""
        return cls.refusal(target) is None

    def __init__(self, target: Target) -> None:
        self.target = target
        self.form: str = self.name  # what a pass is done with
        # Held around a pass where passes of several threads would meet on the model.
        self.lock: AbstractContextManager[Any] = nullcontext()
        self.costs: dict[int, Any] = {}  # measured `StepCost` by number of threads
        self.copied_bytes = 0  # of weights in a layout of the runner's own
        self.fingerprint = fingerprint(target.model)  # before weights are copied

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Run a step without gradients, in the model's own type also where the caller's code is under autocast.

        Passes, commits and acceptance share one guard, since tensors made in inference mode can be changed only there.
        A guard is never held across steps: torch's modes belong to the thread.
        """
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode() if self.inference else torch.no_grad())
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield

    @property
    def outdated(self) -> bool:
        """True if the model's weights have changed since the runner copied them."""
        return self.copies and self.fingerprint != fingerprint(self.target.model)

    @property
    def plan_device(self) -> torch.device:
        """The best place of a plan's tensors: the model's device, or the CPU where the runner sends them itself."""
        return self.target.device

    def new_cache(
        self, slots: int, capacity: int = BLOCK, prefix: list[tuple[Tensor, Tensor]] | None = None
    ) -> SlotCache:
        """Return an empty cache for `slots` requests, with `capacity` KV positions to begin with."""
        recurrence = self.target.recurrence
        if recurrence is not None:
            return RecurrentCache(recurrence, len(self.target.layers), slots, capacity, prefix)
        return SlotCache(len(self.target.layers), slots, capacity, prefix)

    def new_encoder(self, slots: int) -> EncoderState:
        """Return the encoder's side of `slots` requests to an encoder-decoder."""
        return EncoderState(self.target, slots)

    @abstractmethod
    def run(self, plan: Plan, cache: SlotCache, first: int = 0, encoder: Any = None) -> PassResult:
        """Pass the rows of `plan` through the model, for the requests in slots [first, first + B).

        The rows' keys and values lie behind each slot's context until `cache.commit` keeps some of them; a pass
        that is not committed leaves no trace. `encoder` holds the cross attention of encoder-decoders.
        """

    @abstractmethod
    def close(self, hidden: Tensor) -> Tensor:
        """Return the input of the model's head [B, n, d'], from the last layer's output [B, n, d]."""

    @abstractmethod
    def head(self, closed: Tensor) -> Tensor:
        """Return the output [B, n, V] of the model's head for its input [B, n, d'], before a factor, cap or bias."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [B, n, V] of the last layer's output [B, n, d], as a pass gives them."""


# ---------------------------------------------------------------- around a pass


@contextmanager
def callers_mode() -> Iterator[None]:
    """Run a caller's code (processors, criteria, callbacks) as Hugging Face's `generate` does.

    Gradients are off and tensors are usual ones. Tensors made in inference mode could never be changed or trained on.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def lock_of(model: nn.Module) -> threading.RLock:
    """Return the lock of all hooked passes through a model: one pass has its hooks there at a time."""
    with _making:
        return _locks.setdefault(model, threading.RLock())


_prepared = [0]  # passes that recorded or compiled


def note_preparation() -> None:
    """Note that the running pass records a graph or compiles, so that its time is left out of step costs."""
    _prepared[0] += 1


def preparations() -> int:
    """Return the number of passes of this process that recorded or compiled so far."""
    return _prepared[0]


def top_tokens(logits: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the best `count` tokens of logits [B, D, V] and their log-probabilities, each [B, D, count], on the CPU.

    One copy brings both. Tokens are 0 and their log-probabilities -inf where all logits of a depth are -inf.
    """
    library = load_library() if logits.is_cpu else None
    if library is not None:
        rows = logits.float().contiguous()
        shape = *rows.shape[:-1], count
        tokens, logp = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.float32)
        at, *to = address(rows, torch.float32), array_address(tokens, np.int64), array_address(logp, np.float32)
        library.layer_top(at, rows.numel() // rows.shape[-1], rows.shape[-1], count, *to)
        return tokens, logp
    top = logits.float().log_softmax(-1).topk(count, -1)
    packed = torch.stack([top.indices.int(), top.values.contiguous().view(torch.int32)]).numpy(force=True)
    tokens, logp = packed[0].astype(np.int64), packed[1].view(np.float32)
    impossible = np.isnan(logp)  # of logits that are all -inf
    return np.where(impossible, 0, tokens), np.where(impossible, np.float32(-np.inf), logp)
