"""Medusa: extra heads on the last hidden state draft the tokens after next; BPD is their top-1 chain.

Medusa (Cai et al., 2024), the baseline of BiTA, Hidden Transfer and ProPD; blockwise parallel decoding (Stern et al.,
2018). Head i reads what the model's own head reads at the node accepted last, and predicts the token i + 1 places
after the one that the model itself chooses next. No row is added to the pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from draftree.drafting.base import Attachment, Step
from draftree.drafting.folder import base_of
from draftree.drafting.in_model import DEEPEST, InModelDrafter
from draftree.errors import check_least
from draftree.runner import layout_of
from draftree.runner.target import weight_of
from draftree.tree import TokenTree

Head = Callable[[Tensor], Tensor]
PUBLIC_NAME = re.compile(r"(?:^|\.)(\d+\.\d+\.(?:linear\.(?:weight|bias)|weight))$")


class ResidualBlock(nn.Module):
    """x + SiLU(Linear(x)), initialised to the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, dtype=torch.float32, device="cpu")
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map states [..., d] to [..., d]."""
        return x + F.silu(self.linear(x))


class MedusaWeights(nn.Module):
    """Heads as public checkpoints name them: `{i}.{j}.linear.weight` and `.bias`, own head `{i}.{layers}.weight`."""

    def __init__(self, hidden_size: int, vocab_size: int, heads: int = 4, layers: int = 1, *, own_head: bool) -> None:
        super().__init__()
        self.heads, self.layers, self.own_head = heads, layers, own_head
        for i in range(heads):
            parts: list[nn.Module] = [ResidualBlock(hidden_size) for _ in range(layers)]
            if own_head:
                parts.append(nn.Linear(hidden_size, vocab_size, bias=False, dtype=torch.float32, device="cpu"))
            self.add_module(str(i), nn.Sequential(*parts))

    def forward(self, hidden: Tensor, head: Head) -> Tensor:
        """Return logits [heads, ..., V] of the input [..., d] of the model's own `head`."""
        own = hidden.to(next(self.parameters()).dtype)  # a model may be of a narrower type than what is trained for it
        parts = torch.stack([self.get_submodule(str(i))(own) for i in range(self.heads)])
        return parts if self.own_head else head(parts.to(hidden.dtype))


