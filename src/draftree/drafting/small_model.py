"""A small model that drafts for a large one: it reads the requests' texts, and what it drafts behind them.

`SmallModel` holds each request's keys and values in a slot of a cache of its own. Nodes of a tree that grows depth by
depth lie behind the text; after a step the accepted ones stay, so that no token is read twice. The state of a recurrent
layer cannot be cut back, so a model with such layers reads its whole tree anew at each depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draftree.runner import Runner
from draftree.runner.kv.cache import SlotCache
from draftree.runner.plan import PassResult, Plan
from draftree.runner.target import rows_of

CHUNK = 512  # rows of a pass over prompts
CLOSE = 16  # requests that differ by fewer unread tokens are caught up in one pass


@dataclass(slots=True)
class Branches:
    """The tokens of a request that the small model has read.

    Attributes:
        certain: number of tokens of the text, from its start.
        tokens: nodes behind them, in the order of their KV positions.
        parents: node above each; -1 for the newest certain token.
        seen: for each node a bool array over those before it and itself, True for its ancestors and itself.
    """

    certain: int = 0
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    seen: list[np.ndarray] = field(default_factory=list)

    def path_of(self, tokens: Sequence[int]) -> list[int]:
        """Return the nodes along `tokens`, as far as they were read."""
        path: list[int] = []
        above = -1
        for token in tokens:
            for node in range(above + 1, len(self.tokens)):  # children stand behind their parents
                if self.tokens[node] == token and self.parents[node] == above:
                    break
            else:
                break
            above = node
            path.append(node)
        return path


class SmallModel:
    """The small model under its runner, and its cache."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._cache = runner.new_cache(1)
        self._encoder = runner.new_encoder(1) if runner.target.encoder_decoder else None
        self._stores: list[SlotCache] = [self._cache] if self._encoder is None else [self._cache, self._encoder]
        self._recurrent = runner.target.recurrence is not None
        self._rows = rows_of(runner.target.model)
        self._slots: list[int] = []  # request by slot; the order is the engine's, so its requests stand side by side
        self._read: dict[int, Branches] = {}

    def begin(self, request: int, source: Tensor | None = None) -> None:
        """Give a request a slot, and have the encoder of an encoder-decoder read its source.

        Args:
            source: LongTensor [L]; None for a decoder-only model.
        """
        slot = len(self._slots)
        for store in self._stores:
            if slot == store.slots:
                store.widen(2 * slot)
        if self._encoder is not None:
            self._check(source)
            with self.runner.lock:
                self._encoder.admit(slot, source)
        self._cache.clear(slot)
        self._slots.append(request)
        self._read[request] = Branches()

    def _check(self, source: Tensor | None) -> None:
        target = self.runner.target
        if source is None:
            raise ValueError(
                "The small model reads the source with an encoder of its own, and was given none: pass the source's "
                "token ids (`encoder_input` of Engine.add) as well as the large encoder's output."
            )
        if target.max_positions is not None and len(source) > target.max_positions:
            raise ValueError(
                f"The source has {len(source)} tokens and the small model's encoder reads {target.max_positions}: "
                "shorten it, or choose another small model."
            )

    def end(self, request: int) -> None:
        """Free its slot; the last one moves there, as in the engine. An unknown request is no error."""
        if self._read.pop(request, None) is None:
            return
        slot, last = self._slots.index(request), len(self._slots) - 1
        for store in self._stores:
            if slot != last:
                store.move(last, slot)
            store.clear(last)
        self._slots[slot] = self._slots[last]
        self._slots.pop()

    def first_slot(self, requests: Sequence[int]) -> int:
        """Return the first of neighbouring slots that hold `requests` in this order; slots are exchanged for it."""
        first = min(self._slots.index(requests[0]), len(self._slots) - len(requests))
        for slot, request in enumerate(requests, first):
            other = self._slots.index(request)
            if other != slot:
                for store in self._stores:
                    store.exchange(slot, other)
                self._slots[slot], self._slots[other] = self._slots[other], self._slots[slot]
        return first

    def read(self, requests: Sequence[int], texts: Sequence[Sequence[int] | None]) -> Tensor:
        """Read the requests' texts to their ends, from where they were left.

        Args:
            requests: in the order of all calls until the next `read`.
            texts: certain tokens of each; None leaves a request out.

        Returns:
            logits [B, V] behind the newest token of each, of no meaning for those left out.
        """
        first = self.first_slot(requests)
        unread = [
            self._settle(slot, request, text)
            for slot, (request, text) in enumerate(zip(requests, texts, strict=True), first)
        ]
        if self._recurrent:
            unread = [
                self._read_alone(slot, *one) for slot, one in enumerate(zip(requests, unread, strict=True), first)
            ]
        while (longest := max(map(len, unread))) > CLOSE and (len(unread) > 1 or longest > CHUNK):
            parts = [tokens[:-1][:CHUNK] for tokens in unread]  # the last one's logits are wanted
            self._read_certain(first, requests, parts, CHUNK)
            unread = [tokens[len(part) :] for tokens, part in zip(unread, parts, strict=True)]
        ends = [max(len(tokens), 1) - 1 for tokens in unread]
        begin = min(ends)
        logits = self._read_certain(first, requests, unread, begin).logits
        rows = torch.tensor([end - begin for end in ends], device=logits.device, dtype=torch.long)
        return logits[torch.arange(len(ends), device=logits.device), rows]

    def _settle(self, slot: int, request: int, text: Sequence[int] | None) -> list[int]:
        """Keep the nodes of a request that were accepted; return the unread tokens of its text."""
        if text is None:
            return []
        read = self._read[request]
        # The newest token is read in any case, for what follows it.
        path = [] if self._recurrent else read.path_of(text[read.certain : -1])
        self._cache.keep(slot, min(read.certain, len(text) - 1), path)
        read = self._read[request] = Branches(self._cache.lengths[slot])
        return list(text[read.certain :])

    def _read_alone(self, slot: int, request: int, tokens: list[int]) -> list[int]:
        """Read all but the last token of a long or first piece of text; return the unread tokens.

        Models with recurrent layers read it as a prompt, which has a pass of its own.
        """
        recurrence = self.runner.target.recurrence
        assert recurrence is not None
        if self._read[request].certain and recurrence.chunk is None:
            return tokens  # A prompt's pass would forget what was read.
        while len(tokens) > (CLOSE if self._read[request].certain else 1):
            part = tokens[:-1][: recurrence.prompt_rows(CHUNK)]
            self._read_certain(slot, [request], [part], len(part), prompt=True)
            tokens = tokens[len(part) :]
        return tokens

    def _read_certain(
        self,
        first: int,
        requests: Sequence[int],
        tokens: Sequence[Sequence[int]],
        logits_from: int,
        *,
        prompt: bool = False,
    ) -> PassResult:
        width = max(1, *map(len, tokens))
        ids = np.zeros((len(tokens), width), dtype=np.int64)
        for row, own in zip(ids, tokens, strict=True):
            row[: len(own)] = own
        ids[ids >= self._rows] = 0  # Tokens that only the large model has, such as an image's placeholders.
        certain = np.array([self._read[request].certain for request in requests])
        visible = np.tri(width, dtype=bool)[None].repeat(len(tokens), 0)
        positions = certain[:, None] + np.arange(width)
        result = self._pass(first, ids, positions, visible, min(logits_from, width - 1), prompt=prompt)
        self._cache.commit([list(range(len(own))) for own in tokens], result.segments)
        for request, own in zip(requests, tokens, strict=True):
            self._read[request].certain += len(own)
        return result

    def grow(
        self, requests: Sequence[int], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], depth: int
    ) -> Tensor:
        """Read one more depth of the trees behind the texts.

        Args:
            parents: node above each, in the order in which they were read; -1 for the newest certain token.
            depth: of the new nodes, from 1.

        Returns:
            logits [B, n, V] behind the new nodes, n those of the request with most of them.
        """
        held = [self._read[request] for request in requests]
        before = max(len(read.tokens) for read in held)
        batch, width = len(tokens), max(map(len, tokens))
        # Rows are the earlier nodes of each request, before a column, and the new ones behind it.
        ids = np.zeros((batch, before + width), dtype=np.int64)
        depths = np.full((batch, before + width), depth)
        seen = np.eye(before + width, dtype=bool)[None].repeat(batch, 0)
        for b, read in enumerate(held):
            begin, rows = before - len(read.tokens), before + len(tokens[b])
            ids[b, begin:rows] = [*read.tokens, *tokens[b]]
            for i, own in enumerate(read.seen, begin):
                seen[b, i, begin : begin + len(own)] = own
                depths[b, i] = own.sum()
            for i, above in enumerate(parents[b], before):
                if above >= 0:
                    seen[b, i, begin : begin + len(read.seen[above])] = read.seen[above]
        positions = depths + np.array([[read.certain - 1] for read in held])
        first = self.first_slot(requests)
        if self._recurrent:  # States of nodes are not kept, so the whole tree passes again.
            result = self._pass(first, ids, positions, seen, before)
        else:
            visible = seen[:, before:]
            for b, read in enumerate(held):
                visible[b, :, : before - len(read.tokens)] = True  # These positions are still text.
            result = self._pass(first, ids[:, before:], positions[:, before:], visible, 0)
            self._cache.commit([list(range(len(own))) for own in tokens], result.segments)
        for b, read in enumerate(held):
            begin = before - len(read.tokens)
            read.seen += [seen[b, before + i, begin : before + i + 1].copy() for i in range(len(tokens[b]))]
            read.tokens += tokens[b]
            read.parents += parents[b]
        return result.logits

    def _pass(
        self,
        first: int,
        ids: np.ndarray,
        positions: np.ndarray,
        visible: np.ndarray,
        begin: int,
        *,
        prompt: bool = False,
    ) -> PassResult:
        """Run a pass with logits from row `begin` on; ids and positions [B, M] are padded, visible [B, M, N]."""
        device, limit = self.runner.plan_device, self.runner.target.max_positions
        if limit is not None:  # rows of padding may lie beyond
            positions = positions.clip(max=limit - 1)
        rows, places, seen = (torch.from_numpy(array).to(device) for array in (ids, positions, visible))
        plan = Plan(rows, places, seen, first_logit_row=begin, prompt=prompt)
        return self.runner.run(plan, self._cache, first, self._encoder)
