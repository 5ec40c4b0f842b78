"""What every runner offers: a cache for its model, passes over it, and whether the model is still as it was."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftree.runner.kv.cache import BLOCK, SlotCache
from draftree.runner.kv.encoder import EncoderState
from draftree.runner.plan import PassResult, Plan
from draftree.runner.target import Target
from draftree.runner.weights.fingerprint import fingerprint


class Runner(ABC):
    """Gets rows through a stock model; knows nothing of drafters or requests."""

    name: ClassVar[str]
    packs: ClassVar[bool] = False  # whether rows beyond a plan's `sizes` cost nothing
    copies: ClassVar[bool] = True  # whether it computes with anything but the model's own weights as they are
    leaves: ClassVar[bool] = False  # whether rows may leave any model that it drives in mid-stack (`Plan.leaves`)
    independent_rows: bool = False  # whether no bit of a row depends on the other rows of its pass
    # What a step runs under: passes, commits and acceptance all together, since tensors made in inference mode can
    # be changed only there. Never held across steps (a generator that does so disturbs other threads).
    guard: ClassVar[type[torch.no_grad | torch.inference_mode]] = torch.no_grad

    @classmethod
    def refusal(cls, target: Target) -> str | None:
        """Why a model cannot be driven this way, in one sentence; None where it can."""
        return None

    @classmethod
    def qualifies(cls, target: Target) -> bool:
        """Whether a model can be driven this way."""
        return cls.refusal(target) is None

    def __init__(self, target: Target) -> None:
        self.target = target
        self.form: str = self.name  # what a pass is done with
        # Held around a pass where passes of several threads would meet on the model.
        self.lock: AbstractContextManager[Any] = nullcontext()
        self.costs: dict[int, Any] = {}  # measured `StepCost` by number of threads
        self.copied_bytes = 0  # of weights in a layout of the runner's own
        self.fingerprint = fingerprint(target.model)  # before weights are copied

    @property
    def outdated(self) -> bool:
        """Whether the runner holds weights of the model that have changed since it was opened."""
        return self.copies and self.fingerprint != fingerprint(self.target.model)

    @property
    def plan_device(self) -> torch.device:
        """Where a plan's tensors lie best: on the model's device, or on the CPU where the runner takes them along."""
        return self.target.device

    def new_cache(
        self, slots: int, capacity: int = BLOCK, prefix: list[tuple[Tensor, Tensor]] | None = None
    ) -> SlotCache:
        """An empty cache for `slots` requests, with `capacity` columns to begin with."""
        return SlotCache(len(self.target.layers), slots, capacity, prefix)

    def new_encoder(self, slots: int) -> EncoderState:
        """The encoder's side of `slots` requests to an encoder-decoder."""
        return EncoderState(self.target, slots)

    @abstractmethod
    def run(self, plan: Plan, cache: SlotCache, first: int = 0, encoder: Any = None) -> PassResult:
        """Pass the rows of `plan` through the model, for the requests in slots [first, first + B).

        The rows' keys and values lie behind each slot's context until `cache.commit` keeps some of them; a pass
        that is not committed leaves no trace. `encoder` holds the cross attention of encoder-decoders.
        """

    @abstractmethod
    def close(self, hidden: Tensor) -> Tensor:
        """The input of the model's head [B, n, d'], from the last layer's output [B, n, d]."""

    @abstractmethod
    def head(self, closed: Tensor) -> Tensor:
        """The output [B, n, V] of the model's head for its input [B, n, d'], before a factor, a cap or a bias."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [B, n, V] of the last layer's output [B, n, d], as a pass gives them."""
