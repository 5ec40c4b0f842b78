"""The base of heads that read their own output (EAGLE-3, MTP): a text in chunks, then a tree depth by depth."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftree.drafting.base import RequestState
from draftree.drafting.growth import Best, Limits, Nodes, grow_trees
from draftree.drafting.published.features import FeatureDrafter
from draftree.drafting.published.layers import Span, causal
from draftree.tree import TokenTree

CHUNK = 512  # rows of a pass over a prompt
Rows = tuple[list[int], Tensor, list[int], list[Span]]  # tokens, features [R, width], positions, spans of requests


class _Branch(NamedTuple):
    """A request's draft rows so far: their outputs, and for each the rows above it and itself."""

    outputs: list[Tensor]
    seen: list[list[int]]


class RecursiveDrafter(FeatureDrafter):
    """Base of the drafters whose head reads a row's feature beside the next token, and its own output below.

    The head is called with embeddings, features, positions and spans, and returns outputs; `fed_back` makes features of
    these, and `head_input` what the last linear reads.

    Attributes:
        depth, branching, beam, confidence: limits of the trees; see `DraftModel`.
    """

    depth = 6
    branching = 4
    beam = 4
    confidence = 0.3

    def draft_live(self, requests: Sequence[RequestState], budgets: Sequence[int], reaches: Sequence[int]) -> TokenTree:
        reaches = [min(reach, self.depth) for reach in reaches]
        branches = [_Branch([], []) for _ in requests]
        roots: list[Tensor] = []

        def first() -> Best:
            read = self._read([request for request, reach in zip(requests, reaches, strict=True) if reach > 0])
            rest = iter(read)  # Those that draft nothing get any root, whose tokens nobody reads.
            roots.extend(next(rest)[0] if reach > 0 else read[0][0] for reach in reaches)
            return self._best(requests, [[root] for root in roots])

        def more(nodes: Sequence[Nodes], depth: int) -> Best:
            return self._best(requests, self._deeper(requests, branches, roots, nodes))

        return grow_trees(requests, budgets, reaches, Limits(self.beam, self.confidence, self.source), first, more)

    @property
    def layers(self) -> Any:
        """What passes rows through the head's layers."""
        return self.head

    def _read(self, live: Sequence[RequestState], masks: int = 0) -> list[Tensor]:
        """Read the texts; return the outputs [1 + masks, width] of the last row of each and of masks behind it."""
        texts = [(request, self.text_of(request)) for request in live]
        while behind := [(request, text.read) for request, text in texts if text.count - text.read > CHUNK]:
            self._read_rows([request for request, _ in behind], [read + CHUNK for _, read in behind], 0)
        outputs = self._read_rows(live, [text.count for _, text in texts], masks)
        return [rows[-1 - masks :] for rows in outputs]

    def _read_rows(self, live: Sequence[RequestState], ends: Sequence[int], masks: int) -> list[Tensor]:
        """Read each request's rows up to an end, and masks behind them; return their outputs [n, width]."""
        tokens: list[int] = []
        positions: list[int] = []
        features, spans = [], []
        for request, end in zip(live, ends, strict=True):
            text = self.text_of(request)
            begin = text.read
            new = text.features.upto(end)[begin:]
            tokens += request.tokens[text.first + begin + 1 : text.first + end + 1]
            features.append(new)
            if masks:
                tokens += [self.head.layout.mask_token] * masks
                features.append(self.head.unknown().expand(masks, -1))
            count = end - begin + masks
            positions += range(text.first + begin, text.first + begin + count)
            spans.append(Span(text.states, begin, count, causal(begin, count, new.device)))
            text.read = end
        out = self._pass((tokens, torch.cat(features), positions, spans))
        return list(out.split([span.count for span in spans]))

    def _deeper(
        self,
        requests: Sequence[RequestState],
        branches: Sequence[_Branch],
        roots: Sequence[Tensor],
        nodes: Sequence[Nodes],
    ) -> list[list[Tensor]]:
        """Read new nodes of each request's tree, and return their outputs."""
        tokens: list[int] = []
        positions: list[int] = []
        features, spans = [], []
        for request, branch, root, (new, above) in zip(requests, branches, roots, nodes, strict=True):
            if not new:
                continue
            text, before = self.text_of(request), len(branch.seen)
            for i, parent in enumerate(above):
                features.append(root if parent < 0 else branch.outputs[parent])
                branch.seen.append([*(branch.seen[parent] if parent >= 0 else []), before + i])
                positions.append(text.first + text.count - 1 + len(branch.seen[-1]))
            sees = np.zeros((len(new), text.count + before + len(new)), dtype=bool)
            sees[:, : text.count] = True
            for row, own in zip(sees, branch.seen[before:], strict=True):
                row[[text.count + i for i in own]] = True
            tokens += new
            mask = torch.from_numpy(sees).to(root.device)
            spans.append(Span(text.states, text.count + before, len(new), mask, before))
        rows = self.head.fed_back(torch.stack(features))
        out = iter(self._pass((tokens, rows, positions, spans)))
        made = [[next(out) for _ in new] for new, _ in nodes]
        for branch, outputs in zip(branches, made, strict=True):
            branch.outputs.extend(outputs)
        return made

    def _pass(self, rows: Rows) -> Tensor:
        tokens, features, positions, spans = rows
        ids, places = (torch.tensor(held, dtype=torch.long, device=features.device) for held in (tokens, positions))
        return self.layers(self.embedded(ids), features, places, spans)

    def _best(self, requests: Sequence[RequestState], outputs: Sequence[Sequence[Tensor]]) -> Best:
        """Return the best tokens behind each output, by request."""
        counts = [len(own) for own in outputs]
        logits = self.logits(requests, self.head.head_input(torch.stack([out for own in outputs for out in own])))
        tokens, logp = self.best(logits)
        shape = len(counts), max(counts), tokens.shape[-1]
        best = np.zeros(shape, dtype=np.int64), np.full(shape, -np.inf, dtype=np.float32)
        for b, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
            begin = end - count
            best[0][b, :count], best[1][b, :count] = tokens[begin:end], logp[begin:end]
        return best
