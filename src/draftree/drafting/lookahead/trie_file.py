"""The file of a saved trie: flat, versioned, little-endian, checked; never a pickle.

Layout: magic, format version (uint32), header length (uint32), JSON header (tokenizer fingerprint, options,
number of nodes, clock), four columns (token, parent, count, stamp), SHA-256 of all before it. Parents stand
before their children and siblings oldest first, so a reader only appends. The digest tells damage, not intent: every
field is checked as well, here and for both twins, before any of it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftree.drafting.lookahead.twins import MAX_COUNT, NO_PARENT, ONE_HIT, Dump, TrieOptions
from draftree.files import is_whole, open_regular, parse_json

MAGIC = b"DRAFTRIE"
VERSION = 1
MOST_HEADER = 64 << 10  # bytes
_START = struct.Struct("<8sII")
_DIGEST = hashlib.sha256().digest_size
_COLUMNS = ("<i4", "<i4", "<u4", "<u4")  # token, parent, count, stamp
_NODE = sum(np.dtype(kind).itemsize for kind in _COLUMNS)


def packed(tokenizer_fingerprint: str, options: TrieOptions, dump: Dump) -> bytes:
    """The content of a file."""
    at, *rest, tick = dump
    columns = _in_file_order(at, *rest)
    header = {"tokenizer": tokenizer_fingerprint, "options": asdict(options), "nodes": len(columns[0]), "tick": tick}
    text = json.dumps(header).encode()
    body = _START.pack(MAGIC, VERSION, len(text)) + text
    body += b"".join(column.astype(dtype).tobytes() for column, dtype in zip(columns, _COLUMNS, strict=True))
    return body + hashlib.sha256(body).digest()


def read(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a trie file, or the first bytes of another file, which `unpacked` refuses.

    Raises:
        ValueError: it is not a regular file.
        OSError: there is no such file, or it cannot be read.
    """
    with open_regular(path) as file:
        start = file.read(_START.size)
        if len(start) < _START.size or not start.startswith(MAGIC):
            return start
        header = file.read(min(_START.unpack(start)[2], MOST_HEADER))
        try:
            nodes = parse_json(header)["nodes"]
        except (ValueError, TypeError, KeyError):
            nodes = 0
        most = nodes * _NODE + _DIGEST + 1 if is_whole(nodes, 0) else 0  # one byte more shows that there are others
        return start + header + file.read(min(most, os.fstat(file.fileno()).st_size))


def unpacked(content: bytes, tokenizer_fingerprint: str, path: object) -> tuple[TrieOptions, Dump]:
    """Options and nodes of what `packed` made.

    Args:
        content: of the file.
        tokenizer_fingerprint: of the tokenizer that its ids must be of.
        path: what messages call the file.

    Raises:
        ValueError: what is wrong and what to do.
    """
    data = memoryview(content)
    if len(data) < _START.size or bytes(data[: len(MAGIC)]) != MAGIC:
        raise ValueError(f"{path} is not a draftree trie file: give one that Trie.save wrote.")
    _, version, header_length = _START.unpack_from(data)
    if version > VERSION:
        raise ValueError(f"{path} has trie format {version}, this draftree reads up to {VERSION}: update draftree.")
    body, digest = data[:-_DIGEST], data[-_DIGEST:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError(f"{path} is damaged or cut short: save the trie again.")
    offset = _START.size + header_length
    try:
        header = parse_json(bytes(body[_START.size : offset]))
        options, n = _checked(header, len(body) - offset)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"The header of {path} is not one that Trie.save writes ({error}): save the trie again."
        ) from None
    if header["tokenizer"] != tokenizer_fingerprint:
        raise ValueError(
            f"{path} was saved with tokenizer {header['tokenizer']!r}, not {tokenizer_fingerprint!r}: "
            "load it with that one or start a new trie."
        )
    columns: list[NDArray[Any]] = []
    for dtype in _COLUMNS:
        column = np.frombuffer(body, dtype, n, offset)
        columns.append(column.astype(column.dtype.newbyteorder("=")))
        offset += column.nbytes
    tokens, parents, counts, stamps = columns
    wrong = _wrong(tokens, parents, counts, stamps, options.branch_length)
    if wrong is not None:
        raise ValueError(f"{path} is no trie of Trie.save's, {wrong}: save the trie again.")
    # Stamps tell an order and nothing else, so the clock begins anew: whatever stands in the file, it is ahead of them.
    times, order = np.unique(stamps, return_inverse=True)
    return options, (np.arange(n, dtype=np.int32), tokens, parents, counts, (order + 1).astype(np.uint32), len(times))


def _checked(header: Any, left: int) -> tuple[TrieOptions, int]:
    """Options and number of nodes of a header behind which `left` bytes follow."""
    if not isinstance(header, dict) or not isinstance(header["options"], dict):
        raise ValueError("it is no JSON object with options")
    if not isinstance(header["tokenizer"], str) or len(header["tokenizer"]) > 500:
        raise ValueError("tokenizer is no name")
    options, n = TrieOptions(**header["options"]), header["nodes"]
    if not is_whole(n, 0, options.max_nodes) or n * _NODE != left:
        raise ValueError("nodes is not the number of nodes that follow, or more than max_nodes")
    return options, n


def _wrong(
    tokens: NDArray[Any], parents: NDArray[Any], counts: NDArray[Any], stamps: NDArray[Any], deepest: int
) -> str | None:
    """What no trie has in its columns; None where all is well."""
    rows = np.arange(len(tokens))
    if (tokens < 0).any():
        return "a token is negative"
    if ((parents < NO_PARENT) | (parents >= rows)).any():
        return "a node does not stand behind its parent"
    if ((counts < 1) | (counts >= MAX_COUNT + ONE_HIT)).any():
        return "a count is out of range"
    paths = parents.astype(np.int64) << 32 | tokens
    if len(np.unique(paths)) != len(paths):
        return "a node has two children of one token"
    depth = _depths(parents)
    if depth.max(initial=0) > deepest:
        return "a branch is longer than branch_length"
    if (np.diff(depth) < 0).any() or ((np.diff(stamps.astype(np.int64)) <= 0) & (np.diff(depth) == 0)).any():
        return "nodes are not in the order of depth and time"
    return None


def _in_file_order(
    at: NDArray[Any], tokens: NDArray[Any], parents: NDArray[Any], counts: NDArray[Any], stamps: NDArray[Any]
) -> list[NDArray[Any]]:
    order = np.argsort(at)
    at, tokens, parents, counts, stamps = (column[order] for column in (at, tokens, parents, counts, stamps))
    rows = np.where(parents == NO_PARENT, NO_PARENT, np.searchsorted(at, parents)).astype(np.int32)
    depth = _depths(rows)
    order = np.lexsort((stamps, depth))
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    renumbered = np.where(rows == NO_PARENT, NO_PARENT, place[rows]).astype(np.int32) if len(rows) else rows
    return [tokens[order], renumbered[order], counts[order], stamps[order]]


def _depths(parents: NDArray[Any]) -> NDArray[Any]:
    """How many nodes stand above each. Each round looks twice as far up, so long branches are no trouble."""
    depth, above = (parents != NO_PARENT).astype(np.int32), parents
    while (above != NO_PARENT).any():
        depth = depth + np.where(above == NO_PARENT, 0, depth[above])
        above = np.where(above == NO_PARENT, NO_PARENT, above[above])
    return depth
