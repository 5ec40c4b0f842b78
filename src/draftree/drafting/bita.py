"""BiTA: mask tokens behind every node, and prompt keys that only they see, make one pass both verify and guess.

Bi-directional Tuning for Lossless Acceleration (Lin et al., 2024). M mask embeddings follow each node of the tree as a
group of rows; mask i sees the context, the node's branch and the masks of its group before it, and predicts the token
i + 1 places after the node. P prompt keys and values per layer, seen by mask rows alone, tune a frozen model for
that. Both together are 0.01 to 0.06 % of the model, and all else stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from draftree.drafting.base import Attachment, Step
from draftree.drafting.in_model import ByStructure, InModelDrafter, logits_at
from draftree.host.plan import Surgery
from draftree.host.probe import Anatomy
from draftree.host.target import Target
from draftree.tree import TokenTree

STD = 0.02  # of the initial values


class BiTAWeights(nn.Module):
    """Mask embeddings and prompt keys/values, N(0, 0.02).

    Args:
        hidden_size: d.
        layers: L.
        kv_heads: key/value heads of the model.
        head_dim: width of a key.
        masks: M.
        prompts: P; 0 for none.
        deep: prompts in every layer; False for the first layer only (the other layers' are there, but unused).
        value_dim: width of a value, where it is not a key's.

    Attributes:
        mask_embeddings: [M, d].
        prompt_keys: [L, kv heads, P, head_dim]; no position is ever applied to them.
        prompt_values: [L, kv heads, P, value_dim].
    """

    def __init__(
        self,
        hidden_size: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        masks: int = 3,
        prompts: int = 16,
        deep: bool = True,
        value_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.deep = deep
        self.mask_embeddings = nn.Parameter(STD * torch.randn(masks, hidden_size))
        self.prompt_keys = nn.Parameter(STD * torch.randn(layers, kv_heads, prompts, head_dim))
        self.prompt_values = nn.Parameter(STD * torch.randn(layers, kv_heads, prompts, value_dim or head_dim))


class BiTA(InModelDrafter):
    """Guesses from mask rows (BiTA, sections 3.1 and 3.2).

    Args:
        shapes: of the model; `BiTA.fresh(model)` takes them from it.
        masks: M, how many tokens ahead; the paper takes 3, and 4 for its largest models.
        prompts: P, prompt keys and values per layer; 0 for mask tokens only.
        deep: prompts in every layer; False for the first layer only (ablation of Table 3).
        straightforward: one group of masks, behind the root, and the guesses in a chain: what is left of a group's
            guesses after some were accepted is all that the next step has (ablation of Table 4).
        options: `tree`, `candidates` and `depth`, see `InModelDrafter`.

    Raises:
        ValueError: no mask, a negative number of prompts, or a tree beside `straightforward`.
    """

    name: ClassVar[str] = "bita"
    method: ClassVar[str] = "bita"
    weights: BiTAWeights

    def __init__(
        self,
        shapes: Mapping[str, int],
        *,
        masks: int = 3,
        prompts: int = 16,
        deep: bool = True,
        straightforward: bool = False,
        **options: Any,
    ) -> None:
        if masks < 1:
            raise ValueError(f"masks is {masks}: BiTA needs 1 mask token or more to guess anything.")
        if prompts < 0:
            raise ValueError(f"prompts is {prompts}: give 0 (mask tokens only) or more.")
        if straightforward and options.setdefault("tree", "chain") != "chain":
            raise ValueError("straightforward=True drafts in a chain: leave `tree` out.")
        super().__init__(
            shapes,
            masks,
            **options,
            masks=masks,
            prompts=prompts,
            deep=deep,
            straightforward=straightforward,
        )
        self.straightforward = straightforward
        s = self._shapes
        self.weights = BiTAWeights(
            s["hidden_size"], s["layers"], s["kv_heads"], s["head_dim"], masks, prompts, deep, s["value_dim"]
        )
        self._layout = ByStructure(self._lay_out)
        self._masks = self.weights.mask_embeddings.detach()

    def place(self, target: Target, anatomy: Anatomy) -> None:
        """See `InModelDrafter.place`."""
        weights = self.weights
        masks, keys, values = (
            w.detach().to(target.device, target.dtype)
            for w in (weights.mask_embeddings, weights.prompt_keys, weights.prompt_values)
        )
        self._masks = masks[: self.depth]
        self.deep_prefix = list(zip(keys, values, strict=True)) if keys.shape[2] else None

    def rows(self, nodes: Any, requests: int = 1) -> Any:
        """See `Drafter.rows`: n (1 + M), and n + M straightforward."""
        return nodes + self.depth * requests if self.straightforward else nodes * (1 + self.depth)

    def attach(self, trees: TokenTree) -> Attachment:
        """One group of masks for each node, as any may be the one accepted last; group by group, in node order."""
        positions, visible, prefix_rows = self._layout(trees)
        groups = positions.shape[1] // self.depth
        return Attachment(
            embeddings=self._masks.repeat(groups, 1).expand(trees.batch, -1, -1),
            positions=positions,
            visible=visible,
            prefix_rows=None if self.deep_prefix is None else prefix_rows,
            surgeries=() if self.weights.deep or self.deep_prefix is None else (Surgery(1, hide_prefix=True),),
        )

    def _lay_out(self, depth: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Positions [B, G M], visibility [B, G M, N + G M] and prefix rows [B, N + G M] of G groups."""
        batch, n = depth.shape
        m = self.depth
        if self.straightforward:
            depth, ancestors = depth[:, :1], ancestors[:, :1]
        groups = depth.shape[1]
        device = depth.device
        positions = (depth[:, :, None] + torch.arange(1, m + 1, device=device)).reshape(batch, groups * m)
        alone = torch.eye(groups, dtype=torch.bool, device=device)
        earlier = torch.ones(m, m, dtype=torch.bool, device=device).tril()
        own = (alone[:, None, :, None] & earlier[None, :, None, :]).reshape(groups * m, groups * m)
        visible = torch.cat([ancestors.repeat_interleave(m, 1), own.expand(batch, -1, -1)], 2)
        prefix_rows = torch.arange(n + groups * m, device=device).expand(batch, -1) >= n
        return positions, visible, prefix_rows

    def guesses(self, step: Step, nodes: Tensor) -> Tensor | None:
        """See `InModelDrafter.guesses`; straightforward, the root's masks are cut by what was accepted."""
        if not step.own_rows or step.result.logits.shape[1] <= step.trees.width:
            return None
        m = self.depth
        offset = torch.arange(m, device=nodes.device)
        if not self.straightforward:
            wanted = step.trees.width + nodes[:, None] * m + offset
            return logits_at(step, wanted)
        # Mask i spoke of the place i + 1 behind the old root: the new one stands one behind the last node.
        passed = step.trees.depth.gather(1, nodes[:, None])
        wanted = step.trees.width + (passed + offset).clamp(max=m - 1)
        logits = logits_at(step, wanted)
        return logits.masked_fill((passed + offset >= m)[:, :, None], -torch.inf)
