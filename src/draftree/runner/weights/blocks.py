"""Weights that stay in a GGUF file's blocks: packed in groups of sixteen outputs, as `native/blocks.h` lays them.

A block has 32 whole numbers of 4 to 8 bits and their scale. Compiled products expand blocks in registers; elsewhere
weights are dequantised, for the rows that are needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from draftree.native import load_library
from draftree.native.structures import Matrix, address, array_address

LANES = 16  # outputs of a group
# Formats by GGUF's names: the number of each in `products.h`, and the inputs that a row must be a multiple of.
FORMATS = {
    **{name: (10 + i, 32) for i, name in enumerate(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"))},
    **{name: (15 + i, 256) for i, name in enumerate(("Q4_K", "Q5_K", "Q6_K"))},
}


def blocks_matrix(packed: Tensor, form: str, inputs: int, outputs: int, bias: int | None = None) -> Matrix:
    """Return what C reads of packed blocks of that format; `bias` is an address."""
    return Matrix(address(packed, torch.uint8), bias, None, inputs, outputs, FORMATS[form][0], 0, outputs, None)


def pack_blocks(rows: NDArray[np.uint8], form: str, inputs: int) -> Tensor:
    """Pack the blocks of a file, with zeros behind the last output.

    Args:
        rows: uint8 [outputs, bytes of a row], as they lie in the file.

    Returns:
        uint8 [groups, bytes of a group].
    """
    library = load_library()
    assert library is not None
    kind, outputs = FORMATS[form][0], len(rows)
    packed = torch.empty(-(-outputs // LANES), library.blocks_group(kind, inputs), dtype=torch.uint8, device="cpu")
    at = array_address(np.ascontiguousarray(rows), np.uint8)
    shape = rows.shape[1], inputs, outputs
    library.blocks_pack(kind, at, *shape, torch.get_num_threads(), address(packed, torch.uint8))
    return packed


def eight_bit_blocks(weight: Tensor) -> NDArray[np.uint8]:
    """Round weights [outputs, inputs] to blocks of Q8_0, uint8 [outputs, bytes of a row].

    A block has a scale in 16 bits and 32 whole numbers from -127 to 127.
    """
    blocks = weight.detach().float().numpy().reshape(len(weight), -1, 32)
    scales = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    numbers = np.rint(np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales > 0)).astype(np.int8)
    parts = scales.astype(np.float16).view(np.uint8), numbers.view(np.uint8)
    return np.concatenate(parts, -1).reshape(len(weight), -1)


def floats_of(packed: Tensor, form: str, inputs: int, outputs: Tensor) -> Tensor:
    """Dequantise the weights of some outputs.

    Args:
        outputs: LongTensor [n], which.

    Returns:
        float32 [n, inputs].
    """
    library = load_library()
    assert library is not None
    outputs = outputs.cpu().contiguous()
    found = torch.empty(len(outputs), inputs, dtype=torch.float32, device="cpu")
    matrix = blocks_matrix(packed, form, inputs, len(packed) * LANES)
    library.blocks_floats(matrix, address(outputs, torch.long), len(outputs), address(found, torch.float32))
    return found


def all_floats(packed: Tensor, form: str, inputs: int, outputs: int) -> Tensor:
    """Dequantise all weights, float32 [outputs, inputs]."""
    return floats_of(packed, form, inputs, torch.arange(outputs, dtype=torch.long, device="cpu"))


class PackedEmbedding(nn.Module):
    """An embedding whose table stays in blocks; a tied head may read the same weights.

    Attributes:
        stock: the class of transformers or torch that this stands for.
        scale: by which Gemma multiplies what it looks up.
    """

    packed: Tensor

    def __init__(self, packed: Tensor, form: str, like: nn.Embedding) -> None:
        super().__init__()
        self.form, self.num_embeddings, self.embedding_dim = form, like.num_embeddings, like.embedding_dim
        self.stock, self.scale = type(like), float(getattr(like, "scalar_embed_scale", 1.0))
        self.register_buffer("packed", packed, persistent=False)

    @property
    def weight(self) -> Tensor:
        """[num_embeddings, embedding_dim] in float32, a copy."""
        return all_floats(self.packed, self.form, self.embedding_dim, self.num_embeddings)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up LongTensor [...], as float32 [..., embedding_dim]."""
        flat = ids.reshape(-1)
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < self.num_embeddings:
            raise IndexError(f"a token id is outside of the vocabulary of {self.num_embeddings}")
        found = floats_of(self.packed, self.form, self.embedding_dim, flat).view(*ids.shape, self.embedding_dim)
        return found if self.scale == 1 else found * self.scale

    def unpacked(self) -> nn.Embedding:
        """Return an ordinary embedding with the same numbers."""
        scaled: dict[str, Any] = {} if self.stock is nn.Embedding else {"padding_idx": None, "embed_scale": self.scale}
        made = self.stock(self.num_embeddings, self.embedding_dim, **scaled)
        made.weight = nn.Parameter(self.weight)
        return made

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight
