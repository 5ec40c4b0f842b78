"""BiTA: mask tokens behind every node, and prompt keys that only they see, make one pass both verify and draft.

Bi-directional Tuning for Lossless Acceleration (Lin et al., 2024). M mask embeddings follow each node of the tree as a
group of rows; mask i sees the context, the node's branch and the masks of its group before it, and predicts the token
i + 1 places after the node. P prompts, seen by mask rows alone, tune a frozen model for that: as keys and values of
their own in every layer ("deep"), or as input embeddings whose keys and values the model itself makes ("shallow").
Masks and deep prompts together are 0.01 to 0.06 % of the model, and all else stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from draftree.drafting.base import Attachment
from draftree.drafting.in_model import DEEPEST, GroupDrafter, GroupNodes
from draftree.errors import check_least, did_you_mean
from draftree.runner.target import Target

STD = 0.02  # of the initial values
DEEP, SHALLOW = "deep", "shallow"
PROMPTING = (DEEP, SHALLOW)


class BiTAWeights(nn.Module):
    """Mask embeddings and prompts, N(0, 0.02).

    Attributes:
        mask_embeddings: [M, d].
        prompt_embeddings: [P, d], for shallow prompts alone.
        prompt_keys: [L, kv heads, P, head_dim], as attention sees them. Trained; of shallow prompts what the model made
            of their embeddings when they were last measured.
        prompt_values: [L, kv heads, P, value_dim], likewise.
    """

    def __init__(
        self,
        hidden_size: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        masks: int = 3,
        prompts: int = 16,
        prompting: str = DEEP,
        value_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.prompting = prompting
        self.mask_embeddings = _normal(masks, hidden_size)
        keys = _normal(layers, kv_heads, prompts, head_dim)
        values = _normal(layers, kv_heads, prompts, value_dim or head_dim)
        if prompting == SHALLOW:
            self.prompt_embeddings = _normal(prompts, hidden_size)
            self.register_buffer("prompt_keys", keys.detach())
            self.register_buffer("prompt_values", values.detach())
        else:
            self.prompt_keys, self.prompt_values = keys, values

    def prefix(self) -> list[tuple[Tensor, Tensor]] | None:
        """Return (keys, values) of the prompts by layer, each [kv heads, P, width]; None for layers without prompts."""
        if self.prompt_keys.shape[2] == 0:
            return None
        return list(zip(self.prompt_keys, self.prompt_values, strict=True))


def _normal(*shape: int) -> nn.Parameter:
    return nn.Parameter(STD * torch.randn(shape, dtype=torch.float32, device="cpu"))


class _Placed(NamedTuple):
    """Weights of a pass, on the target's device and in its type."""

    masks: Tensor  # embeddings of the mask rows, [M, d]
    prefix: list[tuple[Tensor, Tensor]] | None  # see `Drafter.deep_prefix`


class BiTA(GroupDrafter):
    """Drafts from mask rows (BiTA, sections 3.1 and 3.2).

    Args:
        shapes: of the model; `BiTA.fresh(model)` takes them from it.
        masks: M, how many tokens ahead; the paper takes 3, and 4 for its largest models.
        prompts: P; 0 for mask tokens only.
        prompting: what the prompts are. "deep": keys and values of their own in every layer, without positions.
            "shallow" (ablation of Table 3): P input embeddings at positions 0 .. P - 1, which see one another causally
            and nothing else, and whose keys and values in every layer are the frozen model's.
        groups: how many nodes of a tree have a group of masks at most, the most likely to be the last accepted. With
            None `DynamicTree` chooses how many are worth their rows, and under other shapes all have one, as in the
            paper. 1 with tree="chain" is its straightforward decoding: what is left of the root's predictions after
            some were accepted is all that the next step has (ablation of Table 4).
        options: `tree`, `candidates` and `depth`, see `InModelDrafter`.

    Raises:
        ValueError: no mask, a negative number of prompts, or another `prompting`.
    """

    name = "bita"
    method: ClassVar[str] = "bita"
    weights: BiTAWeights

    def __init__(
        self,
        shapes: Mapping[str, int],
        *,
        masks: int = 3,
        prompts: int = 16,
        prompting: str = DEEP,
        groups: int | None = None,
        **options: Any,
    ) -> None:
        check_least(1, DEEPEST, masks=masks)
        check_least(0, prompts=prompts)
        if prompting not in PROMPTING:
            hint = did_you_mean(str(prompting), PROMPTING)
            raise ValueError(f"prompting is {prompting!r}: give {', '.join(PROMPTING)}.{hint}")
        super().__init__(shapes, masks, groups=groups, **options, masks=masks, prompts=prompts, prompting=prompting)
        s = self._shapes
        self.weights = BiTAWeights(
            s["hidden_size"], s["layers"], s["kv_heads"], s["head_dim"], masks, prompts, prompting, s["value_dim"]
        )

    def deep_prefix(self, target: Target) -> list[tuple[Tensor, Tensor]] | None:
        placed: _Placed = self.placement(target.device, target.dtype)
        return placed.prefix

    def place(self, device: torch.device, dtype: torch.dtype) -> _Placed:
        def placed(tensor: Tensor) -> Tensor:
            return tensor.detach().to(device, dtype)

        self._made.clear()
        prefix = self.weights.prefix()
        return _Placed(
            placed(self.weights.mask_embeddings[: self.depth]),
            None if prefix is None else [(placed(keys), placed(values)) for keys, values in prefix],
        )

    def rows(self, nodes: Any, requests: int = 1, attach_to: Any = None) -> Any:
        """See `Drafter.rows`: n (1 + M) where all nodes have a group."""
        return nodes + self.depth * self.group_count(nodes, requests, attach_to)

    def lay_out(self, chosen: GroupNodes, dtype: torch.dtype) -> Attachment:
        """See `GroupDrafter.lay_out`: the masks of G nodes, group by group in the order of their nodes.

        G M rows with their positions, visibility [B, G M, N + G M] and view of the prompts.
        """
        m, device = self.depth, chosen.depth.device
        placed: _Placed = self.placement(device, dtype)
        batch, groups, n = chosen.ancestors.shape
        positions = chosen.depth[:, :, None] + torch.arange(1, m + 1, device=device)
        alone = torch.eye(groups, dtype=torch.bool, device=device)
        earlier = torch.ones(m, m, dtype=torch.bool, device=device).tril()
        own = (alone[:, None, :, None] & earlier[None, :, None, :]).reshape(groups * m, groups * m)
        prefix_rows = (torch.arange(n + groups * m, device=device) >= n).expand(batch, -1)
        return Attachment(
            embeddings=placed.masks.repeat(groups, 1).expand(batch, -1, -1),
            positions=positions.flatten(1),
            visible=torch.cat([chosen.ancestors.repeat_interleave(m, 1), own.expand(batch, -1, -1)], 2),
            prefix_rows=None if placed.prefix is None else prefix_rows,
            taps=(self._shapes["layers"],),
        )

    def row_of(self, group: int, step: int, groups: int) -> int:
        """See `GroupDrafter.row_of`: masks stand group by group."""
        return group * self.depth + step
