"""Record the steps of a run, at almost no cost while it runs.

Each step hands over its trees, paths and times. They are converted only when the records are read. `docs/trace.md`
describes the records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from torch import Tensor

from draftree.acceptance.base import AcceptedPath
from draftree.drafting.base import Drafter
from draftree.engine.passes import nodes_behind
from draftree.engine.request import STAGES, Request
from draftree.tree import TokenTree

DIGITS = 4  # Decimal places of log-probabilities.


class _Drafting(NamedTuple):
    """The drafting of a step: budgets, sizes of the trees, and begin and end in seconds."""

    budgets: Sequence[int]
    sizes: tuple[int, ...]
    began: float
    done: float


class _Step(NamedTuple):
    """The record of a step; requests and paths are in slot order."""

    requests: list[Request]
    paths: list[AcceptedPath]
    sizes: tuple[int, ...]  # Sizes of the verified trees.
    # Columns of these trees, each [B, N], on their device; see `TokenTree`.
    tokens: Tensor
    parents: Tensor
    source: Tensor
    logp: Tensor
    # Arguments of `nodes_behind`, for the nodes left at the end of the pass; None if no node was pruned.
    left: tuple[Tensor, int, int] | None
    marks: list[float]  # Times around the stages.
    drafted: _Drafting | None


class Track:
    """The steps of one engine; `Recorder.track` makes it."""

    def __init__(self, about: dict[str, Any], drafter: Drafter | None) -> None:
        self.about = about
        self._drafter = drafter
        self._steps: list[_Step] = []
        self._drafted: _Drafting | None = None

    def drafted(self, budgets: Sequence[int], trees: TokenTree, began: float, done: float) -> None:
        """Record the drafted trees, and the times before and after drafting."""
        self._drafted = _Drafting(budgets, trees.sizes, began, done)

    def step(
        self,
        requests: list[Request],
        trees: TokenTree,
        left: tuple[Tensor, int, int] | None,
        paths: list[AcceptedPath],
        marks: list[float],
    ) -> None:
        """Record a step; arguments as in `_Step`, which must not change afterwards."""
        drafted, self._drafted = self._drafted, None
        if drafted is not None and drafted.began < marks[0]:  # It belongs to a failed step.
            drafted = None
        columns = trees.tokens, trees.parents, trees.source, trees.logp
        self._steps.append(_Step(requests, paths, trees.sizes, *columns, left, marks, drafted))

    def records(self, number: int) -> Iterator[dict[str, Any]]:
        """Yield this run as plain values: the run, its requests, its steps."""
        names: dict[str, int] = {}
        start = self._steps[0].marks[0] if self._steps else 0.0
        steps = [self._step_record(number, i, step, start, names) for i, step in enumerate(self._steps)]
        yield {"kind": "run", "run": number} | self.about | {"sources": list(names)}
        requests = {request.id: request for step in self._steps for request in step.requests}
        for request in requests.values():
            params, context = request.params, request.context
            yield {
                "kind": "request",
                "run": number,
                "request": request.id,
                "prompt": context.tokens[: context.prompt_length],
                "source": None if request.context.source is None else request.context.source.tolist(),
                "max_new_tokens": params.max_new_tokens,
                "sample": params.sample,
                "seed": params.seed,
                "finish_reason": request.finish_reason,
            }
        yield from steps

    def _step_record(self, run: int, number: int, step: _Step, start: float, names: dict[str, int]) -> dict[str, Any]:
        marks, drafted = step.marks, step.drafted
        stages = {stage: end - begin for stage, begin, end in zip(STAGES, marks, marks[1:], strict=False)}
        shape = 0.0
        if drafted is not None:
            shape = max(drafted.began - marks[0], 0.0) + max(marks[1] - drafted.done, 0.0)
        return {
            "kind": "step",
            "run": run,
            "step": number,
            "at": marks[0] - start,
            "seconds": stages,
            "shape_seconds": shape,
            "members": self._members(step, names),
        }

    def _members(self, step: _Step, names: dict[str, int]) -> list[dict[str, Any]]:
        tokens, parents, source, logp = (t.tolist() for t in (step.tokens, step.parents, step.source, step.logp))
        alive = None if step.left is None else nodes_behind(*step.left, len(tokens[0])).tolist()
        drafted = step.drafted
        members = []
        for b, (request, path, size) in enumerate(zip(step.requests, step.paths, step.sizes, strict=True)):
            left = set(range(size)) if alive is None else set(alive[b])
            members.append(
                {
                    "request": request.id,
                    "budget": None if drafted is None else drafted.budgets[b],
                    "drafted": 0 if drafted is None else drafted.sizes[b] - 1,
                    "tokens": tokens[b][:size],
                    "parents": parents[b][:size],
                    "logp": [round(p, DIGITS) if math.isfinite(p) else None for p in logp[b][:size]],
                    "sources": [None, *(self._name(bits, names) for bits in source[b][1:size])],
                    "pruned": [node for node in range(size) if node not in left],
                    "path": path.nodes,
                    "emitted": path.tokens,
                    "accepted": path.drafted_by,
                }
            )
        return members

    def _name(self, bits: int, names: dict[str, int]) -> int:
        """Return the number of a source in the run's list of sources."""
        name = "" if self._drafter is None else self._drafter.source_name(bits)
        return names.setdefault(name, len(names))


class Recorder:
    """Record each step of engines.

    Pass it to `generate` or `Engine`, and then to `write_trace`. It needs about 2 kB per step and 28 bytes per node.
    """

    def __init__(self) -> None:
        self._tracks: list[Track] = []

    def track(self, about: dict[str, Any], drafter: Drafter | None) -> Track:
        """Return a track for another engine."""
        self._tracks.append(Track(about, drafter))
        return self._tracks[-1]

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield all records as JSON values: runs, each with its requests and its steps."""
        for number, track in enumerate(self._tracks):
            yield from track.records(number)


def about_engine(
    model: Any, runner: Any, drafter: Drafter | None, shape: Any, pruner: Any, lossy: Any, *, strict: bool
) -> dict[str, Any]:
    """Return the description of an engine, by names."""
    target = runner.target
    name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    return {
        "model": PurePath(name).name if PurePath(name).is_absolute() else name,  # Paths are private.
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "runner": type(runner).__name__,
        "drafter": None if drafter is None else drafter.name,
        "shape": None if shape is None else type(shape).__name__,
        "pruner": None if pruner is None else f"top-{pruner.top_k} after layer {pruner.layer}",
        "acceptance": "lossless" if lossy is None else type(lossy).__name__,
        "strict": strict,
    }
