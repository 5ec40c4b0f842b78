"""Llama-shaped models at fixed shapes: the loop of `eager`, whose passes are recorded once and replayed.

What a GPU needs to be kept busy (`passes`). It also pays on a CPU in bfloat16, where weights packed for oneDNN are
several times as fast and want fixed shapes; a recording is then a function that is called again.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from draftree.runner.cuda_graphs.capture import capture_for
from draftree.runner.cuda_graphs.passes import CapturedPasses, Recorded
from draftree.runner.eager.layer import TensorHead, TensorLayer
from draftree.runner.eager.parts import Parts
from draftree.runner.eager.product import PackedProduct, StockProduct, may_pack
from draftree.runner.eager.runner import EagerRunner, may_copy_or_has
from draftree.runner.kv.cache import BLOCK, SlotCache
from draftree.runner.layout.positions import is_length_dependent
from draftree.runner.own_type import in_own_type
from draftree.runner.plan import PassResult, Plan
from draftree.runner.target import Target
from draftree.runner.weights.packed import linear_bytes

log = logging.getLogger("draftree.runner")
OLDEST = (8, 0)  # CUDA capability that Triton's kernels have all types for
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def has_kernels(parts: Parts, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device runs the kernels of this folder for such layers, as far as a small try of each tells."""
    if device.type != "cuda" or dtype not in TYPES or find_spec("triton") is None:
        return False
    if torch.cuda.get_device_capability(device) < OLDEST:
        return False
    try:
        from draftree.runner.cuda_graphs.kernels import check

        with torch.cuda.device(device):
            check(parts.heads.kv, parts.heads.groups, parts.heads.dim, parts.activation, dtype, device)
    except Exception as why:  # no C compiler, a folder that cannot be written, too little shared memory, ...
        reason = (str(why).strip().splitlines() or [type(why).__name__])[0]
        log.warning("draftree's Triton kernels do not run here, so that steps take longer: %s", reason)
        return False
    return True


class CudaGraphRunner(EagerRunner):
    """Drives models of the families in `eager.parts`; see `Runner`."""

    name = "cuda_graphs"

    @classmethod
    def refusal(cls, target: Target) -> str | None:
        """See `Runner.refusal`."""
        reason = super().refusal(target)
        if reason is None and is_length_dependent(target.decoder.rotary_emb):
            reason = (
                "Passes of fixed shapes cannot be had for rotary embeddings that depend on a text's length "
                f"('{target.decoder.rotary_emb.rope_type}'): leave out runner='cuda_graphs'."
            )
        return reason

    @classmethod
    def pays(cls, target: Target) -> bool:
        """Whether fixed shapes are faster than others where the model is."""
        return target.device.type == "cuda" or may_pack(target.dtype, target.device)

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        layers, head = self._fixed
        kernel = None
        if has_kernels(layers[0].parts, target.dtype, target.device):
            from draftree.runner.cuda_graphs.kernels import attend
            from draftree.runner.cuda_graphs.layer import KernelLayer

            layers, kernel = [KernelLayer(layer) for layer in layers], attend
        recorded = Recorded(target, layers, head, self._embedding, self.tables, self._cap, kernel)
        self._captured = CapturedPasses(self, recorded, capture_for(target.device))

    def _load(self, parts: list[Parts], head: nn.Module, cap: float | None) -> None:
        if may_pack(self.target.dtype, self.target.device) and may_copy_or_has(self.target, much_faster=True):
            self.copied.nbytes = linear_bytes(self.target)
            # Packed weights are for fixed shapes; other passes read the stock ones, so that there is one copy.
            self._layers = [TensorLayer(part, StockProduct) for part in parts]
            self._head = TensorHead(self._norm, head, StockProduct, cap)
            layers = [TensorLayer(part, PackedProduct) for part in parts]
            self._fixed = layers, TensorHead(self._norm, head, PackedProduct, cap)
        else:
            super()._load(parts, head, cap)
            self._fixed = self._layers, self._head

    @property
    def plan_device(self) -> torch.device:
        """See `Runner.plan_device`."""
        return torch.device("cpu")

    @property
    def captured_bytes(self) -> dict[str, int]:
        """Bytes on the device that recorded passes hold, by what for."""
        return self._captured.nbytes

    def new_cache(
        self, slots: int, capacity: int = BLOCK, prefix: list[tuple[Tensor, Tensor]] | None = None
    ) -> SlotCache:
        """See `Runner.new_cache`."""
        if prefix is not None:
            return super().new_cache(slots, capacity, prefix)
        return self._captured.pool.lend(len(self._layers), slots, capacity)

    @in_own_type
    @torch.inference_mode()
    def run(self, plan: Plan, cache: SlotCache, first: int = 0, encoder: Any = None) -> PassResult:
        """See `Runner.run`."""
        if self._captured.takes(plan):
            return self._captured.run(plan, cache, first)
        self._captured.follow()
        return super().run(plan, cache, first)
