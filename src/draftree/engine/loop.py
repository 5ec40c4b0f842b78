"""The one loop that every method goes through, one turn of it a pass of the target.

draft -> shape -> verify (prune inside) -> accept -> commit -> observe
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftree.acceptance.base import Walk, lazy_walk
from draftree.acceptance.greedy import greedy_walks
from draftree.acceptance.lossy import LossyRule
from draftree.drafting.base import Attachment, Drafter, Step
from draftree.engine.passes import TreePass, tree_pass
from draftree.engine.recorder import Track
from draftree.engine.request import Request
from draftree.engine.stats import STAGES
from draftree.host import Host
from draftree.host.cache import SlotCache
from draftree.host.encoder import EncoderState
from draftree.host.plan import PassResult
from draftree.pruning import EarlyPruning, LossyCALM
from draftree.shaping import Shape
from draftree.tree import TokenTree

Choice = tuple[int, int | None, int | None]  # node, token, the guess that said it
PREFILL_CHUNK = 512  # prompt rows per pass; keeps masks and activations of long prompts small


class Loop:
    """Advances requests in neighbouring slots; knows nothing of how they came there.

    Args:
        host: runs the passes.
        cache: the requests' keys and values, by slot.
        encoder: cross attention of an encoder-decoder, by slot; None for other models.
        drafter: makes guesses; None for none.
        shape: sizes the trees; None without a drafter.
        tolerance: gap of the best two logits under which a choice is a near-tie (strict mode), or None.
        reject_drafts: accept no guess, whatever it says.
        acceptance: a lossy rule; None for the lossless one.
        pruner: drops guesses inside the pass; None for none.
        track: records every step; None records nothing.
        early_exit: lets tokens leave the layers early, lossy; None for the whole model.
    """

    def __init__(
        self,
        host: Host,
        cache: SlotCache,
        encoder: EncoderState | None,
        drafter: Drafter | None,
        shape: Shape | None,
        tolerance: float | None,
        reject_drafts: bool,
        acceptance: LossyRule | None = None,
        pruner: EarlyPruning | None = None,
        track: Track | None = None,
        early_exit: LossyCALM | None = None,
    ) -> None:
        self.host = host
        self.target = host.target
        # Rows attached to a pass are made on the model's device, of trees that lie there.
        self._attaches = drafter is not None and type(drafter).plan is not Drafter.plan
        within = self._attaches or pruner is not None or early_exit is not None
        self.device = host.target.device if within else host.plan_device
        self.cache = cache
        self.encoder = encoder
        self.drafter = drafter
        self.shape = shape
        self.tolerance = tolerance
        self.reject_drafts = reject_drafts
        self.acceptance = acceptance
        self.pruner = pruner
        self.early_exit = early_exit
        self.track = track
        self._idle = False  # whether the shape need not hear of the coming step
        # Drafters that only look at texts need not be told of steps.
        self._observed = drafter is not None and type(drafter).observe is not Drafter.observe

    def advance(self, first: int, requests: list[Request]) -> None:
        """One pass of the target over requests in slots [first, first + len(requests))."""
        # Strict mode: a prompt, and what follows a near-tie, pass as the plain engine passes them.
        alone = self.tolerance is not None and any(r.decide_alone or not r.output for r in requests)
        marks = [time.perf_counter()]
        trees = self._draft(requests, alone)
        marks.append(time.perf_counter())
        ends = self._ends(requests, trees)
        if None not in ends:
            self._close(requests, trees, ends, marks)
            return
        turn, result = self._verify(first, requests, trees, alone)
        marks.append(time.perf_counter())
        walks = self._accept(requests, turn, result, ends, None if alone or turn.bare else self.tolerance)
        marks.append(time.perf_counter())
        self.cache.commit(turn.committed([walk.nodes for walk in walks]), result.segments)
        marks.append(time.perf_counter())
        self._observe(requests, turn, result, walks, own_rows=not alone)
        self._account(requests, trees, walks, marks)
        if self.track is not None:
            left = None if result.rows is None else (result.rows, turn.offset, result.logits.shape[1])
            self.track.step(requests, trees, left, walks, marks)
        if self.shape is None or turn.offset:
            return
        if self._idle:
            self.shape.rested(len(requests), marks[3] - marks[1], time.perf_counter() - marks[0])
        else:
            # Reading the choices waits for the device, so it counts as part of the pass.
            plain = turn.plan.width == trees.width and not turn.plan.surgeries
            packed = plain and self.host.packs and turn.plan.sizes is not None
            rows = sum(trees.sizes) if packed else trees.batch * trees.width
            attached = bool(turn.plan.taps or turn.plan.surgeries or turn.plan.embeddings is not None)
            whole = time.perf_counter() - marks[0]
            self.shape.clock(rows, marks[3] - marks[1], whole, plain=plain, attached=attached)

    def _draft(self, requests: list[Request], alone: bool) -> TokenTree:
        drafter, shape = self.drafter, self.shape
        self._idle = False
        if drafter is None or shape is None or alone:
            return self._roots(requests)
        contexts = [r.context for r in requests]
        self._idle = shape.rests(contexts)
        if self._idle:
            return self._roots(requests)
        budgets = shape.budgets(contexts, drafter.max_nodes)
        for b, request in enumerate(requests):
            if not request.rules.drafting:
                request.context.resting = True
            if not request.rules.drafting or request.context.room <= 1:
                budgets[b] = 0
        if not any(budgets):
            return self._roots(requests)
        began = 0.0 if self.track is None else time.perf_counter()
        drafted = drafter.draft(contexts, budgets)
        if self.track is not None:
            self.track.drafted(budgets, drafted, began)
        if self.reject_drafts:  # -1 is no token, so no text confirms it
            drafted = replace(drafted, tokens=torch.where(drafted.depth > 0, -1, drafted.tokens))
        return shape.trim(contexts, drafted).to(self.device)

    def _roots(self, requests: list[Request]) -> TokenTree:
        last = [r.context.tokens[-1] for r in requests]
        return TokenTree.roots(torch.tensor(last, dtype=torch.long, device=self.device))

    def _verify(
        self, first: int, requests: list[Request], trees: TokenTree, alone: bool
    ) -> tuple[TreePass, PassResult]:
        starts = self.cache.lengths[first : first + len(requests)]
        trunks = [r.context.tokens[start:-1] for r, start in zip(requests, starts, strict=True)]
        floors = [r.context.prompt_length for r in requests]
        while max(len(t) for t in trunks) > PREFILL_CHUNK:
            self._prefill(first, requests, [t[:PREFILL_CHUNK] for t in trunks], floors)
            trunks = [t[PREFILL_CHUNK:] for t in trunks]
        return self._pass(first, requests, trunks, trees, floors, bare=alone)

    def _pass(
        self,
        first: int,
        requests: list[Request],
        trunks: list[list[int]],
        trees: TokenTree,
        floors: list[int],
        *,
        bare: bool,
    ) -> tuple[TreePass, PassResult]:
        attachment = None
        if self._attaches:
            assert self.drafter is not None
            attachment = self.drafter.plan([r.context for r in requests], trees)
        if bare and attachment is not None:
            attachment = Attachment(taps=attachment.taps)
        starts = self.cache.lengths[first : first + len(requests)]
        row_by_row = self.tolerance is not None and not any(trunks)  # prompts pass as the plain engine's
        limit = self.target.max_positions
        turn = tree_pass(trunks, trees, starts, attachment, floors, limit, row_by_row=row_by_row)
        if self.reject_drafts and trees.width > 1:  # their -1 needs an embedding all the same
            turn.plan.tokens = turn.plan.tokens.clamp(min=0)
        if self.pruner is not None and turn.offset == 0 and trees.width > 1:
            turn.plan = self.pruner.enter(self.host, turn.plan, trees)
        if self.early_exit is not None and turn.offset == 0:
            turn.plan = self.early_exit.enter(turn.plan, [r.context for r in requests], len(self.target.layers))
        with self.host.lock:
            return turn, self.host.run(turn.plan, self.cache, first, self.encoder)

    def _prefill(self, first: int, requests: list[Request], chunks: list[list[int]], floors: list[int]) -> None:
        """Commit a part of long prompts; the drafter sees its hidden states, nothing is guessed or emitted."""
        # The chunk's last token plays the root; requests whose prompt is already in give an empty chunk.
        roots = TokenTree.roots(torch.tensor([c[-1] if c else 0 for c in chunks], dtype=torch.long, device=self.device))
        turn, result = self._pass(first, requests, [c[:-1] for c in chunks], roots, floors, bare=True)
        walked = [[0] if chunk else [] for chunk in chunks]
        self.cache.commit(turn.committed(walked), result.segments)
        if self.drafter is not None:
            contexts = [r.context for r in requests]
            nothing: list[list[int]] = [[] for _ in requests]
            self.drafter.observe(
                Step(contexts, roots, result, turn.trunk, turn.offset, walked, nothing, own_rows=False)
            )

    def _accept(
        self,
        requests: list[Request],
        turn: TreePass,
        result: PassResult,
        ends: list[int | None],
        tolerance: float | None,
    ) -> list[Walk]:
        trees = turn.trees
        rows = turn.node_rows(result)
        logits = result.logits if rows is not None else result.logits[:, : trees.width]
        walks = [Walk() for _ in requests]
        if self.acceptance is None and any(r.chooser is None for r in requests):
            walks = greedy_walks(trees, logits, rows, tolerance)
        for b, request in enumerate(requests):
            request.decide_alone = False
            where = None
            if rows is not None:
                size = trees.sizes[b]  # padding of a smaller tree is no guess that left
                where = {n: i for i, n in enumerate(rows[b].tolist()) if 0 <= n < size}
                request.stats.pruned += size - len(where)
            choices: Iterable[Choice]
            if self.acceptance is not None:
                end = ends[b]
                if end is not None:
                    choices = _unreviewed(trees, b, end)
                else:
                    choices = self.acceptance.walk(trees, b, logits[b], where, request.chooser, request.id)
                walk = Walk()
            elif request.chooser is not None:
                choices = lazy_walk(trees, b, logits[b], where, request.chooser, tolerance)
                walk = Walk()
            else:
                whole = walks[b]
                choices = zip(whole.nodes, whole.tokens, whole.guesses, strict=True)
                walk = Walk(tie=whole.tie)
            walks[b] = walk
            try:
                self._emit(request, trees.source[b], choices, walk)
            except Exception as error:  # one request's criteria or callback must not stop the others
                request.error, request.finish_reason = error, "error"
        return walks

    def _ends(self, requests: list[Request], trees: TokenTree) -> list[int | None]:
        """Per request, the node at which a lossy rule lets its text end without a pass; None where it does not."""
        rule = self.acceptance
        if rule is None or trees.width == 1:
            return [None] * len(requests)
        return [rule.closes(trees, b, request.rules.eos_token_ids) for b, request in enumerate(requests)]

    def _close(self, requests: list[Request], trees: TokenTree, ends: Sequence[int | None], marks: list[float]) -> None:
        """A step without a pass: every text ends in its guesses."""
        walks = [Walk() for _ in requests]
        for b, (request, end) in enumerate(zip(requests, ends, strict=True)):
            assert end is not None
            try:
                self._emit(request, trees.source[b], _unreviewed(trees, b, end), walks[b])
            except Exception as error:
                request.error, request.finish_reason = error, "error"
        self._account(requests, trees, walks, marks)
        if self.track is not None:
            self.track.step(requests, trees, None, walks, marks)

    def _emit(self, request: Request, sources: Tensor, choices: Iterable[Choice], walk: Walk) -> None:
        """Emit choices into `walk` up to where the text ends; whatever lies behind is cut off, a tie as well."""
        tie, walk.tie = walk.tie, False
        if request.finish_reason is not None:  # cancelled by another request's callback
            return
        for node, token, guess in choices:
            if token is None:
                tie = True
                break
            source = None
            if guess is not None and self.drafter is not None:
                source = self.drafter.source_name(int(sources[guess]))
                request.stats.accepted_by_source[source] += 1
            walk.nodes.append(node)
            walk.tokens.append(token)
            walk.guesses.append(guess)
            if request.emit(token, source):
                return
        if tie:
            walk.tie = request.decide_alone = True
            request.stats.re_decided += 1

    def _observe(
        self, requests: list[Request], turn: TreePass, result: PassResult, walks: list[Walk], *, own_rows: bool
    ) -> None:
        if self.drafter is None or (self._idle and not (self._observed and self.drafter.observes_rests)):
            return
        contexts = [r.context for r in requests]
        if self.shape is not None and not self._idle:
            self.shape.learn(contexts, [walk.nodes for walk in walks], turn.trees)
        if not self._observed:
            return
        emitted = [walk.tokens for walk in walks]
        nodes = [walk.nodes for walk in walks]
        self.drafter.observe(
            Step(contexts, turn.trees, result, turn.trunk, turn.offset, nodes, emitted, own_rows=own_rows)
        )

    def _account(self, requests: list[Request], trees: TokenTree, walks: list[Walk], marks: list[float]) -> None:
        share = 1 / len(requests)
        for b, (request, walk) in enumerate(zip(requests, walks, strict=True)):
            stats = request.stats
            stats.count(walk.guesses, trees.sizes[b] - 1, passed=len(marks) > len(STAGES))
            for stage, begin, end in zip(STAGES, marks, marks[1:], strict=False):
                stats.seconds[stage] += (end - begin) * share


def _unreviewed(trees: TokenTree, b: int, end: int) -> Iterator[Choice]:
    """The chain in tree `b` up to its node `end`, taken as it is."""
    tokens = trees.tokens[b].tolist()
    return ((node, tokens[node + 1], node + 1) for node in range(end))
