"""Hidden Transfer: hidden states of tokens to come, predicted in mid-stack, run through the layers that are left.

Parallel Decoding via Hidden Transfer (Wu et al., 2024). The hidden state h of a node at the output of layer t_i gives a
pseudo state W_i h, i places after the node; it passes the remaining layers and the model's own head together with
the real rows, and predicts the token i + 1 places after the node. Its keys and values are thrown away after the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from draftree.drafting.base import Attachment
from draftree.drafting.in_model import DEEPEST, GroupDrafter, GroupNodes, checked_shapes
from draftree.errors import check_kind, check_least, whole
from draftree.runner.plan import Surgery

STEPS = 3
FIRST = {32: 15, 40: 25}  # t_1 of the paper's models by their layers (section 4.1: 15, 20, 25 and 25, 30, 35)
STRIDE = 5  # layers of theirs from one transfer to the next


def default_transfer_layers(layers: int) -> tuple[int, ...]:
    """Return the paper's layers, scaled from its model of the nearest depth to `layers`; at most the last but one."""
    theirs = min(FIRST, key=lambda depth: abs(depth - layers))
    chosen = [round((FIRST[theirs] + STRIDE * i) * layers / theirs) for i in range(STEPS)]
    return tuple(min(max(layer, 1), layers - 1) for layer in chosen)


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """New rows by a matrix, as a surgery appends them."""

    matrix: Tensor  # [d, s d]: a given row x makes the s rows of x @ matrix; they stand step by step, as given in each
    given: int  # how many rows are, the first ones of those that a surgery gives

    def __call__(self, hidden: Tensor) -> Tensor:
        """Project the first rows of [B, given or more, d] to [B, s given, d]."""
        # Where the model lies on several devices, the few rows go to the matrix and back, which is the larger one.
        made = (hidden[:, : self.given].to(self.matrix.device) @ self.matrix).to(hidden.device)
        return made.unflatten(2, (-1, hidden.shape[2])).transpose(1, 2).flatten(1, 2)


class HiddenTransferWeights(nn.Module):
    """One square bias-free linear W_i per transfer step, initialised to the identity.

    Args:
        transfer_layers: t_1 <= t_2 <= .., 1-based layers after whose output the steps read.
    """

    def __init__(self, hidden_size: int, transfer_layers: Sequence[int]) -> None:
        super().__init__()
        self.transfer_layers = tuple(transfer_layers)
        self.transfer = nn.ModuleList()
        for _ in transfer_layers:
            linear = nn.Linear(hidden_size, hidden_size, bias=False, dtype=torch.float32, device="cpu")
            nn.init.eye_(linear.weight)
            self.transfer.append(linear)

    def matrices(self) -> list[Tensor]:
        """Return W_1, W_2, .., each [d, d]."""
        return [self.get_parameter(f"transfer.{i}.weight") for i in range(len(self.transfer))]


class HiddenTransfer(GroupDrafter):
    """Drafts from pseudo rows that join in mid-stack (Hidden Transfer, section 3.2).

    Args:
        shapes: of the model; `HiddenTransfer.fresh(model)` takes them from it.
        transfer_layers: t_1 <= t_2 <= .., 1-based layers after whose output step i's pseudo states are made; by
            default three of them, see `default_transfer_layers`.
        groups: how many nodes of a tree get pseudo states at most, the most likely to be the last accepted. With None
            `DynamicTree` chooses how many are worth their rows, and under other shapes all do, as in the paper.
        masked: pseudo states do not see the earlier ones of their node (ablation of section 4.4).
        options: `tree`, `candidates` and `depth`, see `InModelDrafter`.

    Raises:
        TypeError: layers that are no list.
        ValueError: no transfer, layers that are no whole numbers, that fall, or that the model does not have.
    """

    name = "hidden-transfer"
    method: ClassVar[str] = "hidden-transfer"
    weights: HiddenTransferWeights

    def __init__(
        self,
        shapes: Mapping[str, int],
        *,
        transfer_layers: Sequence[int] | None = None,
        groups: int | None = None,
        masked: bool = False,
        **options: Any,
    ) -> None:
        layers = checked_shapes(shapes)["layers"]
        if transfer_layers is None:
            transfer_layers = default_transfer_layers(layers)
        check_kind(Sequence, "a list of layer numbers", transfer_layers=transfer_layers)
        chosen = [whole("transfer_layers", layer) for layer in transfer_layers]
        if not chosen:
            raise ValueError("transfer_layers is empty: give one layer per token to be drafted.")
        check_least(1, DEEPEST, transfers=len(chosen))
        if chosen != sorted(chosen) or not 1 <= chosen[0] <= chosen[-1] < layers:
            raise ValueError(
                f"transfer_layers is {chosen}: give layers from 1 to {layers - 1} (of the model's {layers}), none "
                "lower than the one before it."
            )
        super().__init__(shapes, len(chosen), groups=groups, **options, transfer_layers=chosen, masked=masked)
        self.transfer_layers = tuple(chosen)
        self.masked = masked
        self.weights = HiddenTransferWeights(self._shapes["hidden_size"], chosen)

    def place(self, device: torch.device, dtype: torch.dtype) -> dict[int, Tensor]:
        """See `InModelDrafter.place`: by layer the matrices of all steps that join there, side by side, [d, s d]."""
        held = self.weights.matrices()
        self._made.clear()
        return {
            layer: torch.cat([held[i].detach().T for i in steps], 1).to(device, dtype).contiguous()
            for layer, steps in self._joining()
        }

    def rows(self, nodes: Any, requests: int = 1, attach_to: Any = None) -> Any:
        """See `Drafter.rows`: n (1 + sum of (L - t_i) / L) if all nodes have some, as step i joins after layer t_i."""
        layers = self._shapes["layers"]
        share = sum((layers - t) / layers for t in self.transfer_layers[: self.depth])
        return nodes + share * self.group_count(nodes, requests, attach_to)

    def lay_out(self, chosen: GroupNodes, dtype: torch.dtype) -> Attachment:
        """See `GroupDrafter.lay_out`: a surgery for each layer with transfers.

        It has s steps: positions [B, s G] and visibility [B, s G, N + i G].

        Steps that share a layer join it together; rows are numbered step by step, in the order of their nodes.
        """
        nodes, depth, ancestors = chosen
        batch, count, _ = ancestors.shape
        matrices = self.placement(depth.device, dtype)
        same = torch.eye(count, dtype=torch.bool, device=depth.device).expand(batch, -1, -1)
        never = torch.zeros_like(same)

        surgeries = []
        for layer, steps in self._joining():
            seen = [
                [same if j == i or (j < i and not self.masked) else never for j in range(steps[-1] + 1)] for i in steps
            ]
            surgeries.append(
                Surgery(
                    layer,
                    append=Projection(matrices[layer], count),  # of all rows the nodes come first
                    positions=torch.cat([depth + i + 1 for i in steps], 1),
                    visible=torch.cat([torch.cat([ancestors, *blocks], 2) for blocks in seen], 1),
                    source=nodes,
                )
            )
        return Attachment(surgeries=tuple(surgeries), taps=(self._shapes["layers"],))

    def _joining(self) -> list[tuple[int, list[int]]]:
        """Return layers with transfers, and the steps (from 0) that join after each."""
        steps = groupby(range(self.depth), key=self.transfer_layers.__getitem__)
        return [(layer, list(group)) for layer, group in steps]

    def row_of(self, group: int, step: int, groups: int) -> int:
        """See `GroupDrafter.row_of`: rows stand step by step."""
        return step * groups + group
