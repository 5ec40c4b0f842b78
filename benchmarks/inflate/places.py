"""Where the parts of a small model lie in a large one that it was inflated to; see `benchmarks.inflate`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from benchmarks.inflate.sizes import Size


@dataclass(frozen=True, slots=True)
class Places:
    """Where the parts of a small model lie in a large one."""

    small: Size
    large: Size
    turning: float = 1.0  # share of a head's entries that rotary angles turn

    def __post_init__(self) -> None:
        small, large = self.small, self.large
        # All numbers of the small model, but room for the constant and for copies of key/value heads.
        needed = asdict(small) | {"kv_heads": small.kv_heads * self.copies}
        needed["hidden_size"] += large.vocab_size > small.vocab_size
        for name, value in needed.items():
            if getattr(large, name) < value:
                raise ValueError(
                    f"{name} is {getattr(large, name)}, and to hold this model it takes {value}: inflate to a larger "
                    "size."
                )
        if large.heads % large.kv_heads or large.hidden_size % large.heads or self._turned(large) % 2:
            raise ValueError(
                f"{large.heads} heads of {large.head_dim} entries with {large.kv_heads} key/value heads and a "
                f"hidden_size of {large.hidden_size} are no model to Hugging Face: heads come in equal groups, their "
                "width is even, and hidden_size is a multiple of their number."
            )

        if small.recurrent and large.value_heads * small.key_heads != small.value_heads * large.key_heads:
            raise ValueError(
                f"{large.value_heads} value heads on {large.key_heads} key heads cannot hold this model's "
                f"{small.value_heads} on {small.key_heads}: inflate to a size of the same proportion."
            )

    @property
    def copies(self) -> int:
        """Key/value heads of the large model that stand for one of the small, whose groups may be larger."""
        return math.ceil(self.small.groups / self.large.groups)

    @property
    def constant(self) -> int | None:
        """Return the entry of the hidden states that never changes, where there is one."""
        return self.small.hidden_size if self.large.vocab_size > self.small.vocab_size else None

    def layer(self, index: int) -> int:
        """Return the large model's layer for the small one's, or the layers run after `index` of those."""
        return index * self.large.layers // self.small.layers

    def head(self, index: int) -> int:
        """Return the large model's query head for the small one's."""
        kv, member = divmod(index, self.small.groups)
        copy_, member = divmod(member, self.large.groups)
        return (kv * self.copies + copy_) * self.large.groups + member

    def turned(self) -> Tensor:
        """LongTensor [head_dim]: a small query's entries in a large one: those that turn as fast, and those behind."""
        small, large = self._turned(self.small), self._turned(self.large)
        pairs = torch.arange(small // 2) * self.stride
        return torch.cat([pairs, pairs + large // 2, torch.arange(large, large + self.small.head_dim - small)])

    def _turned(self, size: Size) -> int:
        """The number of a head's entries that rotary angles turn, the first ones."""
        return int(size.head_dim * self.turning)

    @property
    def stride(self) -> int:
        """Return the distance between neighbouring rotary pairs of the small model, in pairs of the large one."""
        return self._turned(self.large) // self._turned(self.small)

    def theta(self, small: float) -> float:
        """Return the base at which pair `stride` i turns as pair i did at base `small`."""
        return float(small ** (self._turned(self.large) / (self.stride * self._turned(self.small))))

    @property
    def query_heads(self) -> list[int]:
        """Return the large model's query head for each of the small one's."""
        return [self.head(index) for index in range(self.small.heads)]

    def key_heads(self, number: int) -> list[int]:
        """Return the large model's key/value head that is copy `number` of each of the small one's."""
        return [index * self.copies + number for index in range(self.small.kv_heads)]

    def rows(self, heads: list[int], entries: Tensor) -> Tensor:
        """LongTensor [heads * entries]: `entries` of these heads of the large model, among the rows of all heads."""
        return among(self.large.head_dim, heads, entries)

    def recurrent_rows(self, key_entries: int, value_entries: int) -> Tensor:
        """LongTensor [n]: where the first entries of the small model's recurrent queries, keys and values lie."""
        large, small = self.large, self.small
        keys = among(large.key_width, range(small.key_heads), torch.arange(key_entries))
        values = among(large.value_width, range(small.value_heads), torch.arange(value_entries))
        width = large.key_heads * large.key_width
        return torch.cat([keys, width + keys, 2 * width + values])


def among(width: int, heads: Sequence[int], entries: Tensor) -> Tensor:
    """LongTensor [heads * entries]: `entries` of these heads of `width`, among the rows of all heads."""
    return (torch.tensor(heads)[:, None] * width + entries).flatten()
