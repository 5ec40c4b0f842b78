"""Base of drafters trained inside the model: shapes and settings, candidates between steps, trees of candidates.

BiTA, Hidden Transfer and Medusa read their draft tokens from the pass that verifies the last ones: for each depth below
the node accepted last, a row of logits. Its best few tokens and their log-probabilities go to the CPU in one copy,
and the next step drafts a tree of them. How those rows come about is all that a method adds to this file.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from draftree.drafting.base import Attachment, ByRequest, Capabilities, Drafter, RequestState, Step, StepPlan, target_of
from draftree.drafting.folder import Trained
from draftree.errors import check_least, did_you_mean
from draftree.runner import layout_of
from draftree.runner.base import top_tokens
from draftree.runner.target import Target, inspect_model
from draftree.tree import TokenTree
from draftree.tree.static import Choices, choices_named

SHAPES = ("hidden_size", "layers", "vocab_size", "kv_heads", "head_dim", "value_dim")
BEST_FIRST = "best-first"
# How often a draft token holds below a candidate that was not the best of its depth, to how often below the best, for
# which it is made in effect: why BiTA's efficient tree beats the full one. A factor that was learned from the text
# accepted as many tokens of 52 answers, for three drafters and trees of 4, 8 and 16 nodes.
OFF_PATH = 0.5
DEEPEST = 64  # levels that a drafter may be made for; papers take three to five


@dataclass(slots=True)
class Candidates:
    """Candidates after a request's newest token."""

    length: int  # of the request's tokens that these follow; any other length makes them stale
    tokens: np.ndarray  # int64 [D, K], best first at each depth
    logp: np.ndarray  # float32 [D, K], their log-probabilities


