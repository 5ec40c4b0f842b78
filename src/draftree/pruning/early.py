"""Early pruning: draft tokens that an early head finds unlikely leave the pass before its later layers (ProPD, 4.1).

The head reads every inner node's state after layer n and predicts what could follow; children that it does not predict
leave, with all nodes below them and all rows that a drafter attached to them. The rest of the pass is that of a smaller
tree. Any drafter's tree can be pruned so, and the text stays the model's own: a draft token that leaves is only one
that is not tried.

To look costs a product with the model's head, and is worth it only where rows cost enough and enough of them leave:
`Worth` decides that from pass to pass.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from importlib.resources import as_file, files
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from draftree.drafting.folder import Trained
from draftree.errors import check_least
from draftree.pruning.pruner import Looks, Pruner, Worth
from draftree.runner import layout_of
from draftree.runner.base import Runner
from draftree.runner.step_cost import StepCost
from draftree.runner.target import inspect_model

EPSILON = 1e-6


class EarlyHeadWeights(nn.Module):
    """h -> head(x + U V x) or head(P x), where x is the normed h.

    Attributes:
        norm: [d], gains of a root-mean-square norm.
        down, up: V [rank, d] and U [d, rank] of the low-rank projection, U starting at 0.
        projection: P [d, d] of the full one, starting at the identity.
        further: the same once more for each place after the first.
    """

    def __init__(self, hidden_size: int, rank: int = 0, places: int = 1) -> None:
        super().__init__()
        self.rank = rank
        self.norm = nn.Parameter(torch.ones(hidden_size, dtype=torch.float32, device="cpu"))
        if rank:
            down = torch.randn(rank, hidden_size, dtype=torch.float32, device="cpu") * hidden_size**-0.5
            self.down = nn.Parameter(down)
            self.up = nn.Parameter(torch.zeros(hidden_size, rank, dtype=torch.float32, device="cpu"))
        else:
            self.projection = nn.Parameter(torch.eye(hidden_size, dtype=torch.float32, device="cpu"))
        self.further = nn.ModuleList(EarlyHeadWeights(hidden_size, rank) for _ in range(places - 1))

    def forward(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return logits [.., V] of the next token from states [.., d], through the model's own `head`."""
        x = nn.functional.rms_norm(hidden.to(self.norm.dtype), self.norm.shape, self.norm, EPSILON)
        x = x + x @ self.down.T @ self.up.T if self.rank else x @ self.projection.T
        return head(x.to(hidden.dtype))

    def ahead(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Return logits [.., V] of the next token, the one after it, and so on, one for each place; see `forward`."""
        return [self(hidden, head), *(place(hidden, head) for place in self.further)]


class EarlyHead(Trained):
    """Early-head weights and the layer they belong to.

    Args:
        shapes: hidden_size, layers and vocab_size of the model.
        layer: n, how many layers have run (1 .. layers - 1).
        rank: of the low-rank projection; 0 for a full one.
        places: how many tokens are predicted, each by a norm and projection of its own; pruning uses the first alone.

    Raises:
        ValueError: a layer outside the model, a rank below 0 or above the hidden size, or no place.
    """

    method: ClassVar[str] = "early-head"
    weights: EarlyHeadWeights

    def __init__(self, shapes: Mapping[str, int], layer: int = 4, rank: int = 0, places: int = 1) -> None:
        check_least(1, layer=layer, places=places)
        check_least(0, shapes["hidden_size"], rank=rank)
        if layer >= shapes["layers"]:
            raise ValueError(
                f"layer is {layer}: the model has {shapes['layers']}, so give 1 to {shapes['layers'] - 1}."
            )
        self._shapes = dict(shapes)
        self.layer = layer
        self.settings: dict[str, Any] = {"layer": layer, "rank": rank, "places": places}
        self.weights = EarlyHeadWeights(shapes["hidden_size"], rank, places)

    @classmethod
    def fresh(cls, model: Any, **settings: Any) -> Self:
        """Return an untrained head for `model`; settings `layer`, `rank` and `places`."""
        target = inspect_model(model)
        sizes = {"hidden_size": target.hidden_size, "layers": len(target.layers), "vocab_size": target.vocab_size}
        return cls(sizes, **settings)

    def shapes(self) -> dict[str, Any]:
        return dict(self._shapes)


def demo_early_head(model: Any) -> EarlyHead:
    """Load the early head trained for the embedded model, after layer 4 of its 8; without network.

    Args:
        model: what `demo_model` returned.

    Raises:
        ValueError: another model.
    """
    with as_file(files("draftree") / "data" / "drafters" / EarlyHead.method) as folder:
        return EarlyHead.from_pretrained(folder, model)


class EarlyPruning:
    """Prunes trees inside the pass, for any drafter. Engines and threads may share it.

    Args:
        head: the early head; its layer is where trees are pruned.
        top_k: draft tokens stay that are among so many of the head's likeliest tokens after their parent.
        always: prune every pass that has two draft tokens or more, whether or not it pays.

    Raises:
        TypeError, ValueError: something that is no early head, or an option out of range.
    """

    def __init__(self, head: EarlyHead, *, top_k: int = 50, always: bool = False) -> None:
        if not isinstance(head, EarlyHead):
            raise TypeError(
                f"head is a {type(head).__name__}: pass an EarlyHead, as draftree.EarlyHead.from_pretrained(folder, "
                "model) gives."
            )
        check_least(1, top_k=top_k)
        self.head, self.top_k, self.always = head, top_k, always
        self._looks = Looks()

    @property
    def layer(self) -> int:
        """Return how many layers run before trees are pruned."""
        return self.head.layer

    def bind(self, runner: Runner, cost: StepCost | None, clock: Callable[[], float] = time.perf_counter) -> Pruner:
        """Return the pruner of one engine's passes.

        Args:
            cost: of its steps by their number of rows; None prunes every pass.
        """
        target = runner.target
        found = {"hidden_size": target.hidden_size, "layers": len(target.layers), "vocab_size": target.vocab_size}
        for name, expected in self.head.shapes().items():
            if found.get(name) != expected:
                raise ValueError(
                    f"This early head was made for a model with {name} {expected}, and this one has {found.get(name)}: "
                    "load the head that was trained for it."
                )
        layout_of(target.model)  # runners need it for the model's head, and must not run it in the middle of a pass
        weights = self.head.weights
        if target.device != weights.norm.device:
            weights = copy.deepcopy(weights).to(target.device)
        worth = Worth(self._looks, target, self.layer, None if self.always else cost)
        return Pruner(runner, weights, worth, clock, layer=self.layer, top_k=self.top_k)
