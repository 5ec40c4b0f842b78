"""Jacobi: draft tokens from parallel trajectories of the model itself, without training or a second model.

Lookahead decoding (Fu et al., 2024). Each pass attaches a window of W places by N - 1 levels to the tree. Level 0
proposes the next W tokens; each further level is the model's output for the level before, one place on (a Jacobi
iteration). The output for the last level completes W n-grams, which go into a pool. The n-grams that begin with the
newest token are the branches of the next tree.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftree.drafting.base import Attachment, ByRequest, Capabilities, Drafter, RequestState, Step, StepPlan, target_of
from draftree.errors import check_least
from draftree.runner.base import top_tokens
from draftree.tree import TokenTree

WIDEST = 128  # most places that a row may be ahead
CONFIDENCE, OLDER = 0.6, 0.7  # assumed probability of a draft token, and of an n-gram relative to the next newer one
KEYS = 1 << 16  # first tokens in a shared pool


class Pool:
    """n-grams by their first token, the newest `most` of each.

    Args:
        most: n-grams kept for each first token (G).
        keys: most first tokens; the least recently updated one is dropped. None for no limit.
    """

    def __init__(self, most: int, keys: int | None = None) -> None:
        self._most, self._keys = most, keys
        self._held: dict[int, dict[tuple[int, ...], None]] = {}  # the oldest first
        self._lock = threading.Lock()  # Engines of several threads may share a pool.

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            held = {first: dict(grams) for first, grams in self._held.items()}
        return {"_most": self._most, "_keys": self._keys, "_held": held}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def add(self, grams: Iterable[Sequence[int]]) -> None:
        """Add n-grams; later ones count as newer."""
        with self._lock:
            for first, *rest in grams:
                held = self._held.pop(first, {})
                held.pop(tuple(rest), None)
                held[tuple(rest)] = None
                if len(held) > self._most:
                    del held[next(iter(held))]
                self._held[first] = held
            while self._keys is not None and len(self._held) > self._keys:
                del self._held[next(iter(self._held))]

    def behind(self, first: int) -> list[tuple[int, ...]]:
        """Return the continuations of `first`, the newest first."""
        with self._lock:
            return list(self._held.get(first, ()))[::-1]

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))


@dataclass(slots=True)
class _Window:
    """The trajectories of one request."""

    # int64 [N - 1, W]; place w of level l is w + l positions behind the root; place 0 of level 0 is the root.
    levels: np.ndarray
    length: int  # the request's tokens when the root was the newest one
    pool: Pool


class _Rows(NamedTuple):
    """The M rows of a window without its first one, the root."""

    offsets: Tensor  # LongTensor [M], positions from the root's
    pattern: Tensor  # BoolTensor [M, 1 + M], visible rows: the root, then the window's


class Jacobi(Drafter):
    """Drafts from a window of Jacobi iterations (lookahead decoding, section 3).

    Args:
        window: W, places of the window; W (N - 1) - 1 rows are attached to each pass.
        ngram: N, tokens of an n-gram; the newest token and N - 1 draft tokens behind it.
        guesses: G, n-grams for each first token.
        from_prompt: begin with the n-grams of the prompt (the paper's "prompt as reference").
        shared: one pool for all requests without a `cache_salt`, instead of one for each request.

    Raises:
        ValueError: a number out of range.
    """

    name = "jacobi"
    capabilities = Capabilities(attaches=True, prepares=True, observes=True)

    def __init__(
        self, window: int = 15, ngram: int = 5, guesses: int = 15, *, from_prompt: bool = False, shared: bool = False
    ) -> None:
        check_least(1, window=window, guesses=guesses)
        check_least(3, ngram=ngram)
        if window + ngram > WIDEST:
            raise ValueError(f"window {window} and ngram {ngram} reach too far ahead: give at most {WIDEST} together.")
        self.window, self.ngram, self.guesses, self.from_prompt = window, ngram, guesses, from_prompt
        self.max_nodes = guesses * (ngram - 1)
        self._shared = Pool(guesses, KEYS) if shared else None
        self._live: ByRequest[_Window] = ByRequest()
        self._random = np.random.default_rng(0)  # for unknown places; no text depends on it
        self._rows = _rows(window, ngram)

    def rows(self, nodes: Any, requests: int = 1, attach_to: Any = None) -> Any:
        return nodes + requests * len(self._rows.offsets)

    def begin(self, request: RequestState) -> None:
        """See `Drafter.begin`: the window begins with random tokens of the prompt."""
        pool = self._shared if request.cache_salt is None else None  # A tenant's n-grams stay with the tenant.
        if pool is None:
            pool = Pool(self.guesses)
        if self.from_prompt:
            tokens = request.tokens
            pool.add(tokens[i : i + self.ngram] for i in range(len(tokens) - self.ngram + 1))
        levels = self._unknown(request, self.window)
        self._live[request.id] = _Window(levels, len(request.tokens), pool)

    def end(self, request: RequestState) -> None:
        self._live.pop(request.id, None)

    # ---------------------------------------------------------------- a step

    def draft(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        """See `Drafter.draft`: return the n-grams that begin with the newest token, with equal prefixes merged."""
        trees = []
        for request, budget in zip(requests, budgets, strict=True):
            reach = min(self.ngram - 1, request.remaining - 1)
            paths = []
            if budget > 0 and reach > 0:
                found = self._live[request.id].pool.behind(request.tokens[-1])[: self.guesses]
                paths = [_up_to_eos(path[:reach], request.eos_token_ids) for path in found]
            # The age counts once, in the first token of a path.
            logp = [
                [(i == 0) * age * np.log(OLDER) + np.log(CONFIDENCE) for i in range(len(path))]
                for age, path in enumerate(paths)
            ]
            tree = TokenTree.from_paths(request.tokens[-1], paths, logp, self.source)
            trees.append(tree if tree.sizes[0] - 1 <= budget else tree.best(max(budget, 0)))
        return TokenTree.stack(trees)

    def plan(self, step: StepPlan) -> Attachment | None:
        """See `Drafter.plan`: attach the window's rows, which see the root and each other but not the tree."""
        requests, trees = step.requests, step.trees
        if not step.prepares_any or trees is None:
            return None
        device = trees.device
        target = target_of(requests)
        for request in requests:
            self._catch_up(request)
        levels = np.stack([self._live[request.id].levels for request in requests])
        ids = torch.from_numpy(levels.reshape(len(requests), -1)[:, 1:]).to(device)
        offsets, pattern = self._rows = _Rows(*(part.to(device) for part in self._rows))
        between = torch.zeros(len(pattern), trees.width - 1, dtype=torch.bool, device=device)
        visible = torch.cat([pattern[:, :1], between, pattern[:, 1:]], 1)
        batch = len(requests)
        with torch.no_grad():
            embeddings = (target.decoder.get_input_embeddings() or target.model.get_input_embeddings())(ids)
        return Attachment(
            embeddings=embeddings,
            positions=offsets.expand(batch, -1),
            visible=visible.expand(batch, -1, -1),
            taps=(len(target.layers),),
        )

    def observe(self, step: Step) -> None:
        """See `Drafter.observe`: add n-grams to the pool, and move the window up one level."""
        end = step.trees.width + len(self._rows.offsets)
        last = [range(end - self.window, end)] * len(step.requests)  # the rows of the last level
        logits = step.own_logits(len(target_of(step.requests).layers), last)
        if logits is None:
            return
        made = top_tokens(logits, 1)[0][:, :, 0]
        for b, (request, emitted) in enumerate(zip(step.requests, step.emitted, strict=True)):
            window = self._live[request.id]
            if not emitted or window.length != len(request.tokens) - len(emitted):
                continue  # No token was emitted, or the window belongs to another root.
            levels = np.concatenate([window.levels, made[b, None]])
            levels[0, 0] = request.tokens[-len(emitted) - 1]
            window.pool.add(levels.T.tolist())
            # Level l + 1 of a place is level l of that place behind the next root.
            window.levels, window.length = levels[1:], window.length + 1
            self._catch_up(request)

    def _catch_up(self, request: RequestState) -> None:
        """Move the window to the newest token, with unknown places at its end."""
        window = self._live[request.id]
        passed = min(len(request.tokens) - window.length, self.window)
        if passed > 0:
            window.levels = np.concatenate([window.levels[:, passed:], self._unknown(request, passed)], 1)
        window.length = len(request.tokens)

    def _unknown(self, request: RequestState, places: int) -> np.ndarray:
        """Return random tokens of the text, [N - 1, places]."""
        tokens = request.tokens
        drawn = self._random.integers(len(tokens), size=(self.ngram - 1) * places)
        return np.array([tokens[i] for i in drawn.tolist()], dtype=np.int64).reshape(self.ngram - 1, places)


def _up_to_eos(path: tuple[int, ...], ends: Sequence[int]) -> tuple[int, ...]:
    end = next((i for i, token in enumerate(path) if token in ends), len(path))
    return path[: end + 1]


def _rows(window: int, ngram: int) -> _Rows:
    """Return the rows level by level; place w of level l sees level 0 up to place w, and place w of lower levels."""
    level, place = (grid.flatten() for grid in np.mgrid[: ngram - 1, :window])
    base = (level == 0) & (place <= place[:, None])
    column = (place == place[:, None]) & (level <= level[:, None])
    return _Rows(torch.from_numpy((level + place)[1:]), torch.from_numpy((base | column)[1:]))
