"""One tree of several drafters' trees: what each of them says is calibrated, then what they say together is weighed.

A trie's hit counts and a head's softmax are not one currency. So each drafter's path probabilities are first turned
into shares of guesses that came true (`Calibration`), and read as probabilities of a token after its parent. Where two
drafters guess the same token, the chance that both are wrong is the product of theirs if they know different things,
and only the smaller of theirs if they know the same. How near the first a pair of drafters comes is learned from the
text. The larger of the two probabilities, the floor that `TokenTree.merge` takes, would leave that evidence unused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from draftree.drafting.base import Context
from draftree.shaping.calibration import Calibration
from draftree.tree import TokenTree

TIE = 0.02  # weight of a drafter's own log-probability: keeps its order where calibration sees no difference
LEAST, CERTAIN = 1e-6, 0.999  # probabilities of a token after its parent
HEED = 1.0  # weight of a second drafter's word before it is known: as if it knew different things
HEED_MOST = 3.0  # more than 1 where two drafters that agree are surer than both of them think
PACE = 0.05  # of learning that weight

Word = tuple[float, int]  # probability of a token after its parent, and the number of the drafter that says so


class _Said(NamedTuple):
    """What one drafter says: its nodes' tokens, parents, and probabilities after their parents, each [B][N]."""

    sizes: tuple[int, ...]
    tokens: list[list[int]]
    parents: list[list[int]]
    steps: list[list[float]]


class _Open(NamedTuple):
    """A joined tree whose text is still to come.

    Attributes:
        length: of the request's tokens before it.
        place: (parent, token) -> node.
        words: by node; the surest first.
    """

    length: int
    place: dict[tuple[int, int], int]
    words: list[list[Word]]


