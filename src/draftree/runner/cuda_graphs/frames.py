"""Passes of fixed shapes: how many rows and columns, and the inputs of a pass in buffers that stay in place.

A recorded pass can be replayed only with the same shapes and the same memory. So numbers of rows are rounded up to
buckets, those of requests too, and the columns that attention reads to bands. Rows that pad a bucket see themselves and
the context, no real row sees them, and their keys and values lie behind those of the real rows, where nothing is kept.
All that differs between two passes of a frame lies in one packed tensor, which takes one copy to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftree.runner.cuda_graphs.capture import Capture
from draftree.runner.kv.cache import BLOCK
from draftree.runner.plan import Segment

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # rows of a request
MOST_ROWS = 512  # of a request in passes that are recorded, unless each row has to attend alone
MOST_IN_ALL = 2048  # rows of all requests: more keep a device busy by themselves, and a recording keeps their memory
MOST_EXACT = (
    4096  # columns up to which passes by torch's attention are recorded: each number of blocks is a frame there
)
MOST_COVERED = 2048  # most columns that a frame's `visible` covers
MOST_ADDED = 64  # rows of requests that pad a batch: so many take next to no time
MOST_KERNEL_ROWS = 128  # rows of all requests up to which draftree's kernels are as fast as torch's


def bucket_of(rows: int) -> int | None:
    """The smallest bucket that holds so many rows; None where they are too many."""
    return next((bucket for bucket in BUCKETS if rows <= bucket), None)


def batch_of(batch: int, rows: int) -> int:
    """How many requests of so many rows a recording is made for: a power of two, or three quarters of one.

    So rounding up takes no pass over one of the bounds of rows in all. Where it would add many rows, it is not done.
    """
    above = 1 << (batch - 1).bit_length()
    rounded = above * 3 // 4 if batch <= above * 3 // 4 else above
    return batch if (rounded - batch) * rows > MOST_ADDED else rounded


def by_torch(rows: int, row_by_row: bool) -> bool:
    """Whether torch's products and attention are faster for so many rows in all; these may depend on each other."""
    return rows > MOST_KERNEL_ROWS and not row_by_row


