"""The loop of all methods; one turn is one forward pass of the target.

draft -> shape -> verify (prune inside) -> accept -> commit -> observe
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from draftree.acceptance.base import AcceptedPath
from draftree.drafting.base import Attachment, Capabilities, RequestState, Step, StepPlan
from draftree.engine.config import EngineConfig
from draftree.engine.passes import Acceptance, TreePass, tree_pass
from draftree.engine.recorder import Track
from draftree.engine.request import STAGES, Request, StepTree
from draftree.pruning.pruner import Pruner
from draftree.runner import Runner
from draftree.runner.base import preparations
from draftree.runner.hooked.runner import HookedRunner
from draftree.runner.images import placeholder
from draftree.runner.kv.cache import SlotCache
from draftree.runner.kv.encoder import EncoderState
from draftree.runner.plan import PassResult
from draftree.runner.recurrent.cache import RecurrentCache
from draftree.shaping.base import Outcome, Sizer
from draftree.tree import TokenTree


class Loop:
    """Advance requests in neighbouring slots."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        cache: SlotCache,
        encoder: EncoderState | None,
        sizer: Sizer | None,
        pruner: Pruner | None,
        track: Track | None,
    ) -> None:
        self.config = config
        self.runner = runner
        self.target = runner.target
        self.cache = cache
        self.encoder = encoder
        self.drafter = config.drafter
        self.acceptance = Acceptance(config.rule, config.drafter)
        self.can = Capabilities() if config.drafter is None else config.drafter.capabilities
        self.sizer, self.pruner = sizer, pruner
        self.track = track
        # Attached rows are computed on the model's device, so the trees must be there too.
        within = self.can.attaches or pruner is not None
        self.device = runner.target.device if within else runner.plan_device

    @property
    def reads_alone(self) -> bool:
        """Return whether a prompt passes alone and without drafts, in chunks of one size, as in plain decoding."""
        return self.config.strict or self.target.recurrence is not None

    def advance(self, first: int, requests: list[Request]) -> None:
        """Run one pass of the target over requests in slots [first, first + len(requests))."""
        clock = self.config.clock
        reads = any(not request.output for request in requests)
        alone = reads and (self.reads_alone or any(request.context.images is not None for request in requests))
        marks, prepared = [clock()], preparations()
        plan = self._draft(requests, alone=alone)
        trees = _trees_of(plan)
        marks.append(clock())
        turn, result = self._verify(first, plan, self._unread(first, plan.requests), bare=alone, prompt=reads)
        marks.append(clock())
        paths = self.acceptance.walk(requests, turn, result)
        marks.append(clock())
        self.cache.commit(turn.committed([path.nodes for path in paths]), result.segments)
        marks.append(clock())
        timed = turn.offset == 0 and preparations() == prepared
        left = None if result.rows is None else (result.rows, turn.offset, result.logits.shape[1])
        self._account(requests, trees, paths, left, marks)
        self._observe(plan, turn, result, paths, own_rows=not alone)
        if self.sizer is not None and not alone:
            whole = clock() - marks[0] if timed else None
            self.sizer.observe(plan, self._outcome(turn, paths, whole, marks[1] - marks[0]))

    def _draft(self, requests: list[Request], *, alone: bool) -> StepPlan:
        """Return the plan of this step: drafted trees, or the roots alone."""
        contexts = [request.context for request in requests]
        drafter, sizer = self.drafter, self.sizer
        if drafter is None or sizer is None or alone:
            return self._undrafted(contexts, [context.tokens[-1] for context in contexts])
        plan = _within_params(sizer.plan(contexts, drafter.max_nodes), requests)
        if not any(plan.budgets):
            roots = self._roots([context.tokens[-1] for context in contexts])
            plan = sizer.trim(plan, roots)
            if plan.trees is not roots:  # Reading the trees waits for a GPU.
                _check_roots(plan, contexts)
            return plan
        began = self.config.clock()
        drafted = self._usable(drafter.draft(contexts, wider(plan.budgets, contexts, drafter.max_nodes)))
        drafted = permitted(drafted, contexts, plan.budgets)
        if self.track is not None:
            self.track.drafted(plan.budgets, drafted, began, self.config.clock())
        if self.config.reject_drafts:  # The target never chooses token -1.
            drafted = replace(drafted, tokens=torch.where(drafted.depth > 0, -1, drafted.tokens))
        plan = sizer.trim(plan, drafted)
        _check_roots(plan, contexts)
        return replace(plan, trees=_trees_of(plan).to(self.device))

    def _usable(self, trees: TokenTree) -> TokenTree:
        """Remove draft tokens outside the vocabulary and parts of images, with their subtrees; clamp log-probabilities.

        A trie may hold another model's tokens, and a draft model may have a larger table.
        """
        known = (trees.tokens >= 0) & (trees.tokens < self.target.vocab_size)
        image = placeholder(self.target)
        if image is not None:
            known &= (trees.tokens != image) | (trees.depth == 0)
        if not bool(known.all()):
            trees = trees.prune(known)[0]
        if not bool((trees.logp <= 0).all()):
            trees = replace(trees, logp=trees.logp.nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0.0))
        return trees

    def _outcome(self, turn: TreePass, paths: list[AcceptedPath], seconds: float | None, drafting: float) -> Outcome:
        plan, trees = turn.plan, turn.trees
        attached = bool(plan.taps or plan.surgeries or plan.embeddings is not None)
        packed = self.runner.packs and plan.sizes is not None and plan.width == trees.width and not plan.surgeries
        return Outcome(
            accepted=[path.nodes for path in paths],
            rows=sum(trees.sizes) if packed else trees.batch * trees.width,
            seconds=seconds,
            drafting=drafting,
            attached=attached and self.can.prepares,
            pruned=self.pruner is not None and trees.width > 1,
        )

    def _undrafted(self, contexts: list[RequestState], roots: list[int]) -> StepPlan:
        """Return the plan of a step without draft tokens, over these tokens."""
        prepares = [context.drafting and context.remaining > 1 for context in contexts]
        return StepPlan(contexts, [0] * len(contexts), prepares, self._roots(roots))

    def _roots(self, tokens: list[int]) -> TokenTree:
        return TokenTree.roots(torch.tensor(tokens, dtype=torch.long, device=self.device))

    def _unread(self, first: int, contexts: Sequence[RequestState]) -> list[list[int]]:
        """Return each request's tokens before its newest one that are not in the cache yet."""
        starts = self.cache.lengths[first : first + len(contexts)]
        return [context.tokens[start:-1] for context, start in zip(contexts, starts, strict=True)]

    def _verify(
        self, first: int, plan: StepPlan, prefill: list[list[int]], *, bare: bool, prompt: bool
    ) -> tuple[TreePass, PassResult]:
        """Run one pass over the `prefill` tokens, the trees, and the drafter's own rows, which `bare` leaves out.

        `prompt` says that the prefill tokens and the root belong to a prompt; one with images is whole and alone.
        """
        trees = _trees_of(plan)
        attachment = None
        if self.can.attaches:
            assert self.drafter is not None
            attachment = self.drafter.plan(plan)
        if bare and attachment is not None:
            attachment = Attachment(taps=attachment.taps)
        starts = self.cache.lengths[first : first + len(plan.requests)]
        lengths = [context.prompt_length for context in plan.requests]
        row_by_row = self.config.strict and not any(prefill)
        limit = self.target.max_positions
        prompt = prompt and trees.width == 1
        turn = tree_pass(prefill, trees, starts, attachment, lengths, limit, row_by_row=row_by_row, prompt=prompt)
        if self.config.reject_drafts and trees.width > 1:  # their -1 needs an embedding all the same
            turn.plan.tokens = turn.plan.tokens.clamp(min=0)
        if self.pruner is not None and turn.offset == 0 and trees.width > 1:
            turn.plan = self.pruner.enter(turn.plan, trees)
        turn.plan.shifts = tuple(context.shift for context in plan.requests)
        images = plan.requests[0].images
        if images is not None and not self.cache.lengths[first]:
            turn.plan = replace(turn.plan, images=images.arguments(self.target.device))
            result = self._stock.run(turn.plan.to(self.target.device), self.cache, first)
            plan.requests[0].shift = result.shift
            return turn, result
        with self.runner.lock:
            return turn, self.runner.run(turn.plan, self.cache, first, self.encoder)

    @cached_property
    def _stock(self) -> HookedRunner:
        """Return the runner of prompts with images, which only the model's own `forward` reads."""
        return self.runner if isinstance(self.runner, HookedRunner) else HookedRunner(self.target)

    def read(self, first: int, requests: list[Request], counts: list[int]) -> None:
        """Commit prompt tokens in one pass, without drafting or emitting; the drafter observes the hidden states."""
        began = self.config.clock()
        contexts = [request.context for request in requests]
        unread = self._unread(first, contexts)
        chunks = [tokens[:count] for tokens, count in zip(unread, counts, strict=True)]
        plan = self._undrafted(contexts, [chunk[-1] for chunk in chunks])  # The last token of the chunk is the root.
        turn, result = self._verify(first, plan, [chunk[:-1] for chunk in chunks], bare=True, prompt=True)
        paths = [AcceptedPath(nodes=[0]) for _ in chunks]
        self.cache.commit(turn.committed([path.nodes for path in paths]), result.segments)
        share = (self.config.clock() - began) / len(requests)
        for request in requests:
            request.stats.seconds["verify"] += share
        self._observe(plan, turn, result, paths, own_rows=False)

    def mark(self, slot: int, request: Request) -> None:
        """Read a prompt up to its last chunk, and keep the recurrent states there for texts with the same beginning."""
        recurrence = self.target.recurrence
        if isinstance(self.cache, RecurrentCache) and recurrence is not None and recurrence.chunk is not None:
            start, end = self.cache.lengths[slot], len(request.context.tokens) - 1
            end -= end % recurrence.chunk
            if end > start:
                self.read(slot, [request], [end - start])
                self.cache.mark(slot)

    def _observe(
        self,
        plan: StepPlan,
        turn: TreePass,
        result: PassResult,
        paths: list[AcceptedPath],
        *,
        own_rows: bool,
    ) -> None:
        if self.drafter is None or not self.can.observes:
            return
        self.drafter.observe(
            Step(
                plan.requests,
                turn.trees,
                result,
                turn.prefill_rows,
                turn.offset,
                accepted=[path.nodes for path in paths],
                emitted=[path.tokens for path in paths],
                attach_to=plan.attach_to,
                own_rows=own_rows,
            )
        )

    def _account(
        self,
        requests: list[Request],
        trees: TokenTree,
        paths: list[AcceptedPath],
        left: tuple[Tensor, int, int] | None,
        marks: list[float],
    ) -> None:
        """Add the step to the statistics and the record; `left` as in `Track.step`."""
        share = 1 / len(requests)
        for b, (request, path) in enumerate(zip(requests, paths, strict=True)):
            stats = request.stats
            stats.count(path.drafted_by, trees.sizes[b] - 1)
            for stage, begin, end in zip(STAGES, marks, marks[1:], strict=False):
                stats.seconds[stage] += (end - begin) * share
            if request.params.keep_trees:
                request.trees.append(self._tree_of(trees, b, path))
        if self.track is not None:
            self.track.step(requests, trees, left, paths, marks)

    def _tree_of(self, trees: TokenTree, b: int, path: AcceptedPath) -> StepTree:
        size, drafter = trees.sizes[b], self.drafter
        sources = trees.source[b, 1:size].tolist()
        return StepTree(
            trees.tokens[b, :size].tolist(),
            [-1, *trees.parents[b, 1:size].tolist()],
            ["", *("" if drafter is None else drafter.source_name(source) for source in sources)],
            [0, *(node for node in path.drafted_by if node is not None)],
            list(path.tokens),
        )


