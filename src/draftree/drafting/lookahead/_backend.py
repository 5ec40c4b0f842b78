"""What the two twins of the trie share: settings, constants and the shape of their answers.

It lives apart so that neither twin imports the other, and so that the numbers handed through ctypes are named
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from draftree.tree import TokenTree

MODES = {"hierarchical": 0, "parallel": 1, "single": 2}
FROM_PROMPT, FROM_OUTPUT = 1, 2
SOURCES = {"prompt": FROM_PROMPT, "output": FROM_OUTPUT, "mix": FROM_PROMPT | FROM_OUTPUT}
NO_PARENT = -1

Arrays = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32], NDArray[np.uint8]]
"""tokens, parents, logp, source of a draft."""

Dump = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.uint32], NDArray[np.uint32], int]
"""index, token, parent, count, stamp of every output node, and the clock."""


@dataclass(frozen=True)
class Settings:
    """Checked options of a trie, as both twins read them."""

    branch_length: int
    max_query_length: int
    min_nodes: int
    prompt_weight: float
    smoothing: float
    scan: int
    per_key: int
    max_nodes: int
    prune: bool
    eliminate: bool
    eos_token_ids: tuple[int, ...]


def in_order(draft: Arrays, root: int) -> TokenTree:
    """A draft as a tree below `root`, in falling order of probability."""
    tokens, parents, logp, source = draft
    order = np.argsort(-logp, kind="stable")  # a parent precedes a child of equal probability
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    parents = np.where(parents < 0, NO_PARENT, place[parents])[order]
    return TokenTree.from_arrays(tokens[order], parents, logp[order], source[order], root=root)


class Backend(Protocol):
    """The calls of a twin; `slot` is the number that `begin` gave."""

    def begin(self, tokens: Sequence[int]) -> int: ...
    def extend(self, slot: int, tokens: Sequence[int]) -> None: ...
    def retrieve(self, slot: int, budget: int, depth: int, mode: int, sources: int) -> Arrays: ...
    def draft(
        self,
        slots: Sequence[int],
        news: Sequence[Sequence[int]],
        roots: Sequence[int],
        budgets: Sequence[int],
        depths: Sequence[int],
        mode: int,
        sources: int,
    ) -> TokenTree: ...
    def end(self, slot: int) -> None: ...
    def warm(self, tokens: Sequence[int]) -> None: ...
    def clear(self) -> None: ...
    def dump(self) -> Dump: ...
    def restore(self, dump: Dump) -> None: ...
    @property
    def nodes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
