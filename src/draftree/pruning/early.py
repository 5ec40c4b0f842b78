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
from collections.abc import Callable

from draftree.errors import check_least
from draftree.pruning.early_head import EarlyHead
from draftree.pruning.pruner import Choice, Pruner
from draftree.pruning.worth import Looks, Worth
from draftree.runner import layout_of
from draftree.runner.base import Runner
from draftree.runner.step_cost import StepCost

CRITERIA = ("top-k", "best", "threshold")


class EarlyPruning:
    """Prunes trees inside the pass, for any drafter. Engines and threads may share it.

    Args:
        head: the early head; its layer is where trees are pruned.
        criterion: which draft tokens stay. "top-k": those among the head's `top_k` likeliest tokens after their parent
            (the paper's); "best": the `keep` draft tokens of highest path probability; "threshold": those whose path
            probability is at least `threshold`. Path probabilities are products of the head's along the path.
        top_k: for "top-k".
        keep: for "best".
        threshold: for "threshold".
        always: prune every pass that has two draft tokens or more, whether or not it pays.

    Raises:
        TypeError, ValueError: something that is no early head, or an option out of range.
    """

    def __init__(
        self,
        head: EarlyHead,
        *,
        criterion: str = "top-k",
        top_k: int = 50,
        keep: int = 16,
        threshold: float = 0.02,
        always: bool = False,
    ) -> None:
        if not isinstance(head, EarlyHead):
            raise TypeError(
                f"head is a {type(head).__name__}: pass an EarlyHead, as draftree.EarlyHead.from_pretrained(folder, "
                "model) gives."
            )
        if criterion not in CRITERIA:
            raise ValueError(f"criterion is {criterion!r}: choose {', '.join(CRITERIA)}.")
        check_least(1, top_k=top_k, keep=keep)
        if not 0 < threshold < 1:
            raise ValueError(f"threshold is {threshold}: give a probability over 0 and under 1.")
        self.head = head
        self.criterion, self.top_k, self.keep, self.threshold = criterion, top_k, keep, threshold
        self.always = always
        self._looks = Looks()

    @property
    def layer(self) -> int:
        """Return how many layers run before trees are pruned."""
        return self.head.layer

    def bind(self, runner: Runner, cost: StepCost | None, clock: Callable[[], float] = time.perf_counter) -> Pruner:
        """Return the pruner of one engine's passes.

        Args:
            runner: the engine's.
            cost: of its steps by their number of rows; None prunes every pass.
            clock: seconds.

        Raises:
            ValueError: a model of other shapes.
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
        choice = Choice(self.layer, self.criterion, self.top_k, self.keep, self.threshold)
        return Pruner(choice, runner, weights, worth, clock)