class InModelDrafter(Trained, Drafter):
    """Base of the drafters whose draft tokens come out of the target's own pass.

    Args:
        steps: depths that the weights are made for.
        tree: how candidates become a tree: "best-first" (the most probable nodes under the shape's budget, see
            `TokenTree.from_candidates`), "chain",
            "full-K", "efficient-K", "efficient-code-K" (see `draftree.tree.static`), or a choice list, such as
            [(0,), (1,), (0, 0)].
        candidates: tokens kept per depth; a static tree's width where it is wider.
        depth: how many of the trained depths are drafted, from the first; None for all. Fewer cost fewer rows.
        settings: what else the method takes, kept for its folder.

    Attributes:
        weights: all trained tensors; fp32 on the CPU until the drafter is bound, when a copy in the model's type and
            on its device is made (where it differs).
        settings: JSON-able constructor arguments besides `shapes`.
    """

    capabilities = Capabilities(attaches=True, prepares=True, observes=True)

    def __init__(
        self,
        shapes: Mapping[str, int],
        steps: int,
        *,
        tree: str | Sequence[Sequence[int]] = BEST_FIRST,
        candidates: int = 8,
        depth: int | None = None,
        **settings: Any,
    ) -> None:
        self._refuse_unknown(settings)
        check_least(1, candidates=candidates, depth=depth)
        if depth is not None and not 1 <= depth <= steps:
            raise ValueError(f"depth is {depth}: this drafter was made for 1 to {steps}.")
        self._shapes = checked_shapes(shapes)
        self.steps = steps
        self.depth = depth or steps
        self.choices: Choices | None = None if tree == BEST_FIRST else choices_named(tree, self.depth)
        self.candidates = candidates
        if self.choices is not None:
            self.max_nodes = self.node_budget = len(self.choices)
            check_least(0, self._shapes["vocab_size"] - 1, rank=max(choice[-1] for choice in self.choices))
            self.candidates = max(candidates, 1 + max(choice[-1] for choice in self.choices))
        self.candidates = min(self.candidates, self._shapes["vocab_size"])
        saved = tree if isinstance(tree, str) else [list(choice) for choice in tree]
        self.settings: dict[str, Any] = {**settings, "tree": saved, "candidates": candidates, "depth": depth}
        self._held: ByRequest[Candidates] = ByRequest()
        self._placements: dict[tuple[torch.device, torch.dtype], Any] = {}
        self._versions: Any = None  # of the weights when placements were made of them

    def __getstate__(self) -> dict[str, Any]:
        """Copy all but the placed weights, which a copy makes for its own target."""
        return vars(self) | {"_placements": {}, "_versions": None}

    def _refuse_unknown(self, settings: Mapping[str, Any]) -> None:
        own = list(signature(type(self).__init__).parameters)
        for name in settings:
            if name not in own:
                hint = did_you_mean(name, [*own, "tree", "candidates", "depth"])
                raise TypeError(f"{type(self).__name__} has no option {name!r}.{hint}")

    @classmethod
    def fresh(cls, model: Any, **settings: Any) -> Self:
        """Return an untrained drafter for `model`, with its shapes."""
        return cls(shapes_of(inspect_model(model)), **settings)

    def shapes(self) -> dict[str, int]:
        """Return the shapes that must fit the model: hidden_size, layers, vocab_size, kv_heads, head_dim, value_dim."""
        return dict(self._shapes)

    # ---------------------------------------------------------------- the drafter's contract

    def bind(self, target: Target, *, eos_token_ids: Sequence[int] = ()) -> None:
        """See `Drafter.bind`."""
        found = shapes_of(target)
        for name, expected in self._shapes.items():
            if found[name] != expected:
                raise ValueError(
                    f"This {self.method} drafter was made for a model with {name} {expected}, and this one has "
                    f"{found[name]}: load the drafter that was trained for it."
                )
        # Engines come and go, one for each call of `generate`; weights are copied again only if they have changed.
        held = self.weights.state_dict().values()
        versions = [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in held]
        if versions != self._versions:
            self._placements, self._versions = {}, versions
        self.placement(target.device, target.dtype)

    def placement(self, device: torch.device, dtype: torch.dtype) -> Any:
        """Return the result of `place`, cached by device and type: several engines may use the drafter in turns."""
        placements = self._placements
        if (device, dtype) not in placements:
            placements[device, dtype] = self.place(device, dtype)
        return placements[device, dtype]

    @abstractmethod
    def place(self, device: torch.device, dtype: torch.dtype) -> Any:
        """Return the weights that a pass needs, on a target's device and in its type."""

    def plan(self, step: StepPlan) -> Attachment | None:
        """See `Drafter.plan`: nothing where no step will draft from it."""
        if not step.prepares_any or step.trees is None:
            return None
        return self.attach(step.trees, step.attach_to, target_of(step.requests).dtype)

    @abstractmethod
    def attach(self, trees: TokenTree, attach_to: int | None, dtype: torch.dtype) -> Attachment:
        """Return the rows or taps that `draft_logits` reads; `attach_to` as in `StepPlan`, `dtype` of the target."""

    @abstractmethod
    def draft_logits(self, step: Step, paths: Sequence[Sequence[int]]) -> Tensor | None:
        """Return logits [B, D, V] of the tokens after next, at the last node of each path.

        D is `depth`, or less where the tree is best-first. None where the pass did not hold what `attach` returned
        (strict mode leaves rows out).
        """

    def likeliest(self, step: Step) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the best tokens after the last accepted node and their log-probabilities, each [B, depth, candidates].

        None where the pass did not hold what `attach` returned.
        """
        logits = self.draft_logits(step, [path or [0] for path in step.accepted])
        return None if logits is None else top_tokens(logits, self.candidates)

    def observe(self, step: Step) -> None:
        """See `Drafter.observe`: keep the candidates of the node accepted last."""
        live = [b for b, emitted in enumerate(step.emitted) if emitted]
        if not live or self._shapes["layers"] not in step.result.hidden:
            return
        found = self.likeliest(step)
        if found is None:
            return
        tokens, logp = found
        for b in live:
            request = step.requests[b]
            self._held[request.id] = Candidates(len(request.tokens), tokens[b], logp[b])

    def draft(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        held = [self.ready(request) for request in requests]
        some = next((h for h in held if h is not None), None)
        roots = [request.tokens[-1] for request in requests]
        if some is None:
            return TokenTree.roots(torch.tensor(roots, dtype=torch.long, device="cpu"))
        tokens = np.array([some.tokens if h is None else h.tokens for h in held])
        logp = np.array([some.logp if h is None else h.logp for h in held])  # a copy, as it is changed
        for b, request in enumerate(requests):
            if held[b] is None or request.remaining <= self.depth:
                reach = 0 if held[b] is None else max(request.remaining - 1, 0)
                logp[b, reach:] = -np.inf  # deeper draft tokens are wasted
        at = torch.tensor(roots, dtype=torch.long, device="cpu")
        if self.choices is None:
            return TokenTree.from_candidates(at, tokens, logp, budgets, self.source, OFF_PATH)
        candidates = torch.from_numpy(tokens)
        tree = TokenTree.from_choices(at, candidates, self.choices, torch.from_numpy(logp), self.source)
        if not np.isfinite(logp).all():
            tree, _ = tree.prune(tree.logp > -torch.inf)
        return tree if all(n >= size - 1 for n, size in zip(budgets, tree.sizes, strict=True)) else tree.best(budgets)

    def ready(self, request: RequestState) -> Candidates | None:
        """Return the candidates after a request's newest token; None without any from the last pass."""
        held = self._held.get(request.id)
        return held if held is not None and held.length == len(request.tokens) else None

    def end(self, request: RequestState) -> None:
        self._held.pop(request.id, None)


