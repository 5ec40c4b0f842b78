"""Attention of a stock `forward` with each row alone, as in a pass of its own.

In 16 bits the columns of other branches change a row's last bits, masked or not. Inside `RowByRow` every call of
torch's scaled dot product attention is made once for each row, over the columns that the row would find if it passed
alone. Families that attend by other means are not reached; `calls` shows whether a model was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from draftree.runner.layout.kinds import LayerKind
from draftree.runner.layout.masks import PassMasks
from draftree.runner.target import Target


class RowByRow(TorchFunctionMode):
    """A context in which rows attend alone, on this thread.

    Args:
        masks: gives those of the rows that are in the layers at present.
        target: the model.
        unmasked: whether the family lets a row that sees everything pass without a mask.

    Attributes:
        calls: how often attention was reached.
    """

    def __init__(self, masks: Callable[[], PassMasks], target: Target, *, unmasked: bool) -> None:
        super().__init__()
        self._masks, self._kinds, self._unmasked = masks, list(dict.fromkeys(target.kinds)), unmasked
        groups = (getattr(module, "num_key_value_groups", 1) for module in target.layers[0].modules())
        self._groups = max(int(group) for group in groups)
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch's own hook: every call of a function of torch comes through here."""
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
    ) -> Tensor:
        masks = self._masks()
        batch, rows = masks.segment.positions.shape
        # A single row's query heads may be folded into rows.
        ours = query.shape[2] == rows or rows == 1
        ours = ours and query.shape[0] == batch and key.shape[2] == max(masks.lengths) + masks.prefix + rows
        self.calls += ours
        if attn_mask is None or not ours or batch * rows == 1:  # without a mask rows are single, and none is ragged
            return F.scaled_dot_product_attention(query, key, value, attn_mask, *rest, **options)
        kind = next((k for k in self._kinds if _same(masks.additive(k), attn_mask)), None)
        given = attn_mask.expand(batch, -1, rows, -1)
        mixed = query.new_empty(*query.shape[:3], value.shape[3])
        for b, of_rows in enumerate(masks.alone(LayerKind() if kind is None else kind)):
            for i, (columns, mask) in enumerate(of_rows):
                columns = columns.to(key.device)  # another one than the masks' where the model lies on several
                if kind is None or not self._unmasked:  # the family's own, a bias for one
                    mask = given[b : b + 1, :, i : i + 1].index_select(3, columns)
                elif mask is not None:
                    mask = mask.to(key.device)
                k, v = (t[b : b + 1].index_select(2, columns) for t in (key, value))
                own = slice(None) if rows == 1 else slice(i, i + 1)
                row = query[b : b + 1, :, own]
                mixed[b : b + 1, :, own] = self._one(row, k, v, mask, *rest, **options).view(*row.shape[:3], -1)
        return mixed

    def _one(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any, **options: Any
    ) -> Tensor:
        """One row's attention in the form that Hugging Face gives it: query heads are folded into rows under a mask."""
        heads = query.shape[1] * query.shape[2]
        if self._groups == 1:
            return F.scaled_dot_product_attention(query, key, value, mask, *rest, **options)
        if key.shape[1] == heads:  # repeated for every query head
            key, value = key[:, :: self._groups], value[:, :: self._groups]
        if mask is None:
            query, options = query.reshape(1, heads, 1, -1), options | {"enable_gqa": True}
        else:
            query = query.reshape(1, heads // self._groups, self._groups, -1)
        return F.scaled_dot_product_attention(query, key, value, mask, *rest, **options)


def _same(made: Tensor | None, given: Tensor) -> bool:
    """Whether the mask given to attention is the one that was made, or a copy of it on another device."""
    if made is None or made.dtype != given.dtype:
        return False
    if made.device == given.device:
        return made.data_ptr() == given.data_ptr()
    return made.shape == given.shape and torch.equal(made.to(given.device), given)
