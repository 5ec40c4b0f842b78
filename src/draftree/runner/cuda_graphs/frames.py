"""The shapes of recorded passes, and their inputs in buffers that stay in place.

A recorded pass can be replayed only with the same shapes and memory. So rows are rounded up to buckets, the
number of requests to powers of two and three quarters of them, and the KV positions that attention reads to bands. No
real row sees rows that pad a bucket; their keys and values lie behind those of the real rows. All inputs of a pass lie
in one packed tensor, so that one copy brings them to the device.

CUDA graphs behind one interface: work on a device is recorded once and replayed without Python.

A recorded function reads and writes tensors that stay in place. The caller of a replay fills its inputs and reads its
outputs.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftree.runner.kv.cache import BLOCK
from draftree.runner.plan import Segment

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
    """CUDA graphs that share one memory pool, since one graph is replayed at a time."""

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


BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # rows of a request
MOST_ROWS = 512  # of a request in recorded passes, unless each row has to attend alone
MOST_IN_ALL = 2048  # rows of all requests: more keep a device busy by themselves, and a recording keeps their memory
MOST_EXACT = 4096  # KV positions up to which passes by torch's attention are recorded: each block more is a frame there
MOST_COVERED = 2048  # most KV positions that a frame's `visible` covers
MOST_ADDED = 64  # rows of requests that pad a batch: so many take almost no time
MOST_KERNEL_ROWS = 128  # rows of all requests up to which draftree's kernels are as fast as torch's


def bucket_of(rows: int) -> int | None:
    """Return the smallest bucket that holds so many rows; None where they are too many."""
    return next((bucket for bucket in BUCKETS if rows <= bucket), None)


def batch_of(batch: int, rows: int) -> int:
    """Return the number of requests in the recording for `batch` requests of so many rows.

    It is a power of two or three quarters of one, so that rounding crosses none of the bounds of rows in all. A number
    that would add many rows stays as it is.
    """
    above = 1 << (batch - 1).bit_length()
    rounded = above * 3 // 4 if batch <= above * 3 // 4 else above
    return batch if (rounded - batch) * rows > MOST_ADDED else rounded


def by_torch(rows: int, row_by_row: bool) -> bool:
    """Return whether torch's products and attention, in which rows may depend on each other, are the faster ones."""
    return rows > MOST_KERNEL_ROWS and not row_by_row