class Medusa(InModelDrafter):
    """Drafts from heads on the last hidden state.

    Args:
        shapes: of the model; `Medusa.fresh(model)` takes them from it.
        heads: how many tokens are drafted.
        layers: residual blocks per head.
        own_head: a projection to the vocabulary for each head; False shares the model's.
        options: `tree` ("chain" is BPD), `candidates` and `depth`, see `InModelDrafter`.

    Raises:
        ValueError: no head, or a negative number of layers.
    """

    name = "medusa"
    method: ClassVar[str] = "medusa"
    weights: MedusaWeights

    def __init__(
        self, shapes: Mapping[str, int], *, heads: int = 4, layers: int = 1, own_head: bool = False, **options: Any
    ) -> None:
        check_least(1, DEEPEST, heads=heads)
        check_least(0, DEEPEST, layers=layers)
        if layers == 0 and not own_head:
            raise ValueError(f"layers is {layers}: give 1 or more, or 0 with own_head=True.")
        super().__init__(shapes, heads, **options, heads=heads, layers=layers, own_head=own_head)
        self.weights = MedusaWeights(
            self._shapes["hidden_size"], self._shapes["vocab_size"], heads, layers, own_head=own_head
        )
        self._tap = self._shapes["layers"]

    @classmethod
    def fresh(cls, model: Any, **settings: Any) -> Self:
        """See `InModelDrafter.fresh`; own heads start as copies of the model's."""
        drafter = super().fresh(model, **settings)
        if drafter.weights.own_head:
            head = layout_of(model).head
            for i in range(drafter.weights.heads):
                own = drafter.weights.get_parameter(f"{i}.{drafter.weights.layers}.weight")
                own.data.copy_(weight_of(head))
        return drafter

    @classmethod
    def from_public(cls, file: str | Path, model: Any, **settings: Any) -> Self:
        """Load the heads of a public Medusa checkpoint (`medusa_lm_head.safetensors` or `.pt`), trained for `model`.

        How many heads and layers there are, and whether heads have a projection of their own, is read off the names.

        Args:
            file: names as `{i}.{j}.linear.weight`, perhaps behind a prefix such as `medusa_head.`.
            model: the model that the heads were trained for; nothing in the file tells.
            settings: `tree`, `candidates` and `depth`.

        Raises:
            ValueError: a file without such names, or heads of another size than the model's.
        """
        path = Path(file)
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
        named = {m[1]: tensor.float() for name, tensor in state.items() if (m := PUBLIC_NAME.search(name))}
        blocks = {tuple(map(int, name.split(".")[:2])) for name in named if name.endswith("linear.weight")}
        if not blocks:
            raise ValueError(f"{path} holds no Medusa heads: give a file with tensors such as '0.0.linear.weight'.")
        heads, layers = (1 + max(place) for place in zip(*blocks, strict=True))
        drafter = cls.fresh(model, heads=heads, layers=layers, own_head=f"0.{layers}.weight" in named, **settings)
        expected = {name: tensor.shape for name, tensor in drafter.weights.state_dict().items()}
        for name, shape in expected.items():
            found = list(named[name].shape) if name in named else "nothing"
            if found != list(shape):
                raise ValueError(f"{path} holds {found} for {name!r}, not {list(shape)}: it is no head of this model.")
        drafter.weights.load_state_dict({name: named[name] for name in expected})
        drafter.base = base_of(model)
        return drafter

    def place(self, device: torch.device, dtype: torch.dtype) -> _Placed:
        return _Placed(self.weights, self.depth, device, dtype)

    def attach(self, trees: TokenTree, attach_to: int | None, dtype: torch.dtype) -> Attachment:
        """See `InModelDrafter.attach`: a look at what the last layer returns."""
        return Attachment(taps=(self._tap,))

    @torch.no_grad()
    def draft_logits(self, step: Step, paths: Sequence[Sequence[int]]) -> Tensor | None:
        hidden, runner = step.result.hidden.get(self._tap), step.result.runner
        if hidden is None or runner is None:
            return None
        nodes = torch.tensor([path[-1] for path in paths], device=hidden.device, dtype=torch.long)
        rows = (step.offset + nodes)[:, None, None].expand(-1, 1, hidden.shape[2])
        if step.result.rows is not None:  # rows have left in mid-stack: find where each one ended up
            standing = (step.result.rows == rows[:, :, 0]).byte().argmax(1)
            rows = standing[:, None, None].expand_as(rows)
        return self.placement(hidden.device, hidden.dtype)(runner.close(hidden.gather(1, rows))[:, 0], runner.head)


class _Placed:
    """The first heads in the target's type and on its device, each part of all heads multiplied at once."""

    def __init__(self, weights: MedusaWeights, heads: int, device: torch.device, dtype: torch.dtype) -> None:
        def stacked(name: str) -> Tensor:
            held = [weights.get_parameter(f"{i}.{name}").detach() for i in range(heads)]
            return torch.stack(held).to(device, dtype)

        self.blocks = [
            (stacked(f"{layer}.linear.weight").mT.contiguous(), stacked(f"{layer}.linear.bias")[:, None])
            for layer in range(weights.layers)
        ]
        # On a CPU a row times a matrix that lies this way takes a third of the time of a linear.
        self.own = stacked(f"{weights.layers}.weight").mT.contiguous() if weights.own_head else None
        self.heads = heads

    def __call__(self, hidden: Tensor, head: Head) -> Tensor:
        """Return logits [B, heads, V] of the input [B, d] of the model's head; see `MedusaWeights.forward`."""
        x = hidden.expand(self.heads, -1, -1)
        for weight, bias in self.blocks:
            x = x + F.silu(torch.baddbmm(bias, x, weight))
        return head(x.transpose(0, 1)) if self.own is None else torch.bmm(x, self.own).transpose(0, 1)
