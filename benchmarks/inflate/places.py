"""Where the parts of a small model lie in a large one that it was inflated to; see `benchmarks.inflate`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from benchmarks.inflate.sizes import Size


@dataclass(frozen=True, slots=True)
class Places:
    """Where the parts of a small model lie in a large one."""

    small: Size
    large: Size

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
        if large.heads % large.kv_heads or large.hidden_size % large.heads or large.head_dim % 2:
            raise ValueError(
                f"{large.heads} heads of {large.head_dim} entries with {large.kv_heads} key/value heads and a "
                f"hidden_size of {large.hidden_size} are no model to Hugging Face: heads come in equal groups, their "
                "width is even, and hidden_size is a multiple of their number."
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
        """LongTensor [head_dim]: entries of a large query or key that turn as those of a small one do."""
        pairs = torch.arange(self.small.head_dim // 2) * self.stride
        return torch.cat([pairs, pairs + self.large.head_dim // 2])

    @property
    def stride(self) -> int:
        """Return the distance between neighbouring rotary pairs of the small model, in pairs of the large one."""
        return self.large.head_dim // self.small.head_dim

    def theta(self, small: float) -> float:
        """Return the base at which pair `stride` i turns as pair i did at base `small`."""
        return float(small ** (self.large.head_dim / (self.stride * self.small.head_dim)))

    @property
    def query_heads(self) -> list[int]:
        """Return the large model's query head for each of the small one's."""
        return [self.head(index) for index in range(self.small.heads)]

    def key_heads(self, number: int) -> list[int]:
        """Return the large model's key/value head that is copy `number` of each of the small one's."""
        return [index * self.copies + number for index in range(self.small.kv_heads)]

    def rows(self, heads: list[int], entries: Tensor) -> Tensor:
        """LongTensor [heads * entries]: `entries` of these heads of the large model, among the rows of all heads."""
        return (torch.tensor(heads)[:, None] * self.large.head_dim + entries).flatten()