def checked_shapes(shapes: Mapping[str, int]) -> dict[str, int]:
    """Return `shapes` as plain numbers; raise a ValueError if one is missing."""
    missing = [name for name in SHAPES if name not in shapes]
    if missing:
        raise ValueError(f"shapes has no {missing[0]!r}: take them from the model, by `fresh(model)`.")
    return {name: int(shapes[name]) for name in SHAPES}


def shapes_of(target: Target) -> dict[str, int]:
    """Return the shapes that a drafter and its model share."""
    if target.recurrence is not None:
        raise ValueError(
            f"'{target.model_type}' models have recurrent layers, and drafters inside the model need attention in each "
            "layer: use Lookahead, PromptLookup or DraftModel."
        )
    layout = layout_of(target.model)
    return {
        "hidden_size": target.hidden_size,
        "layers": len(target.layers),
        "vocab_size": target.vocab_size,
        "kv_heads": layout.kv_heads,
        "head_dim": layout.head_dim,
        "value_dim": layout.value_dim,
    }


KEPT = 16  # layouts; each of a tree with rows at all nodes may hold a megabyte


class GroupNodes(NamedTuple):
    """The nodes that get a group of rows: G of each tree, in ascending order."""

    nodes: Tensor | None  # LongTensor [B, G], or None for all
    depth: Tensor  # LongTensor [B, G]
    ancestors: Tensor  # BoolTensor [B, G, N]


def nodes_of(trees: TokenTree, most: int | None, attach_to: int | None) -> GroupNodes:
    """Return the nodes of `trees` that get a group; the root is always one.

    Args:
        most: nodes of a tree that the drafter gives one; None for all.
        attach_to: nodes of a tree that the shape finds worth the rows (`StepPlan.attach_to`); None for all.
    """
    count = max(1, min(n for n in (trees.width, most, attach_to) if n is not None))
    if count == trees.width:
        return GroupNodes(None, trees.depth, trees.ancestors)
    if count == 1:
        root = trees.depth[:, :1]  # which is 0, as the root's number
        return GroupNodes(root, root, trees.ancestors[:, :1])
    nodes = likeliest_ends(trees, count)
    rows = nodes[:, :, None].expand(-1, -1, trees.width)
    return GroupNodes(nodes, trees.depth.gather(1, nodes), trees.ancestors.gather(1, rows))


