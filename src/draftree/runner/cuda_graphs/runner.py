"""Llama-shaped models at fixed shapes: the loop of `eager`, whose passes are recorded once and replayed.

Recordings keep a GPU busy (`passes`). On a CPU, where they gain nothing, a recording is a function that is called
again, so that all of this can be tested there.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from draftree.runner.cuda_graphs.capture import capture_for
from draftree.runner.cuda_graphs.frames import BUCKETS
from draftree.runner.cuda_graphs.passes import CapturedPasses, Recorded
from draftree.runner.eager.parts import Parts
from draftree.runner.eager.runner import EagerRunner
from draftree.runner.kv.cache import BLOCK, SlotCache
from draftree.runner.plan import PassResult, Plan
from draftree.runner.positions import is_length_dependent
from draftree.runner.target import Target

log = logging.getLogger("draftree.runner")
OLDEST = (8, 0)  # CUDA capability that Triton's kernels have all types for
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def has_kernels(parts: Parts, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device runs the kernels of this folder for such layers: each is tried on a few numbers."""
    if device.type != "cuda" or dtype not in TYPES or find_spec("triton") is None:
        return False
    if torch.cuda.get_device_capability(device) < OLDEST:
        return False
    try:
        from draftree.runner.cuda_graphs import columns, kernels, products

        with torch.cuda.device(device):
            kernels.check(parts.heads.kv, parts.heads.groups, parts.heads.dim, parts.activation, dtype, device)
            columns.check(parts.heads.kv, parts.heads.dim, dtype, device)
            if dtype != torch.float32:
                products.check(parts.activation, dtype, device)
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
        reason = super().refusal(target)
        if reason is None and is_length_dependent(target.decoder.rotary_emb):
            reason = (
                "Passes of fixed shapes cannot be had for rotary embeddings that depend on a text's length "
                f"('{target.decoder.rotary_emb.rope_type}'): leave out runner='cuda_graphs'."
            )
        return reason

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        layers, head = self._layers, self._head
        kernel, self._cache_kind = None, SlotCache  # of what kind caches are
        if has_kernels(layers[0].parts, target.dtype, target.device):
            from draftree.runner.cuda_graphs.columns import KernelCache
            from draftree.runner.cuda_graphs.kernels import attend
            from draftree.runner.cuda_graphs.layer import KernelHead, KernelLayer

            next_norms = [*(layer.parts.norms[0] for layer in layers[1:]), None]
            layers = [KernelLayer(*pair) for pair in zip(layers, next_norms, strict=True)]
            head, kernel, self._cache_kind = KernelHead(head), attend, KernelCache
        # Capped scores are multiplied by torch, over a band that is wider or narrower in other passes; and so are all
        # products on a GPU without the kernels.
        self.independent_rows = self._cap is None and (kernel is not None or target.device.type == "cpu")
        # Where weights were copied, the embedding alone is read as it lies. Of modules only the parameters are held:
        # the model itself is one of them, and a runner that held it would keep it alive.
        modules = [self._embedding] if self.copied_bytes else target.model.modules()
        watched = [module._parameters for module in modules if module._parameters]
        recorded = Recorded(target, layers, head, self._embedding, self.tables, watched, self._cap, kernel)
        self._captured = CapturedPasses(recorded, capture_for(target.device))

    @property
    def plan_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def captured_bytes(self) -> dict[str, int]:
        """Bytes on the device that recorded passes hold, by what for."""
        return self._captured.nbytes

    def new_cache(
        self, slots: int, capacity: int = BLOCK, prefix: list[tuple[Tensor, Tensor]] | None = None
    ) -> SlotCache:
        if prefix is not None:
            return self._cache_kind(len(self._layers), slots, capacity, prefix)
        return self._captured.pool.lend(len(self._layers), slots, capacity, self._cache_kind)

    @torch.inference_mode()
    def run(self, plan: Plan, cache: SlotCache, first: int = 0, encoder: Any = None) -> PassResult:
        if self._captured.takes(plan, cache, first):
            return self._captured.run(plan, cache, first, self)
        if plan.row_by_row and self.target.dtype != torch.float32:  # other products and bands than in recorded passes
            raise ValueError(
                f"strict=True cannot be kept in passes of more than {BUCKETS[-1]} rows: draft fewer tokens a step."
            )
        self._captured.keep_order()
        return super().run(plan, cache, first)
