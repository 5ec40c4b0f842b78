"""Recording work on a device once and replaying it without asking Python again: CUDA graphs behind one interface.

A recorded function reads and writes tensors that stay where they are; whoever replays it fills the ones it reads and
looks at the ones it writes. `CallAgain` records nothing and calls the function anew: so all that surrounds a graph runs
on any device, tests included.
"""

from __future__ import annotations

import gc
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("draftree.runner")

ROOM = 2**30  # bytes that must be free to record, which cannot use the memory that the allocator keeps for later


class Capture(ABC):
    """Makes replays of functions that take nothing, return nothing and always do the same operations.

    Attributes:
        costly: whether recording takes so long that it is only worth it for what is done more than once.
    """

    costly = False

    @abstractmethod
    def record(self, fn: Callable[[], None]) -> Callable[[], None]:
        """A function that does the work of `fn` again, on the tensors it used. To record, `fn` may be called or not."""

    def once(self, fn: Callable[[], None]) -> None:
        """Do the work of `fn` without recording it."""
        fn()

    def staging(self, words: int) -> Tensor:
        """LongTensor [words] on the CPU, to be sent from."""
        return torch.zeros(words, dtype=torch.long, device="cpu")

    def keep_order(self) -> None:
        """Let the device begin the work to come after the work before, from whatever thread and stream that came."""

    def wait_until_sent(self) -> None:
        """Wait until the staging tensor that was sent last may be written over."""

    def send(self, staged: Tensor, to: Tensor) -> None:
        """Copy a staging tensor to the device, in the order of the device's work."""
        to.copy_(staged)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the recordings themselves took."""
        return 0


class CallAgain(Capture):
    """Records nothing: calls the function again."""

    def record(self, fn: Callable[[], None]) -> Callable[[], None]:
        return fn


# Streams whose capture is gone. Each has a workspace of 32 MiB from cuBLAS, which a new one would get as well.
_free_streams: dict[torch.device, list[Any]] = {}


def _give_back(device: torch.device, streams: list[Any]) -> None:
    _free_streams[device] += streams


class CudaCapture(Capture):
    """CUDA graphs that share one pool of memory: one is replayed at a time, so what one leaves there is for the next.

    Args:
        device: a CUDA device.
    """

    costly = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: list[Any] = []  # the one in use; a list, so that the finalizer gives back what is in it then
        self._sent = torch.cuda.Event()
        self._taken = 0
        self._last: Any = None  # the stream that was used last
        self._begin()
        weakref.finalize(self, _give_back, device, self._streams).atexit = False

    def _begin(self) -> None:
        """Take a stream and a pool."""
        free = _free_streams.setdefault(self._device, [])
        self._streams[:] = [free.pop() if free else torch.cuda.Stream(self._device)]
        self._pool = torch.cuda.graph_pool_handle()
        self._keeper: Any = None  # a graph of next to nothing: a pool whose graphs are all gone cannot be used again

    def record(self, fn: Callable[[], None]) -> Callable[[], None]:
        """See `Capture.record`. What cannot be recorded, for want of memory say, is called anew each time."""
        with torch.cuda.device(self._device):
            here, (stream,) = torch.cuda.current_stream(self._device), self._streams
            stream.wait_stream(here)
            if torch.cuda.mem_get_info(self._device)[0] < ROOM:
                torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved(self._device)
            try:
                with torch.cuda.stream(stream):
                    graph = self._recorded(fn)
            except RuntimeError as why:
                log.warning("A pass is not recorded, and slower than it could be: %s", str(why).splitlines()[0])
                self._streams.clear()  # it may still be recording
                torch.cuda.empty_cache()
                self._begin()
                return partial(self.once, fn)
            here.wait_stream(stream)
            self._taken += max(0, torch.cuda.memory_reserved(self._device) - before)

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

    def once(self, fn: Callable[[], None]) -> None:
        with torch.cuda.device(self._device):
            fn()

    def _graph(self, fn: Callable[[], Any]) -> Any:
        """The work of `fn` as a graph: not by `torch.cuda.graph`, which empties the allocator's cache at each use."""
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

    def keep_order(self) -> None:
        here = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last != here:
            here.wait_stream(self._last)
        self._last = here

    def staging(self, words: int) -> Tensor:
        """See `Capture.staging`: pinned, so that sending does not wait for the device."""
        return torch.zeros(words, dtype=torch.long, pin_memory=True, device="cpu")

    def wait_until_sent(self) -> None:
        self._sent.synchronize()

    def send(self, staged: Tensor, to: Tensor) -> None:
        to.copy_(staged, non_blocking=True)
        self._sent.record(torch.cuda.current_stream(self._device))

    @property
    def nbytes(self) -> int:
        """See `Capture.nbytes`: what the pool has taken from the device so far."""
        return self._taken


def capture_for(device: torch.device) -> Capture:
    """CUDA graphs where the device has them."""
    return CudaCapture(device) if device.type == "cuda" else CallAgain()
