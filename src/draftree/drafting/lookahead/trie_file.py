"""The file of a saved trie: flat, versioned, little-endian, checked; never a pickle.

Layout: magic, format version (uint32), header length (uint32), JSON header (tokenizer fingerprint, options,
number of nodes, clock), four columns (token, parent, count, stamp), SHA-256 of all before it. Parents stand
before their children and siblings oldest first, so a reader only appends.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftree.drafting.lookahead.twins import NO_PARENT, Dump

MAGIC = b"DRAFTRIE"
VERSION = 1
_START = struct.Struct("<8sII")
_DIGEST = hashlib.sha256().digest_size
_COLUMNS = ("<i4", "<i4", "<u4", "<u4")  # token, parent, count, stamp


def write(path: str | os.PathLike[str], tokenizer_fingerprint: str, options: dict[str, Any], dump: Dump) -> None:
    """Writes a new file next to `path` and renames it, so a reader sees the old file or the whole new one."""
    at, *rest, tick = dump
    columns = _in_file_order(at, *rest)
    header = {"tokenizer": tokenizer_fingerprint, "options": options, "nodes": len(columns[0]), "tick": tick}
    text = json.dumps(header).encode()
    body = _START.pack(MAGIC, VERSION, len(text)) + text
    body += b"".join(column.astype(dtype).tobytes() for column, dtype in zip(columns, _COLUMNS, strict=True))
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(body + hashlib.sha256(body).digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read(path: str | os.PathLike[str], tokenizer_fingerprint: str) -> tuple[dict[str, Any], Dump]:
    """Options and nodes of a file that `write` made. ValueError tells what is wrong and what to do."""
    data = Path(path).read_bytes()
    if len(data) < _START.size or not data.startswith(MAGIC):
        raise ValueError(f"{path} is not a draftree trie file: give one that Trie.save wrote.")
    _, version, header_length = _START.unpack_from(data)
    if version > VERSION:
        raise ValueError(f"{path} has trie format {version}, this draftree reads up to {VERSION}: update draftree.")
    body, digest = data[:-_DIGEST], data[-_DIGEST:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError(f"{path} is damaged or cut short: save the trie again.")
    header = json.loads(body[_START.size : _START.size + header_length])
    if header["tokenizer"] != tokenizer_fingerprint:
        raise ValueError(
            f"{path} was saved with tokenizer {header['tokenizer']!r}, not {tokenizer_fingerprint!r}: "
            "load it with that one or start a new trie."
        )
    offset, n = _START.size + header_length, header["nodes"]
    columns: list[NDArray[Any]] = []
    for dtype in _COLUMNS:
        column = np.frombuffer(body, dtype, n, offset)
        columns.append(column.astype(column.dtype.newbyteorder("=")))
        offset += column.nbytes
    tokens, parents, counts, stamps = columns
    return header["options"], (np.arange(n, dtype=np.int32), tokens, parents, counts, stamps, header["tick"])


def _in_file_order(
    at: NDArray[Any],
    tokens: NDArray[Any],
    parents: NDArray[Any],
    counts: NDArray[Any],
    stamps: NDArray[Any],
) -> list[NDArray[Any]]:
    order = np.argsort(at)
    at, tokens, parents, counts, stamps = (column[order] for column in (at, tokens, parents, counts, stamps))
    rows = np.where(parents == NO_PARENT, NO_PARENT, np.searchsorted(at, parents)).astype(np.int32)
    depth = np.zeros(len(rows), np.int32)
    while True:
        deeper = np.where(rows == NO_PARENT, 0, depth[rows] + 1).astype(np.int32) if len(rows) else depth
        if np.array_equal(deeper, depth):
            break
        depth = deeper
    order = np.lexsort((stamps, depth))
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    renumbered = np.where(rows == NO_PARENT, NO_PARENT, place[rows]).astype(np.int32) if len(rows) else rows
    return [tokens[order], renumbered[order], counts[order], stamps[order]]
