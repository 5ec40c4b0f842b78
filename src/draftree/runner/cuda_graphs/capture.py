"""CUDA graphs behind one interface: work on a device is recorded once and replayed without Python.

A recorded function reads and writes tensors that stay in place. The caller of a replay fills its inputs and reads its
outputs.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("draftree.runner")

FREE = 2**30  # bytes that must be free to record, since a graph's pool cannot use the allocator's cached blocks


class Capture:
    """Records functions without arguments or results that always do the same operations.

    This one records nothing: a replay calls the function, so that the code around graphs runs on any device.

    Attributes:
        costly: whether recording takes so long that it only pays for work that is done more than once.
    """

    costly = False

    def record(self, fn: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats the work of `fn` on the same tensors; recording may call `fn` or not."""
        return fn

    def once(self, fn: Callable[[], None]) -> None:
        """Do the work of `fn` without recording it."""
        fn()

    def staging(self, words: int) -> Tensor:
        """Return a LongTensor [words] of zeros on the CPU, to be sent from."""
        return torch.zeros(words, dtype=torch.long, device="cpu")

    def wait_until_sent(self) -> None:
        """Wait until the staging tensor that was sent last may be overwritten."""

    def send(self, staged: Tensor, to: Tensor) -> None:
        """Copy a staging tensor to the device, in the order of the device's work."""
        to.copy_(staged)


# All recordings on a device use one stream, one after the other: cuBLAS holds a workspace of 32 MiB for each stream.
_streams: dict[torch.device, Any] = {}
_recording = threading.Lock()


class CudaCapture(Capture):
    """CUDA graphs that share one memory pool, since one graph is replayed at a time.

    Args:
        device: a CUDA device.
    """

    costly = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent = torch.cuda.Event()
        self._pool = torch.cuda.graph_pool_handle()
        self._keeper: Any = None  # an almost empty graph: a pool that has lost all its graphs cannot be used again

    def record(self, fn: Callable[[], None]) -> Callable[[], None]:
        """See `Capture.record`. Work that cannot be recorded, for lack of memory say, is repeated without a graph."""
        with _recording, torch.cuda.device(self._device):
            if self._device not in _streams:
                _streams[self._device] = torch.cuda.Stream(self._device)
            here, stream = torch.cuda.current_stream(self._device), _streams[self._device]
            stream.wait_stream(here)
            if torch.cuda.mem_get_info(self._device)[0] < FREE:
                torch.cuda.empty_cache()
            try:
                with torch.cuda.stream(stream):
                    graph = self._recorded(fn)
            except RuntimeError as why:
                log.warning("A pass is not recorded, and slower than it could be: %s", str(why).splitlines()[0])
                del _streams[self._device]  # it may still be recording
                torch.cuda.empty_cache()
                self._pool, self._keeper = torch.cuda.graph_pool_handle(), None
                return partial(self.once, fn)
            here.wait_stream(stream)

        def replay() -> None:
            with torch.cuda.device(self._device):
                graph.replay()

        return replay

    def _recorded(self, fn: Callable[[], None]) -> Any:
        torch.cuda.current_blas_handle()  # each thread has its own, which cannot be made while recording
        if self._keeper is None:
            fn()  # libraries set themselves up for the stream
            nothing = torch.zeros(1, dtype=torch.uint8, device=self._device)
            self._keeper = self._graph(nothing.zero_)
        return self._graph(fn)

    def _graph(self, fn: Callable[[], Any]) -> Any:
        """Return the work of `fn` as a graph. `torch.cuda.graph` would empty the allocator's cache at each use."""
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # graphs of dropped models must not be destroyed while another is recorded
        try:
            # "thread_local": other threads may allocate on the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                fn()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return graph

    def once(self, fn: Callable[[], None]) -> None:
        with torch.cuda.device(self._device):
            fn()

    def staging(self, words: int) -> Tensor:
        """See `Capture.staging`. The memory is pinned, so that sending does not wait for the device."""
        return torch.zeros(words, dtype=torch.long, pin_memory=True, device="cpu")

    def wait_until_sent(self) -> None:
        self._sent.synchronize()

    def send(self, staged: Tensor, to: Tensor) -> None:
        to.copy_(staged, non_blocking=True)
        self._sent.record(torch.cuda.current_stream(self._device))


def capture_for(device: torch.device) -> Capture:
    """Return CUDA graphs where the device has them."""
    return CudaCapture(device) if device.type == "cuda" else Capture()
