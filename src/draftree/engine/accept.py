"""The accept stage: the rule in force chooses a path of each tree, and its tokens are emitted to the request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from draftree.acceptance.base import AcceptedPath, Choice, ScoredTree, best_tokens, lazy_walk
from draftree.engine.config import EngineConfig
from draftree.engine.passes import TreePass
from draftree.engine.request import Request, TokenScores
from draftree.runner.plan import PassResult
from draftree.tree import TokenTree


class Acceptance:
    """Accepts draft tokens, without loss or by the lossy rule in an engine's options."""

    def __init__(self, config: EngineConfig) -> None:
        self.rule = config.rule
        self.drafter = config.drafter

    def ends(self, requests: list[Request], trees: TokenTree) -> list[int | None]:
        """Per request, the node at which a lossy rule lets its text end without a pass; None where it does not."""
        if self.rule is None or trees.width == 1:
            return [None] * len(requests)
        return [self.rule.closes(trees, b, request.params.eos_token_ids) for b, request in enumerate(requests)]

    def close(self, requests: list[Request], trees: TokenTree, ends: Sequence[int | None]) -> list[AcceptedPath]:
        """The paths of a step without a pass: every text ends in its draft tokens, at the node of `ends`."""
        tokens, sources = trees.tokens.tolist(), trees.source.tolist()
        return [
            self._emit(request, sources[b], _unreviewed(tokens[b], end))
            for b, (request, end) in enumerate(zip(requests, ends, strict=True))
            if end is not None
        ]

    def walk(
        self, requests: list[Request], turn: TreePass, result: PassResult, ends: Sequence[int | None]
    ) -> list[AcceptedPath]:
        """Walk the trees of a pass and emit the tokens; a text with a node in `ends` ends there, unverified."""
        trees, rule = turn.trees, self.rule
        node_rows = turn.node_rows(result)
        rows = None if node_rows is None else node_rows.tolist()
        logits = result.logits if rows is not None else result.logits[:, : trees.width]
        choosers = [request.context.chooser for request in requests]
        # Of all requests in one go, as each copy from a device is a wait for it.
        best = best_tokens(logits) if rule is None and None in choosers else [()] * len(requests)
        tokens, parents, sources = torch.stack([trees.tokens, trees.parents, trees.source]).tolist()
        paths = []
        for b, (request, chooser, end) in enumerate(zip(requests, choosers, ends, strict=True)):
            where, size = None, trees.sizes[b]
            if rows is not None:
                where = {n: i for i, n in enumerate(rows[b]) if 0 <= n < size}  # padding is no node that left
                request.stats.pruned += size - len(where)
            scored = ScoredTree(tokens[b][:size], parents[b][:size], logits[b], where)
            if end is not None:
                choices = _unreviewed(scored.tokens, end)
            elif rule is not None:
                choices = rule.walk(scored, chooser, request.id)
            else:
                choices = lazy_walk(scored, chooser, best[b])
            paths.append(self._emit(request, sources[b], choices, scored))
        return paths

    def _emit(
        self, request: Request, sources: Sequence[int], choices: Iterator[Choice], scored: ScoredTree | None = None
    ) -> AcceptedPath:
        """Emit choices up to where the text ends; whatever lies behind is cut off.

        `scored` has what the model says after the tree's nodes; None where no pass was made.
        """
        path, count = AcceptedPath(), request.params.logprobs
        if request.finish_reason is not None:  # cancelled by another request's callback
            return path
        try:
            for node, token, child in choices:
                source = None
                if child is not None and self.drafter is not None:
                    source = self.drafter.source_name(sources[child])
                    request.stats.accepted_by_source[source] += 1
                path.nodes.append(node)
                path.tokens.append(token)
                path.drafted_by.append(child)
                scores = None
                if count is not None and scored is not None:
                    scores = TokenScores.of(scored.after(node), token, count)
                if request.emit(token, source, scores):
                    break
        except Exception as error:  # one request's criteria or callback must not stop the others
            request.error, request.finish_reason = error, "error"
        return path


def _unreviewed(tokens: list[int], end: int) -> Iterator[Choice]:
    """The chain of `tokens` up to its node `end`, taken as it is."""
    return ((node, tokens[node + 1], node + 1) for node in range(end))