def band_of(columns: int, capacity: int, *, exact: bool) -> int:
    """Columns that attention reads where `columns` are needed: two sizes for each doubling, and at most `capacity`.

    With `exact` as many as are needed, in whole blocks: torch may sum otherwise over another number of columns, and
    that must not hang on the capacity, which other requests have a part in.
    """
    if exact:
        return -(-columns // BLOCK) * BLOCK
    band = BLOCK
    while band < columns:
        step = 1 << (band.bit_length() - 1)
        band += step // 2 if step > BLOCK else BLOCK
    return min(band, capacity)


class Frame(NamedTuple):
    """The shape of a pass through some layers; passes with the same frame and cache replay the same recording.

    Attributes:
        batch: requests, B, see `batch_of`.
        rows: of each of them, R, a bucket.
        band: columns that attention reads, K.
        covered: columns that `visible` covers, T: rows of the pass, and committed columns before them.
        prefix: columns of the deep prefix.
        layers: the first layer, and the one behind the last.
        taps: layers in between whose incoming states are returned.
        injects: whether some rows enter as embeddings.
        heads: how many neighbouring rows get logits, a bucket; 0 for none.
        row_by_row: whether each row attends in the arithmetic of a pass of its own.
        leading: whether torch attends and the requests are in the first slots, which are read where they lie; others
            are gathered for it.
    """

    batch: int
    rows: int
    band: int
    covered: int
    prefix: int
    layers: tuple[int, int]
    taps: tuple[int, ...]
    injects: bool
    heads: int
    row_by_row: bool
    leading: bool = False


class PassInputs(NamedTuple):
    """The inputs of a pass of a frame, as views of one packed tensor.

    Attributes:
        slots: [B], of the requests.
        starts: [B], the column at which each request's rows begin.
        begins: [B], the first column that `visible` covers.
        ids: [B, R], tokens.
        positions: [B, R].
        visible: bool [B, R, T].
        on_prefix: bool [B, R], rows that see the deep prefix.
        head_start: [1], the first row that gets logits.
        injected: bool [B, R], rows that enter as embeddings.
    """

    slots: Tensor
    starts: Tensor
    begins: Tensor
    ids: Tensor
    positions: Tensor
    head_start: Tensor
    visible: Tensor
    on_prefix: Tensor
    injected: Tensor


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
        """The beginning of the buffer `name`, in this shape."""
        count = int(np.prod(shape))
        held = self._held.get(name)
        if held is None or held.numel() < count or held.dtype != dtype:
            held = self._held[name] = torch.zeros(count, dtype=dtype, device=self._device)
        return held[:count].view(*shape)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(held.numel() * held.element_size() for held in self._held.values())

    def packed(self, frame: Frame) -> tuple[Tensor, PassInputs]:
        """The packed tensor of a frame, and the views into it."""
        words, _ = _words(frame.batch, frame.rows)
        flags = frame.batch * frame.rows * (frame.covered + 2)
        packed = self.take("inputs", (words + -(-flags // 8),), torch.int64)
        return packed, _inputs_of(packed, frame)

    def fill(
        self,
        to: Tensor,
        inputs: PassInputs,
        segment: Segment,
        first: int,
        starts: Sequence[int],
        tokens: Tensor | None,
        injected: int = 0,
        head_start: int = 0,
    ) -> None:
        """Fill in the inputs of one pass; a single copy to the device where all of them lie on the CPU.

        Requests that pad the batch write behind the rows of the one with the shortest context.

        Args:
            to, inputs: as `packed` returned them.
            segment: n <= R rows of b <= B requests.
            first: slot of the first request.
            starts: column of each request's first row.
            tokens: LongTensor [b, n]; None where rows come from the layers before.
            injected: how many rows, the last ones, enter as embeddings.
            head_start: the first row that gets logits.
        """
        real, n, wide = segment.visible.shape
        (batch, rows), more = inputs.ids.shape, wide - n
        if self._staged.numel() < to.numel():
            self._staged = self._capture.staging(to.numel())
        self._capture.wait_until_sent()  # the copy of the last inputs may still be under way
        words, of_requests = _words(batch, rows)
        staged = self._staged[: to.numel()]
        whole = staged.numpy()
        numbers, flags = whole[:words], whole[words:].view(np.bool_)
        whole[:] = 0
        slots, begins_of_rows, begins = numbers[: 3 * of_requests].reshape(3, of_requests)[:, :batch]
        slots[:real], begins_of_rows[:real] = np.arange(first, first + real), starts
        if real < batch:
            shortest = int(np.argmin(starts))
            slots[real:], begins_of_rows[real:] = first + shortest, starts[shortest] + rows
        np.subtract(begins_of_rows, more, out=begins)
        ids, positions = numbers[3 * of_requests : -1].reshape(2, batch, rows)
        numbers[-1] = head_start
        shape = inputs.visible.shape
        visible = flags[: batch * rows * shape[2]].reshape(shape)
        padding = np.arange(rows)
        visible[:, padding[n:], more + padding[n:]] = True
        visible[real:, padding, more + padding] = True
        on_prefix, enters = flags[visible.size : visible.size + 2 * batch * rows].reshape(2, batch, rows)
        if injected:
            enters[:, n - injected : n] = True
        parts: list[tuple[Tensor | None, np.ndarray, Tensor]] = [  # given, place on the CPU, place on the device
            (tokens, ids[:real, :n], inputs.ids[:real, :n]),
            (segment.positions, positions[:real, :n], inputs.positions[:real, :n]),
            (segment.visible, visible[:real, :n, :wide], inputs.visible[:real, :n, :wide]),
            (segment.prefix_rows, on_prefix[:real, :n], inputs.on_prefix[:real, :n]),
        ]
        on_device = []  # made there by a drafter
        for given, place, place_on_device in parts:
            if given is None:
                continue
            if given.is_cpu:
                place[:] = given.numpy()
            else:
                on_device.append((given, place_on_device))
        self._capture.send(staged, to)
        for given, place_on_device in on_device:
            place_on_device.copy_(given)


def _words(batch: int, rows: int) -> tuple[int, int]:
    """How many numbers the inputs are, and how many of them there is room for of each kind that requests have one of.

    That is even: kernels are compiled for tensors that begin at a multiple of 16 bytes, and others for any that do not.
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
