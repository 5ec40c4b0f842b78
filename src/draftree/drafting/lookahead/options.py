"""Options of the trie, and checks of its arguments."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr
from typing import TypeVar

import numpy as np

from draftree.errors import LARGEST, check_least, did_you_mean

MODES = {"hierarchical": 0, "parallel": 1, "single": 2}
SOURCES = {"prompt": 1, "output": 2, "mix": 3}
SCAN = 256  # Children of a node that retrieval considers in each forest; it bounds the cost of frequent keys.
SMOOTHING = 2.0  # Hits added to a parent after one token before the shares of its children are taken.
MAX_TOKEN = 2**31 - 1
MOST = {  # Bounds of the integer options.
    **dict.fromkeys(("branch_length", "decoding_length", "max_query_length"), LARGEST),
    "min_nodes": MAX_TOKEN,
    "capacity": 2**20,
    "max_nodes": 2**30,
}

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class TrieOptions:
    """Options of a trie's store and retrieval.

    Attributes:
        branch_length: tokens after a key, the greatest depth of a draft (paper: 12 alone, 8 in a batch).
        decoding_length: the usual number of nodes of a draft; it only scales `capacity`.
        max_query_length: longest suffix of the context that is searched, in tokens.
        prompt_weight: hits that one prompt hit counts (the paper's branch weighting).
        min_nodes: with fewer nodes found, the suffix is shortened (N_m of Algorithm 1; default: `branch_length`).
        capacity: nodes per live key, in units of `decoding_length` (paper, table 4: 16).
        max_nodes: absolute bound of a forest; a full one takes 38 bytes per node.
        prune, eliminate: the paper's switches of table 3. Without eliminating, prompts share a forest that stays.
        eos_token_ids: a branch ends with the first of these, and none starts with one.

    Raises:
        ValueError: an option is out of range.
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
            object.__setattr__(self, name, int(getattr(self, name)))  # JSON does not write NumPy's numbers.
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
        """Return the bound of nodes per live key."""
        return self.capacity * self.decoding_length


def chosen(name: str, value: str, valid: dict[str, _T]) -> _T:
    """Return the meaning of `value`; a ValueError names the nearest valid one."""
    if value not in valid:
        raise ValueError(f"{name}={value!r} is unknown: choose {', '.join(valid)}.{did_you_mean(value, valid)}")
    return valid[value]


def checked_ids(tokens: Sequence[int], name: str) -> list[int]:
    """Return token ids as plain ints; a ValueError for others than whole numbers from 0 to `MAX_TOKEN`."""
    try:
        if hasattr(tokens, "tolist"):
            tokens = tokens.tolist()
        checked = [operator.index(token) for token in tokens]
    except TypeError:
        raise ValueError(f"{name} must be one flat sequence of token ids (whole numbers).") from None
    if checked and (min(checked) < 0 or max(checked) > MAX_TOKEN):
        raise ValueError(f"{name} holds an id outside 0..{MAX_TOKEN}: give ids as the tokenizer numbers them.")
    return checked
