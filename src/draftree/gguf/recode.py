"""Blocks of formats without products of their own, written as blocks of formats that have them, with the same numbers.

Q3_K has numbers of 3 bits with scales for 16 of them, as Q6_K has of 6 bits. IQ4_NL has numbers of 4 bits that choose
one of sixteen bytes, which Q8_0 holds as they are. The weights take the memory of the other format.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
LEVELS = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8)  # of IQ4_NL


def _from_q3(blocks: Bytes) -> Bytes:
    """[n, 110] to [n, 210]: third bits, two lower bits, scales of 6 bits, and what these are multiples of."""
    third, lower, packed, unit = np.split(blocks, [32, 96, 108], axis=1)
    bits = lower.reshape(-1, 2, 1, 32) >> np.array((0, 2, 4, 6), np.uint8).reshape(4, 1) & 3
    above = third.reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(8, 1) & 1
    # A number is 4 less than its bits say, and the other format's is 32 more than its own.
    numbers = (bits | above.reshape(bits.shape) << 2) + np.uint8(28)
    low = (numbers[:, :, :2] & 15) | (numbers[:, :, 2:] & 15) << 4
    high = np.bitwise_or.reduce((numbers >> 4) << np.array((0, 2, 4, 6), np.uint8).reshape(4, 1), axis=2)
    fours = packed[:, :8].reshape(-1, 1, 8) >> np.array((0, 4), np.uint8).reshape(2, 1) & 15
    twos = packed[:, 8:].reshape(-1, 1, 4) >> np.array((0, 2, 4, 6), np.uint8).reshape(4, 1) & 3
    scales = (fours.reshape(-1, 16) | twos.reshape(-1, 16) << 4) - np.uint8(32)  # as signed bytes
    count = len(blocks)
    return np.concatenate([low.reshape(count, -1), high.reshape(count, -1), scales, unit], axis=1)


def _from_levels(blocks: Bytes) -> Bytes:
    """[n, 18] to [n, 34]: a scale, and numbers whose first half lies in the low bits of bytes."""
    chosen = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
    return np.concatenate([blocks[:, :2], LEVELS[chosen].view(np.uint8)], axis=1)


# By a format: the other one, bytes of a block, and how blocks are written.
OTHERS: dict[str, tuple[str, int, Callable[[Bytes], Bytes]]] = {
    "Q3_K": ("Q6_K", 110, _from_q3),
    "IQ4_NL": ("Q8_0", 18, _from_levels),
}


def recoded(kind: str, rows: Bytes) -> tuple[str, Bytes]:
    """Return rows of blocks in a format that has products, and its name; others as they are.

    Args:
        kind: the format of the rows.
        rows: uint8 [outputs, bytes of a row].
    """
    if kind not in OTHERS:
        return kind, rows
    other, size, write = OTHERS[kind]
    return other, write(rows.reshape(-1, size)).reshape(len(rows), -1)