def band_of(needed: int, capacity: int, *, exact: bool) -> int:
    """Return the number of KV positions that attention reads: two sizes for each doubling, and at most `capacity`.

    With `exact` it is `needed` in whole blocks: torch may sum otherwise over another number of positions, and that must
    not depend on the capacity, which other requests have a part in.
    """
    if exact:
        return -(-needed // BLOCK) * BLOCK
    band = BLOCK
    while band < needed:
        step = 1 << (band.bit_length() - 1)
        band += step // 2 if step > BLOCK else BLOCK
    return min(band, capacity)


class Frame(NamedTuple):
    """The shape of a pass through some layers; passes with the same frame and cache replay the same recording."""

    batch: int  # requests, B, see `batch_of`
    rows: int  # of each of them, R, a bucket
    band: int  # KV positions that attention reads, K
    covered: int  # KV positions that `visible` covers, T: rows of the pass, and committed positions before them
    prefix: int  # KV positions of the deep prefix
    layers: tuple[int, int]  # the first layer, and the one behind the last
    taps: tuple[int, ...]  # layers in between whose incoming states are returned
    injects: bool  # whether some rows enter as embeddings
    heads: int  # how many neighbouring rows get logits, a bucket; 0 for none
    row_by_row: bool  # whether each row attends in the arithmetic of a pass of its own
    # Whether torch attends and the requests are in the first slots, which are read in place; other slots are gathered
    # for it.
    leading: bool = False


class PassInputs(NamedTuple):
    """The inputs of a pass of a frame, as views of one packed tensor."""

    slots: Any  # [B], of the requests
    starts: Any  # [B], the KV position at which each request's rows begin
    begins: Any  # [B], the first KV position that `visible` covers
    ids: Any  # [B, R], tokens
    positions: Any  # [B, R]
    head_start: Any  # [1], the first row that gets logits
    visible: Any  # bool [B, R, T]
    on_prefix: Any  # bool [B, R], rows that see the deep prefix
    injected: Any  # bool [B, R], rows that enter as embeddings


class Packed(NamedTuple):
    """The inputs of one frame, on the device and where they are prepared on the CPU."""

    there: Tensor  # packed tensor on the device
    inputs: PassInputs  # its parts, tensors
    staged: Tensor  # packed tensor on the CPU, of the same size
    given: PassInputs  # its parts, arrays


class Buffers:
    """Memory that all recordings of a runner share, since one is replayed at a time.

    A recording keeps the views that it was made with; a larger one gets larger buffers.
    """

    def __init__(self, capture: Capture, device: torch.device) -> None:
        self._capture, self._device = capture, device
        self._held: dict[str, Tensor] = {}
        self._staged = capture.staging(0)

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the beginning of the buffer `name`, in this shape."""
        count = int(np.prod(shape))
        held = self._held.get(name)
        if held is None or held.numel() < count or held.dtype != dtype:
            held = self._held[name] = torch.zeros(count, dtype=dtype, device=self._device)
        return held[:count].view(*shape)

    def packed(self, frame: Frame) -> Packed:
        """Return the memory of a frame's inputs."""
        flags = frame.batch * frame.rows * (frame.covered + 2)
        words = _words(frame.batch, frame.rows)[0] + -(-flags // 8)
        there = self.take("inputs", (words,), torch.int64)
        if self._staged.numel() < words:
            self._staged = self._capture.staging(words)
        staged = self._staged[:words]
        given = PassInputs(*(part.numpy() for part in _inputs_of(staged, frame)))
        return Packed(there, _inputs_of(there, frame), staged, given)

    def fill(
        self,
        packed: Packed,
        segment: Segment,
        first: int,
        starts: Sequence[int],
        tokens: Tensor | None,
        injected: int = 0,
        head_start: int = 0,
    ) -> None:
        """Fill in the inputs of one pass; a single copy to the device where all of them lie on the CPU.

        Requests that pad the batch write behind the rows of the request with the shortest context.

        Args:
            segment: n <= R rows of b <= B requests.
            starts: KV position of each request's first row.
            tokens: LongTensor [b, n]; None where rows come from the layers before.
            injected: how many rows, the last ones, enter as embeddings.
            head_start: the first row that gets logits.
        """
        there, inputs, staged, given = packed
        self._capture.wait_until_sent()  # the copy of the last inputs may still be under way
        staged.zero_()
        real, n, wide = segment.visible.shape
        (batch, rows), more = given.ids.shape, wide - n
        given.slots[:real], given.starts[:real] = np.arange(first, first + real), starts
        if real < batch:
            shortest = int(np.argmin(starts))
            given.slots[real:], given.starts[real:] = first + shortest, starts[shortest] + rows
        np.subtract(given.starts, more, out=given.begins)
        given.head_start[0] = head_start
        padding = np.arange(rows)
        given.visible[:, padding[n:], more + padding[n:]] = True
        given.visible[real:, padding, more + padding] = True
        given.injected[:, n - injected : n] = True
        parts: list[tuple[Tensor | None, np.ndarray, Tensor]] = [  # value, place on the CPU, place on the device
            (tokens, given.ids[:real, :n], inputs.ids[:real, :n]),
            (segment.positions, given.positions[:real, :n], inputs.positions[:real, :n]),
            (segment.visible, given.visible[:real, :n, :wide], inputs.visible[:real, :n, :wide]),
            (segment.prefix_rows, given.on_prefix[:real, :n], inputs.on_prefix[:real, :n]),
        ]
        on_device = []  # made there by a drafter
        for value, place, place_on_device in parts:
            if value is not None and value.is_cpu:
                place[:] = value.numpy()
            elif value is not None:
                on_device.append((value, place_on_device))
        self._capture.send(staged, there)
        for value, place_on_device in on_device:
            place_on_device.copy_(value)


def _words(batch: int, rows: int) -> tuple[int, int]:
    """Return how many numbers the inputs are, and how many of them are reserved for each value of a request.

    The latter is even: kernels are compiled once for tensors that begin at a multiple of 16 bytes, and once more for
    others.
    """
    of_requests = batch + batch % 2
    return 3 * of_requests + 2 * batch * rows + 1, of_requests


def _inputs_of(packed: Tensor, frame: Frame) -> PassInputs:
    batch, rows, covered = frame.batch, frame.rows, frame.covered
    (words, of_requests), of_all = _words(batch, rows), batch * rows
    by_request, ids, positions, head_start = packed[:words].split([3 * of_requests, of_all, of_all, 1])
    slots, starts, begins = by_request.view(3, of_requests)[:, :batch]
    flags = packed[words:].view(torch.bool)[: of_all * (covered + 2)]
    visible, on_prefix, injected = flags.split([of_all * covered, of_all, of_all])
    return PassInputs(
        slots,
        starts,
        begins,
        ids.view(batch, rows),
        positions.view(batch, rows),
        head_start,
        visible.view(batch, rows, covered),
        on_prefix.view(batch, rows),
        injected.view(batch, rows),
    )