class Votes:
    """Joins drafters' trees, and learns from the text what their words are worth.

    Args:
        drafters: how many there are.

    Attributes:
        calibrations: one for each drafter.
        heed: [drafters][drafters], weight of the second's word where the first is the surer: 0 adds nothing to it, 1
            counts as independent.
    """

    def __init__(self, drafters: int) -> None:
        self.calibrations = [Calibration() for _ in range(drafters)]
        self.heed = [[HEED] * drafters for _ in range(drafters)]
        self._slopes = [[1.0] * drafters for _ in range(drafters)]  # sums of squared gradients
        self._open: dict[int, _Open] = {}  # by request

    def join(self, requests: Sequence[Context], trees: Sequence[TokenTree], budgets: Sequence[int]) -> TokenTree:
        """The best `budgets[b]` guesses of all drafters for each request, best first.

        The source of drafter i's guesses is bit i, their log-probability that of the joined path.

        Args:
            requests: B of them.
            trees: B trees of each drafter.
            budgets: most guesses per request.
        """
        said: list[_Said | None] = []
        for calibration, tree in zip(self.calibrations, trees, strict=True):
            if tree.width > 1:
                calibration.remember(requests, tree)
            said.append(_read(calibration, tree, requests) if tree.width > 1 else None)
        chosen = [self._best(b, request, said, budgets[b]) for b, request in enumerate(requests)]
        return _laid_out(requests, chosen)

    def _best(self, b: int, request: Context, said: Sequence[_Said | None], budget: int) -> list[list[Any]]:
        """Tokens, parents, log-probabilities and sources of a request's best guesses; node 0 is the root.

        A loop over nodes, of which there are a few dozen: finding equal paths so takes a sixth of the time of
        `TokenTree.merge`, which does it by array operations.
        """
        tokens, parents = [-1], [-1]
        words: list[list[Word]] = [[]]
        place: dict[tuple[int, int], int] = {}
        for drafter, own in enumerate(said):
            if own is None:
                continue
            local = [0]
            own_tokens, own_parents, steps = own.tokens[b], own.parents[b], own.steps[b]
            for i in range(1, own.sizes[b]):
                token, above, word = own_tokens[i], local[own_parents[i]], (steps[i], drafter)
                node = place.get((above, token))
                if node is None:
                    node = place[above, token] = len(tokens)
                    tokens.append(token)
                    parents.append(above)
                    words.append([word])
                elif words[node][-1][1] != drafter:
                    words[node].append(word)
                else:  # branches that a trie keeps apart
                    words[node][-1] = max(words[node][-1], word)
                local.append(node)
        chance = [1.0]
        for node in range(1, len(tokens)):
            heard = words[node]
            chance.append(chance[parents[node]] * (heard[0][0] if len(heard) == 1 else 1 - self._both_wrong(heard)))
        self._open[request.id] = _Open(len(request.tokens), place, words)
        # Sorting is stable, so a parent comes before a child that ties with it.
        order = sorted(range(1, len(tokens)), key=chance.__getitem__, reverse=True)[:budget]
        at = {0: 0} | {node: i for i, node in enumerate(order, 1)}
        return [
            [tokens[node] for node in order],
            [at[parents[node]] for node in order],
            [math.log(chance[node]) for node in order],
            [sum(1 << drafter for _, drafter in words[node]) for node in order],
        ]

    def _both_wrong(self, heard: list[Word]) -> float:
        """Probability that a token which several drafters say does not come; puts the surest of them first."""
        heard.sort(reverse=True)
        (surest, first), *others = heard
        heed = self.heed[first]
        wrong = 1 - surest
        for step, drafter in others:
            wrong *= (1 - step) ** heed[drafter]
        return wrong

    def compare(self, requests: Sequence[Context]) -> None:
        """Learn from text that has come."""
        for calibration in self.calibrations:
            calibration.compare(requests)
        for request in requests:
            opened = self._open.pop(request.id, None)
            if opened is not None:
                self._learn(opened, request.tokens[opened.length :])

    def _learn(self, opened: _Open, text: list[int]) -> None:
        """A step up the likelihood of the text, where several drafters spoke of its next token."""
        right: int | None = 0
        for token in text:
            children = [(said, node) for (above, said), node in opened.place.items() if above == right]
            for said, node in children:
                if len(opened.words[node]) > 1:
                    self._nudge(opened.words[node], came=said == token)
            right = next((node for said, node in children if said == token), None)
            if right is None:
                return

    def _nudge(self, heard: list[Word], *, came: bool) -> None:
        wrong = self._both_wrong(heard)
        (_, first), *others = heard
        for step, drafter in others:
            steepness = math.log(1 - step)  # of log(wrong), by the weight
            slope = steepness * (-wrong / max(1 - wrong, 1 - CERTAIN) if came else 1.0)
            slopes = self._slopes[first][drafter] = self._slopes[first][drafter] + slope * slope
            heed = min(max(self.heed[first][drafter] + PACE * slope / math.sqrt(slopes), 0.0), HEED_MOST)
            self.heed[first][drafter] = self.heed[drafter][first] = heed
            self._slopes[drafter][first] = slopes

    def forget(self, request: Context) -> None:
        """The request is over; the rest of its text will not come."""
        for calibration in self.calibrations:
            calibration.forget(request)
        self._open.pop(request.id, None)


def _read(calibration: Calibration, tree: TokenTree, requests: Sequence[Context]) -> _Said:
    parents = tree.parents.numpy(force=True)
    paths = calibration.worth(tree, requests) * np.exp(TIE * tree.logp.numpy(force=True))
    paths[:, 0] = 1.0
    above = np.take_along_axis(paths, parents.clip(min=0), 1)
    steps = (paths / above.clip(min=LEAST)).clip(LEAST, CERTAIN)
    return _Said(tree.sizes, tree.tokens.tolist(), parents.tolist(), steps.tolist())


def _laid_out(requests: Sequence[Context], joined: Sequence[list[list[Any]]]) -> TokenTree:
    """Trees of the requests' newest tokens and the guesses `joined` below them, padded to the largest."""
    sizes = tuple(1 + len(tokens) for tokens, *_ in joined)
    shape = (len(sizes), max(sizes))
    columns: list[np.ndarray] = [np.zeros(shape, np.int64), np.full(shape, -1)]
    columns += [np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int64)]
    columns[0][:, 0] = [request.tokens[-1] for request in requests]
    columns[2][:, 0] = 0.0
    for b, parts in enumerate(joined):
        for column, part in zip(columns, parts, strict=True):
            column[b, 1 : sizes[b]] = part
    tokens, parents, logp, source = (torch.from_numpy(column) for column in columns)
    return TokenTree(tokens, parents, logp, source, sizes)
