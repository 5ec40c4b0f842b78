"""A small model that reads the requests' texts: one slot each, caught up with what the target accepted.

Each request's keys and values live in a slot of a cache of the small model's own. What it reads beyond the certain
text, the nodes of a tree that grows depth by depth, lies behind it; after a step the accepted nodes stay and the rest
is dropped. So no token is read twice. Drafters with a second model share this; what they draft is up to them.
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
    """What of a request the small model has read."""

    certain: int = 0  # tokens of the text read, from its start
    tokens: list[int] = field(default_factory=list)  # nodes read behind them, in the order of their columns
    parents: list[int] = field(default_factory=list)  # node above each, -1 where that is the newest certain token
    # For each node a bool array over those before it and itself, True for its ancestors and itself.
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
        self._stores: list[SlotCache] = [self._cache]
        if self._encoder is not None:
            self._stores.append(self._encoder)
        self._slots: list[int] = []  # request by slot; the order is the engine's, so its requests stand side by side
        self._read: dict[int, Branches] = {}

    def begin(self, request: int, source: Tensor | None = None) -> None:
        """Give a request a slot, and have the encoder of an encoder-decoder read its source.

        Args:
            request: its id.
            source: LongTensor [L]; None for a decoder-only model.

        Raises:
            ValueError: no source where one is needed, or one that the encoder cannot read.
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
        known = rows_of(target.model)
        if int(source.max()) >= known:
            raise ValueError(
                f"The source holds token id {int(source.max())}, outside the small model's vocabulary of {known}: "
                "choose a small model with the same tokenizer."
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

    def knows(self, request: int, text: Sequence[int]) -> bool:
        """Return whether all unread tokens of `text` are in the small model's vocabulary."""
        most = rows_of(self.runner.target.model)
        return max(text[self._read[request].certain :], default=0) < most

    def first_slot(self, requests: Sequence[int]) -> int:
        """Return the first of neighbouring slots that hold `requests` in this order; exchange slots if necessary."""
        first = min(self._slots.index(requests[0]), len(self._slots) - len(requests))
        for slot, request in enumerate(requests, first):
            other = self._slots.index(request)
            if other != slot:
                for store in self._stores:
                    store.exchange(slot, other)
                self._slots[slot], self._slots[other] = self._slots[other], self._slots[slot]
        return first

    def read(self, requests: Sequence[int], texts: Sequence[Sequence[int] | None]) -> tuple[Tensor, int]:
        """Read the requests' texts to their ends, from where they were left.

        Args:
            requests: in the order of all calls until the next `read`.
            texts: certain tokens of each; None leaves a request out.

        Returns:
            logits [B, V] behind the newest token of each, of no meaning for those left out; and the most tokens that
            had to be read of any.
        """
        first = self.first_slot(requests)
        unread = self._settle(first, requests, texts)
        most = max(map(len, unread))
        while (longest := max(map(len, unread))) > CLOSE and (len(unread) > 1 or longest > CHUNK):
            parts = [tokens[:-1][:CHUNK] for tokens in unread]  # the last one's logits are wanted
            self._read_certain(first, requests, parts, CHUNK)
            unread = [tokens[len(part) :] for tokens, part in zip(unread, parts, strict=True)]
        ends = [max(len(tokens), 1) - 1 for tokens in unread]
        begin = min(ends)
        logits = self._read_certain(first, requests, unread, begin).logits
        if len(ends) == 1:
            return logits[:, -1], most
        rows = torch.tensor([end - begin for end in ends], device=logits.device, dtype=torch.long)
        return logits[torch.arange(len(ends), device=logits.device), rows], most

    def _settle(self, first: int, requests: Sequence[int], texts: Sequence[Sequence[int] | None]) -> list[list[int]]:
        """Keep what was read of the texts, drop what was not accepted; return what is unread of each."""
        unread: list[list[int]] = []
        for slot, (request, text) in enumerate(zip(requests, texts, strict=True), first):
            read = self._read[request]
            if text is None:
                unread.append([])
                continue
            # The newest token is read in any case, for what follows it.
            path = read.path_of(text[read.certain : -1])
            self._cache.keep(slot, min(read.certain, len(text) - 1), path)
            read = self._read[request] = Branches(self._cache.lengths[slot])
            unread.append(list(text[read.certain :]))
        return unread

    def _read_certain(
        self, first: int, requests: Sequence[int], tokens: Sequence[Sequence[int]], logits_from: int
    ) -> PassResult:
        width = max(1, *map(len, tokens))
        ids = np.zeros((len(tokens), width), dtype=np.int64)
        for row, own in zip(ids, tokens, strict=True):
            row[: len(own)] = own
        certain = np.array([self._read[request].certain for request in requests])
        visible = np.tri(width, dtype=bool)[None].repeat(len(tokens), 0)
        result = self._pass(first, ids, certain[:, None] + np.arange(width), visible, min(logits_from, width - 1))
        self._cache.commit([list(range(len(own))) for own in tokens], result.segments)
        for request, own in zip(requests, tokens, strict=True):
            self._read[request].certain += len(own)
        return result

    def grow(
        self, requests: Sequence[int], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], depth: int
    ) -> Tensor:
        """Read one more depth of the trees behind the texts.

        Args:
            requests: as of the last `read`.
            tokens: of the new nodes, for each request.
            parents: node above each, in the order in which they were read; -1 for the newest certain token.
            depth: of the new nodes, from 1.

        Returns:
            logits [B, n, V] behind the new nodes, n those of the request with most of them.
        """
        batch, width = len(tokens), max(map(len, tokens))
        held = [self._read[request] for request in requests]
        before = max(len(read.tokens) for read in held)
        ids = np.zeros((batch, width), dtype=np.int64)
        visible = np.zeros((batch, width, before + width), dtype=bool)
        visible[:, :, before:] = np.eye(width, dtype=bool)
        for b, read in enumerate(held):
            nodes = len(read.tokens)
            visible[b, :, : before - nodes] = True  # these columns are still text
            ids[b, : len(tokens[b])] = tokens[b]
            for i, above in enumerate(parents[b]):
                if above >= 0:
                    seen = read.seen[above]
                    visible[b, i, before - nodes : before - nodes + len(seen)] = seen
        places = np.array([read.certain + depth - 1 for read in held])
        result = self._pass(self.first_slot(requests), ids, places[:, None].repeat(width, 1), visible, 0)
        self._cache.commit([list(range(len(own))) for own in tokens], result.segments)
        for b, read in enumerate(held):
            nodes = len(read.tokens)
            for i in range(len(tokens[b])):
                read.seen.append(visible[b, i, before - nodes : before + i + 1])
            read.tokens += tokens[b]
            read.parents += parents[b]
        return result.logits

    def _pass(self, first: int, ids: np.ndarray, positions: np.ndarray, visible: np.ndarray, begin: int) -> PassResult:
        device, limit = self.runner.plan_device, self.runner.target.max_positions
        if limit is not None:  # rows that only fill up may lie beyond
            positions = positions.clip(max=limit - 1)
        rows, places, seen = (torch.from_numpy(array).to(device) for array in (ids, positions, visible))
        return self.runner.run(Plan(rows, places, seen, first_logit_row=begin), self._cache, first, self._encoder)