def _check_roots(plan: StepPlan, contexts: Sequence[RequestState]) -> None:
    """Check the roots of the trees."""
    if _trees_of(plan).tokens[:, 0].tolist() != [context.tokens[-1] for context in contexts]:
        raise ValueError(
            "The drafter or the shape returned trees whose roots are not the requests' newest tokens, in the requests' "
            "order: begin each tree at request.tokens[-1], and leave request.tokens as it is."
        )


def _within_params(plan: StepPlan, requests: list[Request]) -> StepPlan:
    """Return the plan with budgets of at most each request's `node_budget`."""
    if all(request.params.node_budget is None for request in requests):
        return plan
    mosts = [request.params.node_budget for request in requests]
    budgets = [n if most is None else min(n, most) for n, most in zip(plan.budgets, mosts, strict=True)]
    return replace(plan, budgets=budgets)


def _trees_of(plan: StepPlan) -> TokenTree:
    if plan.trees is None:
        raise RuntimeError("A shape's `trim` returned a plan without trees: return `replace(plan, trees=...)`.")
    return plan.trees


def wider(budgets: Sequence[int], requests: Sequence[RequestState], most: int) -> list[int]:
    """Return larger budgets, up to `most`, for requests whose grammar will remove draft tokens."""
    return [
        max(budget, min(2 * budget, most)) if request.grammar is not None else budget
        for budget, request in zip(budgets, requests, strict=True)
    ]


def permitted(trees: TokenTree, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
    """Remove draft tokens that a request's grammar forbids, and cut the trees to their budgets."""
    if trees.width == 1 or all(request.grammar is None for request in requests):
        return trees
    tokens, parents = trees.tokens.tolist(), trees.parents.tolist()
    keep = torch.ones(len(requests), trees.width, dtype=torch.bool, device=trees.device)
    cut = False
    for b, request in enumerate(requests):
        size = trees.sizes[b]
        if request.grammar is None or size == 1:
            continue
        own = request.grammar.permits(request.answer, tokens[b][:size], parents[b][:size])
        if not all(own):
            cut = True
            keep[b, :size] = torch.tensor(own, dtype=torch.bool, device=trees.device)
    if cut:
        trees = trees.prune(keep)[0]
    if any(size > budget + 1 for size, budget in zip(trees.sizes, budgets, strict=True)):
        trees = trees.best(budgets)
    return trees
