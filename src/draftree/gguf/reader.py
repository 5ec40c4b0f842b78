"""Read the metadata of a GGUF file and the places of its tensors, whose bytes are mapped.

The package gguf makes a Python object of every token and merge, which takes seconds for a small model's file. This
reader makes lists in a fifth of a second. A file that is shorter than its tensors is refused.

Two formats have no products of their own and are rewritten as blocks of a format that has them, with the same numbers:
Q3_K as Q6_K (numbers of 3 bits, scales for 16 of them), IQ4_NL as Q8_0 (each number of 4 bits selects one of sixteen
bytes). They take the memory of the other format.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # of tensors, where a file does not say
# Types of values by number, as `struct` has them; 8 is a string and 9 a list.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, LIST = 8, 9
LENGTH_BYTES = 8  # of a string's length
# Types of tensors by number: name, numbers of a block, its bytes.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    30: ("BF16", 1, 2),
}


FLOATS: dict[str, Any] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}


class TensorInfo(NamedTuple):
    """One tensor of a file."""

    kind: str  # The type's name; "type 99" for one that is not known.
    shape: tuple[int, ...]  # In torch's order, the inputs last.
    data: NDArray[np.uint8]  # Uint8, its bytes in the file; empty for a type that is not known.

    def floats(self) -> NDArray[np.float32]:
        """Return the numbers of a tensor whose type is one of `FLOATS`, in float32, as a copy."""
        return self.data.view(FLOATS[self.kind]).reshape(self.shape).astype(np.float32)


class GgufFile(NamedTuple):
    """The metadata of a file by key, and its tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_gguf(path: Path) -> GgufFile:
    """Read a file's metadata, and where its tensors lie.

    Raises:
        ValueError: it is no GGUF file, of an unknown version, or cut short.
    """
    reader = _Reader(path)
    if reader.take(4) != MAGIC:
        raise ValueError(f"{str(path)!r} does not begin as a GGUF file: copy or download it again.")
    version, tensors, entries = reader.numbers("IQQ")
    if version not in VERSIONS:
        raise ValueError(f"{str(path)!r} is of GGUF version {version}, and this draftree reads 2 and 3.")
    metadata = {reader.string(): reader.value(*reader.numbers("I")) for _ in range(entries)}
    table = [reader.entry() for _ in range(tensors)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    start = -(-reader.at // alignment) * alignment
    found = {name: reader.tensor(start, shape, kind, offset) for name, shape, kind, offset in table}
    return GgufFile(metadata, found)


class _Reader:
    """Goes through a file from its begin."""

    def __init__(self, path: Path) -> None:
        self._path, self.at = path, 0
        self._bytes: NDArray[np.uint8] = np.memmap(path, mode="r", dtype=np.uint8)
        self._view = memoryview(self._bytes)  # type: ignore[arg-type]

    def cut(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Return bytes of the file, mapped."""
        if end > len(self._bytes):
            raise ValueError(f"{str(self._path)!r} is damaged or cut short: download it again.")
        return self._bytes[begin:end]

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        self.at += count
        return self.cut(self.at - count, self.at).tobytes()

    def numbers(self, form: str) -> tuple[Any, ...]:
        """Return the next numbers, as `struct` calls them."""
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))

    def string(self) -> str:
        """Return the next string; bytes that are no UTF-8 are replaced."""
        return self.take(*self.numbers("Q")).decode("utf-8", "replace")

    def strings(self, count: int) -> list[str]:
        """Return the next strings: a vocabulary, in a loop that is quick."""
        view, at, found = self._view, self.at, []
        for _ in range(count):
            begin = at + LENGTH_BYTES
            at = begin + int.from_bytes(view[at:begin], "little")
            found.append(str(view[begin:at], "utf-8", "replace"))
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        """Return the next value of metadata, of that type."""
        if kind == STRING:
            return self.string()
        if kind != LIST:
            return self.numbers(NUMBERS[kind])[0]
        kind, count = self.numbers("IQ")
        if kind == STRING:
            return self.strings(count)
        dtype = np.dtype("<" + NUMBERS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return the next tensor's name, shape, type and offset."""
        name = self.string()
        (dimensions,) = self.numbers("I")
        shape = self.numbers(f"{dimensions}Q")
        kind, offset = self.numbers("IQ")
        return name, tuple(reversed(shape)), kind, offset

    def tensor(self, start: int, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        """Return a tensor whose bytes lie so far behind the start of all."""
        if kind not in TYPES:
            return TensorInfo(f"type {kind}", shape, self._bytes[:0])
        form, numbers, size = TYPES[kind]
        begin = start + offset
        return TensorInfo(form, shape, self.cut(begin, begin + prod(shape) // numbers * size))


Bytes = NDArray[np.uint8]
LEVELS = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8)  # of IQ4_NL


def _from_q3(blocks: Bytes) -> Bytes:
    """Convert [n, 110] to [n, 210]: third bits, two lower bits, scales of 6 bits, and the scale of these."""
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
    """Convert [n, 18] to [n, 34]: a scale, and numbers whose first half lies in the low bits of bytes."""
    chosen = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
    return np.concatenate([blocks[:, :2], LEVELS[chosen].view(np.uint8)], axis=1)


# By a format: the other one, bytes of a block, and how blocks are written.
OTHERS: dict[str, tuple[str, int, Callable[[Bytes], Bytes]]] = {
    "Q3_K": ("Q6_K", 110, _from_q3),
    "IQ4_NL": ("Q8_0", 18, _from_levels),
}


def recoded(kind: str, rows: Bytes) -> tuple[str, Bytes]:
    """Return rows of blocks in a format that has products, and its name; others as they are."""
    if kind not in OTHERS:
        return kind, rows
    other, size, write = OTHERS[kind]
    return other, write(rows.reshape(-1, size)).reshape(len(rows), -1)
