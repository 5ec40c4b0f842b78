"""Records what a run does, step by step, at next to no cost while it runs.

A recorded step is a handful of references to what the loop made anyway: the walks, the times, the bytes of the trees.
Nothing is computed or turned into text before somebody asks for the records, so a step with a recorder does as little
more whether its trees have one guess or a hundred. What the records say is told in `docs/trace.md`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import PurePath
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

Held = Tensor | bytes


class Kept(NamedTuple):
    """One step.

    Attributes:
        requests, walks: of the step, in slot order.
        trees: tokens, parents, logp and source, each [B, N], see `Track.step`.
        sizes: of the trees, roots counted.
        left: rows, offset and columns that tell which nodes were left at the end of the pass, see `nodes_behind`; None
            where all were.
        marks: five times, around the stages; fewer where a lossy rule let texts end without a pass.
        asked: guesses that the shape last asked for.
        drafted: sizes of the trees that came.
        began, ended: when shaping paused for the drafter, and when it went on; before `marks` where nobody was asked.
    """

    requests: list[Request]
    walks: list[Walk]
    trees: tuple[Held, ...]
    sizes: tuple[int, ...]
    left: tuple[Tensor, int, int] | None
    marks: list[float]
    asked: list[int]
    drafted: tuple[int, ...]
    began: float
    ended: float


class Track:
    """The steps of one engine; made by `Recorder.track`.

    Args:
        about: what the engine is, in plain values.
        drafter: names the sources.
    """

    def __init__(self, about: dict[str, Any], drafter: Drafter | None) -> None:
        self.about = about
        self._drafter = drafter
        self._steps: list[tuple[Any, ...]] = []  # in the order of `Kept`, which is only made afterwards
        self._asked: list[int] = []
        self._drafted: tuple[int, ...] = ()
        self._began = self._ended = -math.inf

    def drafted(self, budgets: list[int], trees: TokenTree, began: float) -> None:
        """At `began` the drafter was asked for `budgets` guesses; these trees came, and the shape goes on with them."""
        self._asked = budgets
        self._drafted = trees.sizes
        self._began = began
        self._ended = time.perf_counter()

    def step(
        self,
        requests: list[Request],
        trees: TokenTree,
        left: tuple[Tensor, int, int] | None,
        walks: list[Walk],
        marks: list[float],
    ) -> None:
        """A step is over. Keeps its parts, which the caller must not change afterwards.

        Of trees on the host bytes are kept: tensors that stay alive keep the allocator from using their memory again,
        and the next step pays for cold memory many times what copying some hundred bytes costs. A copy from another
        device would wait for it, so there the tensors stay.
        """
        held: tuple[Held, ...] = (trees.tokens, trees.parents, trees.logp, trees.source)
        if trees.tokens.is_cpu:
            held = tuple([part.numpy().tobytes() for part in held])  # type: ignore[union-attr]
        self._steps.append(
            (requests, walks, held, trees.sizes, left, marks, self._asked, self._drafted, self._began, self._ended)
        )

    # ---------------------------------------------------------------- afterwards

    def records(self, number: int) -> Iterator[dict[str, Any]]:
        """This run as plain values: itself, its requests, its steps; `number` tells it from other runs."""
        steps = [Kept(*kept) for kept in self._steps]
        requests = {request.id: request for kept in steps for request in kept.requests}
        names: dict[str, int] = {}
        told = [self._told(number, i, kept, steps[0].marks[0], names) for i, kept in enumerate(steps)]
        yield {"kind": "run", "run": number} | self.about | {"sources": list(names)}
        for request in requests.values():
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
        yield from told

    def _told(self, run: int, number: int, kept: Kept, start: float, names: dict[str, int]) -> dict[str, Any]:
        marks = kept.marks
        stages = dict.fromkeys(STAGES, 0.0)
        stages |= {stage: end - begin for stage, begin, end in zip(STAGES, marks, marks[1:], strict=False)}
        asked = kept.began >= marks[0]
        shape = max(kept.began - marks[0], 0.0) + max(marks[1] - kept.ended, 0.0) if asked else 0.0
        return {
            "kind": "step",
            "run": run,
            "step": number,
            "at": marks[0] - start,
            "passed": len(marks) > len(STAGES),
            "seconds": stages,
            "shape_seconds": shape,
            "members": self._members(kept, asked, names),
        }

    def _members(self, kept: Kept, asked: bool, names: dict[str, int]) -> list[dict[str, Any]]:
        batch = len(kept.sizes)
        tokens, parents, source = (_given(kept.trees[i], np.int64, batch) for i in (0, 1, 3))
        logp = _given(kept.trees[2], np.float32, batch)
        alive: list[list[int]] | None = None
        if kept.left is not None:
            alive = nodes_behind(*kept.left, len(tokens[0])).tolist()
        members = []
        for b, (request, walk, size) in enumerate(zip(kept.requests, kept.walks, kept.sizes, strict=True)):
            left = set(range(size)) if alive is None else set(alive[b])
            members.append(
                {
                    "request": request.id,
                    "asked": kept.asked[b] if asked else None,
                    "drafted": kept.drafted[b] - 1 if asked else 0,
                    "tokens": tokens[b][:size],
                    "parents": parents[b][:size],
                    "logp": [round(p, DIGITS) if math.isfinite(p) else None for p in logp[b][:size]],
                    "sources": [None, *(self._name(bits, names) for bits in source[b][1:size])],
                    "pruned": [node for node in range(size) if node not in left],
                    "walked": list(walk.nodes),
                    "emitted": list(walk.tokens),
                    "guesses": list(walk.guesses),
                    "tie": walk.tie,
                }
            )
        return members

    def _name(self, bits: int, names: dict[str, int]) -> int:
        """The number of a source in the run's list of them."""
        name = "" if self._drafter is None else self._drafter.source_name(bits)
        return names.setdefault(name, len(names))


def _given(held: Held, dtype: type[np.generic], batch: int) -> list[list[Any]]:
    """What was kept of a tree's tensor, as lists, one a request."""
    if isinstance(held, Tensor):
        return held.tolist()
    return np.frombuffer(held, dtype).reshape(batch, -1).tolist()


class Recorder:
    """Keeps every step of the engines that it is given to, to be told afterwards.

    Give one to `generate` or `Engine`, and what it holds to `write_trace`. It keeps about two kilobytes of every step
    and 28 bytes of every node, so its memory grows with the run until it is let go.
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
    model: Any, host: Any, drafter: Drafter | None, shape: Any, pruner: Any, lossy: Any, *, strict: bool
) -> dict[str, Any]:
    """What a record says of its engine: names, no weights."""
    target = host.target
    name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    return {
        "model": PurePath(name).name if PurePath(name).is_absolute() else name,  # where it lies is nobody's business
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "host": type(host).__name__,
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
