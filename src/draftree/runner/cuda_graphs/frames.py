"""The shapes of recorded passes, and their inputs in buffers that stay in place.

A recorded pass can be replayed only with the same shapes and memory. So rows are rounded up to buckets, the
number of requests to powers of two and three quarters of them, and the KV positions that attention reads to bands. No
real row sees rows that pad a bucket; their keys and values lie behind those of the real rows. All inputs of a pass lie
in one packed tensor, so that one copy brings them to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftree.runner.cuda_graphs.capture import Capture
from draftree.runner.kv.cache import BLOCK
from draftree.runner.plan import Segment

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

    Args:
        capture: makes recordings, and copies inputs to the device.
        device: where passes run.
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
            packed: memory of the pass's frame.
            segment: n <= R rows of b <= B requests.
            first: slot of the first request.
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
