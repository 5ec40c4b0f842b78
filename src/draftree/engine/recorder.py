"""Records what a run does, step by step, at next to no cost while it runs.

A step hands over its trees, its paths and its times, and they are kept as they are: nothing is computed, copied or
turned into text before the records are read. `docs/trace.md` describes the records.
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
from draftree.engine.request import Request
from draftree.engine.stats import STAGES
from draftree.tree import TokenTree

DIGITS = 4  # of log-probabilities


class _Drafting(NamedTuple):
    """What the drafter did in a step: the budgets it was given, the sizes of its trees, when it began and was done."""

    budgets: Sequence[int]
    sizes: tuple[int, ...]
    began: float
    done: float


class _Step(NamedTuple):
    """What is kept of a step."""

    # requests, paths: in slot order.
    requests: list[Request]
    paths: list[AcceptedPath]
    sizes: tuple[int, ...]  # of the trees that were verified
    # tokens, parents, source, logp: of these trees, each [B, N], on the device where they were; see `TokenTree`.
    tokens: Tensor
    parents: Tensor
    source: Tensor
    logp: Tensor
    # Rows, offset and columns that show which nodes were left at the end of the pass, see `nodes_behind`; None where
    # all were.
    left: tuple[Tensor, int, int] | None
    marks: list[float]  # five times, around the stages; fewer where a lossy rule let texts end without a pass
    drafted: _Drafting | None  # None where nothing was drafted


class Track:
    """The steps of one engine; made by `Recorder.track`.

    Args:
        about: what the engine is, in plain values.
        drafter: names the sources.
    """

    def __init__(self, about: dict[str, Any], drafter: Drafter | None) -> None:
        self.about = about
        self._drafter = drafter
        self._steps: list[_Step] = []
        self._drafted: _Drafting | None = None  # in the coming step

    def drafted(self, budgets: Sequence[int], trees: TokenTree, began: float, done: float) -> None:
        """The drafter, called at `began` with `budgets`, had drafted these trees by `done`; now the shape goes on."""
        self._drafted = _Drafting(budgets, trees.sizes, began, done)

    def step(
        self,
        requests: list[Request],
        trees: TokenTree,
        left: tuple[Tensor, int, int] | None,
        paths: list[AcceptedPath],
        marks: list[float],
    ) -> None:
        """A step is over; arguments as in `_Step`, none of which may change any more."""
        drafted, self._drafted = self._drafted, None
        if drafted is not None and drafted.began < marks[0]:  # of a step that failed
            drafted = None
        columns = trees.tokens, trees.parents, trees.source, trees.logp
        self._steps.append(_Step(requests, paths, trees.sizes, *columns, left, marks, drafted))

    # ---------------------------------------------------------------- afterwards

    def records(self, number: int) -> Iterator[dict[str, Any]]:
        """This run as plain values: itself, its requests, its steps; `number` distinguishes it from other runs."""
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
        stages = dict.fromkeys(STAGES, 0.0)
        stages |= {stage: end - begin for stage, begin, end in zip(STAGES, marks, marks[1:], strict=False)}
        shape = 0.0
        if drafted is not None:
            shape = max(drafted.began - marks[0], 0.0) + max(marks[1] - drafted.done, 0.0)
        return {
            "kind": "step",
            "run": run,
            "step": number,
            "at": marks[0] - start,
            "passed": len(marks) > len(STAGES),
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
        """The number of a source in the run's list of them."""
        name = "" if self._drafter is None else self._drafter.source_name(bits)
        return names.setdefault(name, len(names))


class Recorder:
    """Keeps every step of the engines that it is given to, to be written or shown afterwards.

    Give one to `generate` or `Engine`, and what it holds to `write_trace`. It keeps some 2 kB of every step and 28
    bytes of every node, so its memory grows with the run until it is let go.
    """

    def __init__(self) -> None:
        self._tracks: list[Track] = []

    def track(self, about: dict[str, Any], drafter: Drafter | None) -> Track:
        """A track for one more engine; `about` says in plain values what it is."""
        self._tracks.append(Track(about, drafter))
        return self._tracks[-1]

    def records(self) -> Iterator[dict[str, Any]]:
        """All that happened, as plain values that JSON holds: runs, each with its requests and its steps."""
        for number, track in enumerate(self._tracks):
            yield from track.records(number)


def about_engine(
    model: Any, runner: Any, drafter: Drafter | None, shape: Any, pruner: Any, lossy: Any, *, strict: bool
) -> dict[str, Any]:
    """What a record says of its engine: names, no weights."""
    target = runner.target
    name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    return {
        "model": PurePath(name).name if PurePath(name).is_absolute() else name,  # a path is private
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "runner": type(runner).__name__,
        "drafter": None if drafter is None else drafter.name,
        "shape": None if shape is None else type(shape).__name__,
        "pruner": None if pruner is None else f"{pruner.criterion} after layer {pruner.layer}",
        "acceptance": "lossless" if lossy is None else type(lossy).__name__,
        "strict": strict,
    }
