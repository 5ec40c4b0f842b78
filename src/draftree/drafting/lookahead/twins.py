"""What the two twins of the trie share: options, constants, and the calls that both answer.

It lives apart so that neither twin imports the other, and so that the numbers handed through ctypes are named
once.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from draftree.errors import LARGEST, check_least, did_you_mean

MODES = {"hierarchical": 0, "parallel": 1, "single": 2}
FROM_PROMPT, FROM_OUTPUT = 1, 2
SOURCES = {"prompt": FROM_PROMPT, "output": FROM_OUTPUT, "mix": FROM_PROMPT | FROM_OUTPUT}
NO_PARENT = -1

SCAN = 256
"""Children of one node that retrieval looks at, in each forest: bounds the cost of a key like the comma."""

SMOOTHING = 2.0
"""Hits added to a parent behind one token before its children's share is taken: one of one is not certainty."""

MAX_TOKEN = 2**31 - 1
ONE_HIT = 256  # counts are fixed point, so that halving is exact in both twins
MAX_COUNT = 1 << 31
MOST = {  # of the options that are counts
    **dict.fromkeys(("branch_length", "decoding_length", "max_query_length"), LARGEST),
    "min_nodes": MAX_TOKEN,
    "capacity": 2**20,
    "max_nodes": 2**30,  # more could not be numbered
}

Arrays = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32], NDArray[np.uint8]]
"""tokens, parents, logp, source of a draft."""

Dump = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.uint32], NDArray[np.uint32], int]
"""index, token, parent, count, stamp of every output node, and the clock."""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class TrieOptions:
    """How a trie stores and retrieves; ValueError for an option out of range.

    Attributes:
        branch_length: tokens after a key, the greatest depth of a draft (paper: 12 alone, 8 in a batch).
        decoding_length: the usual number of nodes of a draft; only scales `capacity`.
        max_query_length: longest context suffix that is looked up, in tokens.
        prompt_weight: hits that one prompt hit is worth (the paper's branch weighting).
        min_nodes: fewer found nodes than this shorten the suffix (N_m of Algorithm 1; default: `branch_length`).
        capacity: nodes per live key, in units of `decoding_length` (paper, table 4: 16).
        max_nodes: absolute bound of a forest; 38 bytes a node in the C twin once it is full.
        prune, eliminate: the paper's table 3 switches; without eliminating, prompts share a forest that stays.
        eos_token_ids: a branch ends with the first of these; none starts with one.
    """

    branch_length: int = 12
    decoding_length: int = 64
    max_query_length: int = 4
    prompt_weight: float = 4.0
    min_nodes: int | None = None
    capacity: int = 16
    max_nodes: int = 2**20
    prune: bool = True
    eliminate: bool = True
    eos_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.min_nodes is None:
            object.__setattr__(self, "min_nodes", self.branch_length)
        for name, most in MOST.items():
            if getattr(self, name) is None:
                raise ValueError(f"{name} is None: give a whole number.")
            check_least(1, most, **{name: getattr(self, name)})
            object.__setattr__(self, name, int(getattr(self, name)))  # NumPy's numbers are none of JSON's
        weight = self.prompt_weight
        if not isinstance(weight, int | float | np.number) or not 1e-6 <= weight <= 1e6:
            raise ValueError(f"prompt_weight={repr(weight)} must be a number from 1e-6 to 1e6; 1 means no weighting.")
        object.__setattr__(self, "prompt_weight", float(weight))
        for name in ("prune", "eliminate"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={repr(getattr(self, name))} must be True or False.")
        object.__setattr__(self, "eos_token_ids", tuple(checked_ids(self.eos_token_ids, "eos_token_ids")))

    @property
    def per_key(self) -> int:
        """Most nodes for each live key."""
        return self.capacity * self.decoding_length


def chosen(name: str, value: str, valid: dict[str, _T]) -> _T:
    """What `value` stands for; ValueError names the nearest one where there is none of that name."""
    if value not in valid:
        raise ValueError(f"{name}={value!r} is unknown: choose {', '.join(valid)}.{did_you_mean(value, valid)}")
    return valid[value]


def checked_ids(tokens: Sequence[int], name: str) -> list[int]:
    """Plain ints within what a node can hold."""
    try:
        if hasattr(tokens, "tolist"):
            tokens = tokens.tolist()
        checked = [operator.index(token) for token in tokens]
    except TypeError:
        raise ValueError(f"{name} must be one flat sequence of token ids (whole numbers).") from None
    if checked and (min(checked) < 0 or max(checked) > MAX_TOKEN):
        raise ValueError(f"{name} holds an id outside 0..{MAX_TOKEN}: give ids as the tokenizer numbers them.")
    return checked
