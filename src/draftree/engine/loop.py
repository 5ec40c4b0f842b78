"""The one loop that every method goes through, one turn of it a pass of the target.

draft -> shape -> verify (prune inside) -> accept -> commit -> observe
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftree.acceptance.base import Choice, ScoredTree, Walk, lazy_walk
from draftree.acceptance.greedy import greedy_walks
from draftree.drafting.base import Attachment, Capabilities, Step, StepPlan
from draftree.engine.config import EngineConfig
from draftree.engine.constraints import permitted, wider
from draftree.engine.passes import TreePass, tree_pass
from draftree.engine.recorder import Track
from draftree.engine.request import Request, StepTree, TokenScores
from draftree.engine.stats import STAGES
from draftree.runner import Runner
from draftree.runner.kv.cache import SlotCache
from draftree.runner.kv.encoder import EncoderState
from draftree.runner.plan import PassResult
from draftree.shaping.base import Outcome, Sizer
from draftree.tree import TokenTree


class Loop:
    """Advances requests in neighbouring slots; knows nothing of how they came there.

    Args:
        config: the engine's options.
        runner: runs the passes.
        cache: the requests' keys and values, by slot.
        encoder: cross attention of an encoder-decoder, by slot; None for other models.
        sizer: sizes the trees; None without a drafter.
        track: records every step; None records nothing.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        cache: SlotCache,
        encoder: EncoderState | None,
        sizer: Sizer | None,
        track: Track | None,
    ) -> None:
        self.config = config
        self.runner = runner
        self.target = runner.target
        self.cache = cache
        self.encoder = encoder
        self.drafter = config.drafter
        self.can = Capabilities() if config.drafter is None else config.drafter.capabilities
        self.sizer = sizer
        self.track = track
        # Rows attached to a pass are made on the model's device, of trees that lie there.
        within = self.can.attaches or config.pruner is not None or config.early_exit is not None
        self.device = runner.target.device if within else runner.plan_device

    def advance(self, first: int, requests: list[Request], *, closed: bool = False) -> None:
        """One pass of the target over requests in slots [first, first + len(requests)).

        Args:
            first: slot of the first request.
            requests: in the order of their slots.
            closed: whether nobody joins them before all are done.
        """
        clock = self.config.clock
        alone = self.config.strict and any(not r.output for r in requests)  # a prompt passes as the plain engine's
        marks = [clock()]
        plan = self._draft(requests, alone=alone, closed=closed)
        trees = _trees_of(plan)
        marks.append(clock())
        ends = self._ends(requests, trees)
        if None not in ends:
            self._close(requests, trees, ends, marks)
            return
        turn, result = self._verify(first, requests, plan, alone)
        marks.append(clock())
        walks = self._accept(requests, turn, result, ends)
        marks.append(clock())
        self.cache.commit(turn.committed([walk.nodes for walk in walks]), result.segments)
        marks.append(clock())
        self._observe(plan, turn, result, walks, own_rows=not alone)
        self._account(requests, trees, walks, marks)
        if self.track is not None:
            left = None if result.rows is None else (result.rows, turn.offset, result.logits.shape[1])
            self.track.step(requests, trees, left, walks, marks)
        if self.sizer is not None and not alone:
            seconds = None if turn.offset else clock() - marks[0]
            self.sizer.observe(plan, self._outcome(turn, walks, seconds, marks[1] - marks[0]))

    def _draft(self, requests: list[Request], *, alone: bool, closed: bool) -> StepPlan:
        """What this step verifies: drafted trees, or the roots alone."""
        contexts = [request.context for request in requests]
        drafter, sizer = self.drafter, self.sizer
        if drafter is None or sizer is None or alone:
            takes = [context.drafting and context.room > 1 for context in contexts]
            return StepPlan(contexts, [0] * len(contexts), takes, self._roots(requests))
        plan = _within_rules(sizer.plan(contexts, drafter.max_nodes, closed=closed), requests)
        if not any(plan.budgets):
            return sizer.trim(plan, self._roots(requests))
        began = self.config.clock()
        drafted = self._usable(drafter.draft(contexts, wider(plan.budgets, contexts, drafter.max_nodes)))
        drafted = permitted(drafted, contexts, plan.budgets)
        if self.track is not None:
            self.track.drafted(plan.budgets, drafted, began)
        if self.config.reject_drafts:  # -1 is no token, so no text confirms it
            drafted = replace(drafted, tokens=torch.where(drafted.depth > 0, -1, drafted.tokens))
        plan = sizer.trim(plan, drafted)
        return replace(plan, trees=_trees_of(plan).to(self.device))

    def _usable(self, trees: TokenTree) -> TokenTree:
        """`trees` without draft tokens that the model does not have, and without what hangs below them.

        A trie may have learned from another model, a draft model's table may be padded further: the target never emits
        such a token, and has no embedding of it. Log-probabilities that are no numbers become -inf, none is above 0.
        """
        known = (trees.tokens >= 0) & (trees.tokens < self.target.vocab_size)
        if not bool(known.all()):
            trees = trees.prune(known)[0]
        if not bool((trees.logp <= 0).all()):
            trees = replace(trees, logp=trees.logp.nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0.0))
        return trees

    def _outcome(self, turn: TreePass, walks: list[Walk], seconds: float | None, drafting: float) -> Outcome:
        plan, trees = turn.plan, turn.trees
        attached = bool(plan.taps or plan.surgeries or plan.embeddings is not None)
        packed = self.runner.packs and plan.sizes is not None and plan.width == trees.width and not plan.surgeries
        return Outcome(
            accepted=[walk.nodes for walk in walks],
            rows=sum(trees.sizes) if packed else trees.batch * trees.width,
            seconds=seconds,
            drafting=drafting,
            attached=attached and self.can.prepares,
            pruned=self.config.pruner is not None and trees.width > 1,
        )

    def _roots(self, requests: list[Request]) -> TokenTree:
        last = [r.context.tokens[-1] for r in requests]
        return TokenTree.roots(torch.tensor(last, dtype=torch.long, device=self.device))

    def _verify(self, first: int, requests: list[Request], plan: StepPlan, alone: bool) -> tuple[TreePass, PassResult]:
        trunks, floors = self._unread(first, requests)
        return self._pass(first, plan, trunks, floors, bare=alone)

    def _unread(self, first: int, requests: list[Request]) -> tuple[list[list[int]], list[int]]:
        """Of each request the tokens before its newest one that are not in the cache yet, and its prompt's length."""
        starts = self.cache.lengths[first : first + len(requests)]
        trunks = [r.context.tokens[start:-1] for r, start in zip(requests, starts, strict=True)]
        return trunks, [r.context.prompt_length for r in requests]

    def _pass(
        self, first: int, plan: StepPlan, trunks: list[list[int]], floors: list[int], *, bare: bool
    ) -> tuple[TreePass, PassResult]:
        trees = _trees_of(plan)
        attachment = None
        if self.can.attaches:
            assert self.drafter is not None
            attachment = self.drafter.plan(plan)
        if bare and attachment is not None:
            attachment = Attachment(taps=attachment.taps)
        starts = self.cache.lengths[first : first + len(plan.requests)]
        row_by_row = self.config.strict and not any(trunks)
        limit = self.target.max_positions
        turn = tree_pass(trunks, trees, starts, attachment, floors, limit, row_by_row=row_by_row)
        if self.config.reject_drafts and trees.width > 1:  # their -1 needs an embedding all the same
            turn.plan.tokens = turn.plan.tokens.clamp(min=0)
        pruner, early_exit = self.config.pruner, self.config.early_exit
        if pruner is not None and turn.offset == 0 and trees.width > 1:
            turn.plan = pruner.enter(self.runner, turn.plan, trees)
        if early_exit is not None and turn.offset == 0:
            turn.plan = early_exit.enter(turn.plan, plan.requests, len(self.target.layers))
        with self.runner.lock:
            return turn, self.runner.run(turn.plan, self.cache, first, self.encoder)

    def read(self, first: int, requests: list[Request], counts: list[int]) -> None:
        """Commit prompt tokens, in one pass. Nothing is drafted or emitted; the drafter sees the hidden states.

        Args:
            first: slot of the first request.
            requests: in the order of their slots.
            counts: how many tokens of each, at least one.
        """
        trunks, floors = self._unread(first, requests)
        chunks = [trunk[:count] for trunk, count in zip(trunks, counts, strict=True)]
        # The chunk's last token plays the root.
        roots = TokenTree.roots(torch.tensor([c[-1] for c in chunks], dtype=torch.long, device=self.device))
        contexts = [request.context for request in requests]
        takes = [context.drafting and context.room > 1 for context in contexts]
        plan = StepPlan(contexts, [0] * len(contexts), takes, roots)
        turn, result = self._pass(first, plan, [c[:-1] for c in chunks], floors, bare=True)
        accepted = [[0] for _ in chunks]
        self.cache.commit(turn.committed(accepted), result.segments)
        if self.drafter is not None and self.can.observes:
            nothing: list[list[int]] = [[] for _ in chunks]
            self.drafter.observe(
                Step(plan.requests, roots, result, turn.trunk, turn.offset, accepted, nothing, own_rows=False)
            )

    def _accept(
        self, requests: list[Request], turn: TreePass, result: PassResult, ends: list[int | None]
    ) -> list[Walk]:
        trees, rule = turn.trees, self.config.rule
        rows = turn.node_rows(result)
        logits = result.logits if rows is not None else result.logits[:, : trees.width]
        greedy: list[Walk] = []
        if rule is None and any(r.chooser is None for r in requests):
            greedy = greedy_walks(trees, logits, rows)
        walks = []
        for b, (request, end) in enumerate(zip(requests, ends, strict=True)):
            where = None
            if rows is not None:
                size = trees.sizes[b]  # padding of a smaller tree is no node that left
                where = {n: i for i, n in enumerate(rows[b].tolist()) if 0 <= n < size}
                request.stats.pruned += size - len(where)
            scored = ScoredTree(trees, b, logits[b], where)
            if end is not None:
                choices = _unreviewed(trees, b, end)
            elif rule is not None:
                choices = rule.walk(scored, request.chooser, request.id)
            elif request.chooser is not None:
                choices = lazy_walk(scored, request.chooser)
            else:
                choices = greedy[b].choices()
            walks.append(self._emit(request, trees.source[b], choices, scored))
        return walks

    def _ends(self, requests: list[Request], trees: TokenTree) -> list[int | None]:
        """Per request, the node at which a lossy rule lets its text end without a pass; None where it does not."""
        rule = self.config.rule
        if rule is None or trees.width == 1:
            return [None] * len(requests)
        return [rule.closes(trees, b, request.rules.eos_token_ids) for b, request in enumerate(requests)]

    def _close(self, requests: list[Request], trees: TokenTree, ends: Sequence[int | None], marks: list[float]) -> None:
        """A step without a pass: every text ends in its draft tokens."""
        walks = []
        for b, (request, end) in enumerate(zip(requests, ends, strict=True)):
            assert end is not None
            walks.append(self._emit(request, trees.source[b], _unreviewed(trees, b, end)))
        self._account(requests, trees, walks, marks)
        if self.track is not None:
            self.track.step(requests, trees, None, walks, marks)

    def _emit(
        self, request: Request, sources: Tensor, choices: Iterator[Choice], scored: ScoredTree | None = None
    ) -> Walk:
        """Emit choices up to where the text ends; whatever lies behind is cut off.

        `scored` has what the model says after the tree's nodes; None where no pass was made.
        """
        walk, count = Walk(), request.rules.logprobs
        if request.finish_reason is not None:  # cancelled by another request's callback
            return walk
        try:
            for node, token, child in choices:
                source = None
                if child is not None and self.drafter is not None:
                    source = self.drafter.source_name(int(sources[child]))
                    request.stats.accepted_by_source[source] += 1
                walk.nodes.append(node)
                walk.tokens.append(token)
                walk.drafted_by.append(child)
                scores = None
                if count is not None and scored is not None:
                    scores = TokenScores.of(scored.after(node), token, count)
                if request.emit(token, source, scores):
                    break
        except Exception as error:  # one request's criteria or callback must not stop the others
            request.error, request.finish_reason = error, "error"
        return walk

    def _observe(
        self, plan: StepPlan, turn: TreePass, result: PassResult, walks: list[Walk], *, own_rows: bool
    ) -> None:
        if self.drafter is None or not self.can.observes:
            return
        self.drafter.observe(
            Step(
                plan.requests,
                turn.trees,
                result,
                turn.trunk,
                turn.offset,
                accepted=[walk.nodes for walk in walks],
                emitted=[walk.tokens for walk in walks],
                attach_to=plan.attach_to,
                own_rows=own_rows,
            )
        )

    def _account(self, requests: list[Request], trees: TokenTree, walks: list[Walk], marks: list[float]) -> None:
        share = 1 / len(requests)
        for b, (request, walk) in enumerate(zip(requests, walks, strict=True)):
            stats = request.stats
            stats.count(walk.drafted_by, trees.sizes[b] - 1, passed=len(marks) > len(STAGES))
            for stage, begin, end in zip(STAGES, marks, marks[1:], strict=False):
                stats.seconds[stage] += (end - begin) * share
            if request.rules.keep_trees:
                request.trees.append(self._tree_of(trees, b, walk))

    def _tree_of(self, trees: TokenTree, b: int, walk: Walk) -> StepTree:
        size, drafter = trees.sizes[b], self.drafter
        sources = trees.source[b, 1:size].tolist()
        return StepTree(
            trees.tokens[b, :size].tolist(),
            [-1, *trees.parents[b, 1:size].tolist()],
            ["", *("" if drafter is None else drafter.source_name(source) for source in sources)],
            [0, *(node for node in walk.drafted_by if node is not None)],
            list(walk.tokens),
        )


def _within_rules(plan: StepPlan, requests: list[Request]) -> StepPlan:
    """The plan with no more draft tokens than the requests' own rules allow."""
    if all(request.rules.node_budget is None for request in requests):
        return plan
    mosts = [request.rules.node_budget for request in requests]
    budgets = [n if most is None else min(n, most) for n, most in zip(plan.budgets, mosts, strict=True)]
    return replace(plan, budgets=budgets)


def _unreviewed(trees: TokenTree, b: int, end: int) -> Iterator[Choice]:
    """The chain in tree `b` up to its node `end`, taken as it is."""
    tokens = trees.tokens[b].tolist()
    return ((node, tokens[node + 1], node + 1) for node in range(end))


def _trees_of(plan: StepPlan) -> TokenTree:
    if plan.trees is None:
        raise RuntimeError("A shape's `trim` returned a plan without trees: return `replace(plan, trees=...)`.")
    return plan.trees
