"""The accept stage: the acceptance rule chooses a path in each tree, and the request emits its tokens."""

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
    """Accept draft tokens, without loss or by the lossy rule of an engine's config."""

    def __init__(self, config: EngineConfig) -> None:
        self.rule = config.rule
        self.drafter = config.drafter

    def ends(self, requests: list[Request], trees: TokenTree) -> list[int | None]:
        """Return for each request the node at which a lossy rule ends the text without a pass, or None."""
        if self.rule is None or trees.width == 1:
            return [None] * len(requests)
        return [self.rule.closes(trees, b, request.params.eos_token_ids) for b, request in enumerate(requests)]

    def close(self, requests: list[Request], trees: TokenTree, ends: Sequence[int | None]) -> list[AcceptedPath]:
        """Emit the paths of a step without a pass; each text ends at its node in `ends`."""
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
        # All requests at once, because each copy from a device waits for it.
        best = best_tokens(logits) if rule is None and None in choosers else [()] * len(requests)
        tokens, parents, sources = torch.stack([trees.tokens, trees.parents, trees.source]).tolist()
        paths = []
        for b, (request, chooser, end) in enumerate(zip(requests, choosers, ends, strict=True)):
            where, size = None, trees.sizes[b]
            if rows is not None:
                where = {n: i for i, n in enumerate(rows[b]) if 0 <= n < size}  # Padding is not counted as pruned.
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
        """Emit choices until the text ends.

        `scored` has the logits after the tree's nodes; None without a pass.
        """
        path, count = AcceptedPath(), request.params.logprobs
        if request.finish_reason is not None:  # Another request's callback cancelled it.
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
        except Exception as error:  # Errors in a request's criteria or callback end that request alone.
            request.error, request.finish_reason = error, "error"
        return path


def _unreviewed(tokens: list[int], end: int) -> Iterator[Choice]:
    """Yield the chain of `tokens` up to node `end`, unverified."""
    return ((node, tokens[node + 1], node + 1) for node in range(end))