def serving(chosen: GroupNodes, paths: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return for each tree the group that serves the last node of a path, and its levels above that node.

    Args:
        chosen: the nodes with groups.
        paths: nodes of each tree, the root first.
    """
    if chosen.nodes is None:
        return [(path[-1], 0) for path in paths]
    if chosen.nodes.shape[1] == 1:
        return [(0, len(path) - 1) for path in paths]
    found = []
    for nodes, path in zip(chosen.nodes.tolist(), paths, strict=True):
        # The deepest on the way; the root always is among them.
        group, node = max((i, node) for i, node in enumerate(nodes) if node in path)
        found.append((group, len(path) - 1 - path.index(node)))
    return found


class GroupDrafter(InModelDrafter):
    """Base of the drafters that attach groups of rows: which nodes get one, and the rows of the node accepted last.

    Args:
        shapes, steps, options: see `InModelDrafter`.
        groups: most nodes of a tree that get a group, the root always among them; None for all, or as many as the shape
            finds worth their rows (`StepPlan.attach_to`).
    """

    def __init__(self, shapes: Mapping[str, int], steps: int, *, groups: int | None, **options: Any) -> None:
        super().__init__(shapes, steps, **options, groups=groups)
        check_least(1, groups=groups)
        self.groups = groups
        self._made: dict[tuple[Any, ...], tuple[Tensor, Attachment]] = {}  # layouts, see `attach`
        self._chosen: tuple[Tensor, int | None, GroupNodes] | None = None  # see `_nodes`

    def __getstate__(self) -> dict[str, Any]:
        """See `InModelDrafter`; layouts are found by the addresses of tensors, which a copy's are not at."""
        return super().__getstate__() | {"_made": {}, "_chosen": None}

    @abstractmethod
    def lay_out(self, chosen: GroupNodes, dtype: torch.dtype) -> Attachment:
        """Return the rows of all groups, for trees of one structure and a target of this type."""

    @abstractmethod
    def row_of(self, group: int, step: int, groups: int) -> int:
        """Return the number of row `step` (0 .. depth - 1) of a group among all rows of `groups` groups."""

    def group_count(self, nodes: Any, requests: int, attach_to: Any = None) -> Any:
        """Return how many of `nodes` nodes (a number or an array) of `requests` trees get a group; see `rows`."""
        count = nodes if attach_to is None else np.minimum(nodes, attach_to)
        return count if self.groups is None else np.minimum(count, self.groups * requests)

    def attach(self, trees: TokenTree, attach_to: int | None, dtype: torch.dtype) -> Attachment:
        """Return the layout of these trees by `lay_out`, cached by structure and by nodes with groups."""
        chosen = self._nodes(trees, attach_to)
        ancestors, nodes = trees.ancestors, chosen.nodes
        # A static tree has one structure, and what the root's rows see few.
        key: tuple[Any, ...] = (ancestors.shape, ancestors.device, dtype)
        if chosen.depth.shape[1] > 1:  # what the root's rows see is the same in all trees of a size
            key += (ancestors.data_ptr(), ancestors.stride())
            if nodes is not None:
                if not nodes.is_cpu:  # to name them would wait for the device
                    return self.lay_out(chosen, dtype)
                key += (nodes.numpy().tobytes(),)
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= KEPT:
                self._made.pop(next(iter(self._made), key), None)  # another thread may have been faster
            # The tensor is kept along, so that its memory, and with it the key, is not given to another one.
            found = self._made[key] = (ancestors, self.lay_out(chosen, dtype))
        return found[1]

    def _nodes(self, trees: TokenTree, attach_to: int | None) -> GroupNodes:
        """See `nodes_of`; the same before and after a pass, as a device may add in another order the second time."""
        last = self._chosen  # read once, as another thread may put its own
        if last is None or last[0] is not trees.logp or last[1] != attach_to:
            last = self._chosen = trees.logp, attach_to, nodes_of(trees, self.groups, attach_to)
        return last[2]

    def draft_logits(self, step: Step, paths: Sequence[Sequence[int]]) -> Tensor | None:
        """See `InModelDrafter.draft_logits`: row i of a node's group predicts the token i + 1 places after it."""
        chosen, width = self._nodes(step.trees, step.attach_to), step.trees.width
        groups = chosen.depth.shape[1]
        numbers = []
        for group, passed in serving(chosen, paths):
            # The first rows of an ancestor's group speak of the tokens between the two.
            rows = [width + self.row_of(group, i, groups) for i in range(passed, self.depth)]
            numbers.append(rows + [-1] * (self.depth - len(rows)))
        return step.own_logits(self._shapes["layers"], numbers)


def likeliest_ends(trees: TokenTree, count: int) -> Tensor:
    """Return the root and the `count` - 1 nodes likeliest to be accepted last, ascending: LongTensor [B, count].

    A node is accepted last with the probability of reaching it less that of reaching one of its children.
    """
    reached = trees.logp.exp()
    ends = reached.scatter_add(1, trees.parents[:, 1:].clamp(min=0), -reached[:, 1:])
    ends[:, 0] = torch.inf
    return ends.topk(count, -1).indices.sort(-1).values
