"""Records what a run does, step by step, at next to no cost while it runs.

A recorded step leaves numbers in flat lists and the bytes of its trees. No object of the step stays alive: the
garbage collector would look at each again and again, and memory that is kept in between what is let go makes every
later step pay for cold memory; both cost more than the recording. Nothing is computed or turned into text before
the records are read, so a step with a recorder does as little more whether its trees have one draft token or a
hundred. `docs/trace.md` describes the records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import PurePath
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from draftree.acceptance.base import Walk
from draftree.drafting.base import Drafter
from draftree.engine.passes import nodes_behind
from draftree.engine.request import Request
from draftree.engine.stats import STAGES
from draftree.tree import TokenTree

DIGITS = 4  # of log-probabilities
WORD = 8  # bytes of a token id

Held = bytes | tuple[Tensor, Tensor, Tensor, Tensor]  # tokens, parents, sources and log-probabilities of trees


class Part(NamedTuple):
    """One request's part in a step.

    Attributes:
        request: its id.
        budget: draft tokens that the shape allowed; None where nothing was drafted.
        drafted: size of the tree that was drafted.
        size: of the tree that was verified, its root counted.
        nodes, tokens, drafted_by, tie: the walk, see `Walk`.
    """

    request: int
    budget: int | None
    drafted: int
    size: int
    nodes: list[int]
    tokens: list[int]
    drafted_by: list[int | None]
    tie: bool


class Kept(NamedTuple):
    """One step, read from what was kept of it.

    Attributes:
        parts: of its requests, in slot order.
        tokens, parents, source, logp: of the trees, each [B, N].
        marks: five times, around the stages; fewer where a lossy rule let texts end without a pass.
        drafting: when the drafter began, and when it was done; None where nothing was drafted.
    """

    parts: list[Part]
    tokens: list[list[int]]
    parents: list[list[int]]
    source: list[list[int]]
    logp: list[list[float]]
    marks: list[float]
    drafting: tuple[float, float] | None


class Track:
    """The steps of one engine; made by `Recorder.track`.

    Args:
        about: what the engine is, in plain values.
        drafter: names the sources.
    """

    def __init__(self, about: dict[str, Any], drafter: Drafter | None) -> None:
        self.about = about
        self._drafter = drafter
        self._numbers: list[int | None] = []  # see `step`
        self._times: list[float] = []
        self._trees: list[Held] = []
        self._left: dict[int, tuple[Tensor, int, int]] = {}  # by step: which nodes were left, where some had gone
        self._requests: dict[int, Request] = {}
        self._last: list[Request] = []  # requests of the last step, all of them known
        self._ids: list[int] = []  # theirs
        self._near: bool | None = None  # whether trees lie in the CPU's memory
        self._drafted: tuple[Sequence[int], tuple[int, ...], float, float] | None = None  # in the coming step

    def drafted(self, budgets: Sequence[int], trees: TokenTree, began: float) -> None:
        """The drafter, called at `began` with `budgets`, has drafted these trees; now the shape goes on."""
        self._drafted = budgets, trees.sizes, began, perf_counter()

    def step(
        self,
        requests: list[Request],
        trees: TokenTree,
        left: tuple[Tensor, int, int] | None,
        walks: list[Walk],
        marks: list[float],
    ) -> None:
        """A step is over.

        Kept of it are numbers: of the requests, of the times, and whether anything was drafted; ids and sizes; where
        something was drafted, budgets and sizes of drafts; and every walk, behind its length, whether it has a tie, and
        which node drafted its last token (each earlier token was drafted by the walk's next node). Then times, and of
        the trees their bytes. A copy from another device would wait for it, so trees that lie there stay as they are.

        Args:
            requests, walks: of the step, in slot order.
            trees: that were verified.
            left: rows, offset and columns that show which nodes were left at the end of the pass, see `nodes_behind`;
                None where all were.
            marks: five times, around the stages; fewer where a lossy rule let texts end without a pass.
        """
        if requests != self._last:
            self._last, self._ids = requests, [request.id for request in requests]
            self._requests.update(zip(self._ids, requests, strict=True))
        if left is not None:
            self._left[len(self._trees)] = left
        numbers, drafted, self._drafted = self._numbers, self._drafted, None
        if drafted is None or drafted[2] < marks[0]:  # of a step that failed
            numbers += (len(walks), len(marks), False, *self._ids, *trees.sizes)
            self._times += marks
        else:
            budgets, sizes, began, ended = drafted
            numbers += (len(walks), len(marks), True, *self._ids, *trees.sizes, *budgets, *sizes)
            self._times += (*marks, began, ended)
        for walk in walks:
            drafted_by = walk.drafted_by
            numbers += (len(drafted_by), walk.tie, drafted_by[-1] if drafted_by else None, *walk.nodes, *walk.tokens)
        tokens, parents, source, logp = trees.tokens, trees.parents, trees.source, trees.logp
        if self._near is None:
            self._near = tokens.is_cpu
        if not self._near:
            self._trees.append((tokens, parents, source, logp))
        else:
            self._trees.append(b"".join([part.numpy().tobytes() for part in (tokens, parents, source, logp)]))

    # ---------------------------------------------------------------- afterwards

    def records(self, number: int) -> Iterator[dict[str, Any]]:
        """This run as plain values: itself, its requests, its steps; `number` distinguishes it from other runs."""
        names: dict[str, int] = {}
        start = self._times[0] if self._times else 0.0
        steps = [self._step_record(number, i, kept, start, names) for i, kept in enumerate(self._steps())]
        yield {"kind": "run", "run": number} | self.about | {"sources": list(names)}
        for request in self._requests.values():
            rules, context = request.rules, request.context
            yield {
                "kind": "request",
                "run": number,
                "request": request.id,
                "prompt": context.tokens[: context.prompt_length],
                "source": None if request.encoder_input is None else request.encoder_input.tolist(),
                "max_new_tokens": rules.max_new_tokens,
                "sample": rules.sample,
                "seed": rules.seed,
                "finish_reason": request.finish_reason,
            }
        yield from steps

    def _steps(self) -> Iterator[Kept]:
        """What was kept, step by step."""
        numbers: Iterator[Any] = iter(self._numbers)
        times, trees = iter(self._times), iter(self._trees)
        for batch in numbers:
            marks, drafted = next(numbers), next(numbers)
            ids, sizes = list(islice(numbers, batch)), list(islice(numbers, batch))
            budgets, came = [None] * batch, [1] * batch
            if drafted:
                budgets, came = list(islice(numbers, batch)), list(islice(numbers, batch))
            stamps = list(islice(times, marks))
            paused = (next(times), next(times)) if drafted else None
            parts = [Part(ids[b], budgets[b], came[b], sizes[b], *_walk(numbers)) for b in range(batch)]
            yield Kept(parts, *_trees(next(trees), batch), stamps, paused)

    def _step_record(self, run: int, number: int, kept: Kept, start: float, names: dict[str, int]) -> dict[str, Any]:
        marks = kept.marks
        stages = dict.fromkeys(STAGES, 0.0)
        stages |= {stage: end - begin for stage, begin, end in zip(STAGES, marks, marks[1:], strict=False)}
        shape = 0.0
        if kept.drafting is not None:
            paused, resumed = kept.drafting
            shape = max(paused - marks[0], 0.0) + max(marks[1] - resumed, 0.0)
        return {
            "kind": "step",
            "run": run,
            "step": number,
            "at": marks[0] - start,
            "passed": len(marks) > len(STAGES),
            "seconds": stages,
            "shape_seconds": shape,
            "members": self._members(number, kept, names),
        }

    def _members(self, step: int, kept: Kept, names: dict[str, int]) -> list[dict[str, Any]]:
        alive: list[list[int]] | None = None
        if step in self._left:
            alive = nodes_behind(*self._left[step], len(kept.tokens[0])).tolist()
        members = []
        for b, part in enumerate(kept.parts):
            size = part.size
            left = set(range(size)) if alive is None else set(alive[b])
            members.append(
                {
                    "request": part.request,
                    "asked": part.budget,
                    "drafted": part.drafted - 1,
                    "tokens": kept.tokens[b][:size],
                    "parents": kept.parents[b][:size],
                    "logp": [round(p, DIGITS) if math.isfinite(p) else None for p in kept.logp[b][:size]],
                    "sources": [None, *(self._name(bits, names) for bits in kept.source[b][1:size])],
                    "pruned": [node for node in range(size) if node not in left],
                    "walked": part.nodes,
                    "emitted": part.tokens,
                    "guesses": part.drafted_by,
                    "tie": part.tie,
                }
            )
        return members

    def _name(self, bits: int, names: dict[str, int]) -> int:
        """The number of a source in the run's list of them."""
        name = "" if self._drafter is None else self._drafter.source_name(bits)
        return names.setdefault(name, len(names))


def _walk(numbers: Iterator[Any]) -> tuple[list[int], list[int], list[int | None], bool]:
    """The next walk among the numbers of a step: nodes, tokens, drafted_by, tie."""
    length, tie, last = next(numbers), next(numbers), next(numbers)
    nodes, tokens = list(islice(numbers, length)), list(islice(numbers, length))
    return nodes, tokens, [*nodes[1:], last][:length], bool(tie)


def _trees(held: Held, batch: int) -> tuple[list[list[int]], list[list[int]], list[list[int]], list[list[float]]]:
    """Tokens, parents, sources and log-probabilities of a step's trees, each [B, N]."""
    if not isinstance(held, bytes):
        tokens, parents, source, logp = held
        return tokens.tolist(), parents.tolist(), source.tolist(), logp.tolist()
    count = len(held) // (3 * WORD + WORD // 2)
    numbers = np.frombuffer(held, np.int64, 3 * count).reshape(3, batch, -1).tolist()
    chances = np.frombuffer(held, np.float32, count, 3 * WORD * count).reshape(batch, -1).tolist()
    return numbers[0], numbers[1], numbers[2], chances


class Recorder:
    """Keeps every step of the engines that it is given to, to be written or shown afterwards.

    Give one to `generate` or `Engine`, and what it holds to `write_trace`. It keeps some 400 bytes of every step and 28
    of every node, so its memory grows with the run until it is let go.
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


def check_recorder(recorder: object) -> None:
    """Refuse what is no recorder.

    Raises:
        TypeError: something else.
    """
    if recorder is not None and not isinstance(recorder, Recorder):
        raise TypeError(f"recorder is a {type(recorder).__name__}: pass draftree.Recorder(), or None for no record.")
