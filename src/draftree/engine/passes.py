"""Lay out one pass, and accept draft tokens after it.

A pass has prefill rows, then tree rows, then attached rows. A request's first pass carries prefill rows, those of its
prompt, in front of its tree; later passes carry the tree alone. Prefill rows of different numbers are padded behind, so
that all trees of a pass begin at the same row. Then the acceptance rule chooses a path in each tree, and the request
emits its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftree.acceptance.base import AcceptedPath, Choice, LossyRule, ScoredTree, best_tokens, lazy_walk
from draftree.drafting.base import Attachment, Drafter
from draftree.engine.request import Request, TokenScores
from draftree.runner import Runner
from draftree.runner.kv.cache import SlotCache
from draftree.runner.plan import PassResult, Plan, Surgery, join
from draftree.tree import TokenTree

SCORED_CHUNK = 256  # Tokens per pass of `score_prompt`; each has logits of the whole vocabulary.
REACH = 256  # No row is further ahead of its root than this.


@dataclass(slots=True)
class TreePass:
    """A plan, and the places of its rows."""

    plan: Plan  # what the runner runs
    trees: TokenTree  # the trees in it
    prefill_rows: list[int]  # per request, without padding
    offset: int  # row where trees begin

    def node_rows(self, result: PassResult) -> Tensor | None:
        """Return the node number of each logits row [B, n], -1 for other rows; None if rows and nodes agree."""
        rows = result.rows
        return None if rows is None else nodes_behind(rows, self.offset, result.logits.shape[1], self.trees.width)

    def committed(self, accepted: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the rows to commit for each request: its prefill rows, then the accepted nodes."""
        return [
            [*range(count), *(self.offset + node for node in nodes)]
            for count, nodes in zip(self.prefill_rows, accepted, strict=True)
        ]


def nodes_behind(rows: Tensor, offset: int, logits: int, width: int) -> Tensor:
    """Return the node number of each of `logits` final rows [B, n], -1 for rows that are not nodes."""
    nodes = rows[:, offset : offset + logits] - offset
    return nodes.masked_fill((nodes < 0) | (nodes >= width), -1)


def tree_pass(
    prefill: Sequence[Sequence[int]],
    trees: TokenTree,
    starts: Sequence[int],
    attachment: Attachment | None = None,
    prompt_lengths: Sequence[int] = (),
    limit: int | None = None,
    *,
    row_by_row: bool = False,
    prompt: bool = False,
) -> TreePass:
    """Lay out one pass.

    Args:
        prefill: tokens before each root that are not in the cache yet (empty after the first pass).
        starts: committed context length of each request.
        prompt_lengths: see `Plan`.
        limit: the model's context; draft tokens beyond it are moved back to its last position.
        row_by_row, prompt: see `Plan`.
    """
    device = trees.tokens.device
    prefill_rows = [len(tokens) for tokens in prefill]
    offset = max(prefill_rows)
    drafted = trees.tokens
    batch, width = drafted.shape
    begin = torch.tensor([[s + t] for s, t in zip(starts, prefill_rows, strict=True)], device=device, dtype=torch.long)
    if offset == 0:
        plan = Plan(drafted, begin + trees.depth, trees.ancestors, sizes=trees.sizes)
    else:
        tokens = torch.zeros(batch, offset, dtype=torch.long, device=device)
        for b, certain in enumerate(prefill):
            tokens[b, : len(certain)] = torch.tensor(certain, dtype=torch.long, device=device)
        start = torch.tensor(list(starts), device=device, dtype=torch.long)[:, None]
        positions = torch.minimum(start + torch.arange(offset, device=device), begin)
        visible = torch.zeros(batch, offset + width, offset + width, dtype=torch.bool, device=device)
        visible[:, :offset, :offset] = torch.ones(offset, offset, dtype=torch.bool, device=device).tril()
        counts = torch.tensor(prefill_rows, device=device, dtype=torch.long)[:, None]
        real = torch.arange(offset, device=device) < counts
        visible[:, offset:, :offset] = real[:, None]
        visible[:, offset:, offset:] = trees.ancestors
        plan = Plan(
            torch.cat([tokens, drafted], 1),
            torch.cat([positions, begin + trees.depth], 1),
            visible,
            first_logit_row=offset,
        )
    plan.last_logit_row = offset + width
    plan.prompt_lengths = tuple(prompt_lengths)
    plan.row_by_row, plan.prompt = row_by_row, prompt
    if attachment is not None:
        _attach(plan, attachment, begin, prefill_rows)
    if limit is not None and max(s + t for s, t in zip(starts, prefill_rows, strict=True)) + REACH >= limit:
        plan = _clamp(plan, limit - 1)
    return TreePass(plan, trees, prefill_rows, offset)


def _clamp(plan: Plan, last: int) -> Plan:
    """Move rows beyond the context to its last position; their results are never used."""
    surgeries = tuple(
        s if s.positions is None else replace(s, positions=s.positions.clamp(max=last)) for s in plan.surgeries
    )
    return replace(plan, positions=plan.positions.clamp(max=last), surgeries=surgeries)


def _attach(plan: Plan, attachment: Attachment, begin: Tensor, prefill_rows: list[int]) -> None:
    """Add a drafter's rows to a plan."""
    offset, prefix_rows = max(prefill_rows), attachment.prefix_rows
    if attachment.embeddings is not None:
        if attachment.positions is None or attachment.visible is None:
            raise ValueError("An attachment with embeddings must give their `positions` and `visible`.")
        plan.tokens = torch.nn.functional.pad(plan.tokens, (0, attachment.embeddings.shape[1]))
        plan.positions = torch.cat([plan.positions, begin + attachment.positions], 1)
        plan.visible = join(plan.visible, _see_prefill(attachment.visible, prefill_rows))
    if prefix_rows is not None and offset:
        prefix_rows = torch.nn.functional.pad(prefix_rows, (offset, 0))
    plan.embeddings, plan.prefix_rows = attachment.embeddings, prefix_rows
    plan.surgeries = tuple(_shift(s, begin, prefill_rows) for s in attachment.surgeries)
    plan.taps, plan.sizes = attachment.taps, plan.sizes if plan.unchanged else None


def _see_prefill(visible: Tensor, prefill_rows: list[int]) -> Tensor:
    """Put as many columns in front of [B, m, n] as there are prefill rows; each request's own ones are visible."""
    if max(prefill_rows) == 0:
        return visible
    lengths = torch.tensor(prefill_rows, device=visible.device, dtype=torch.long)
    real = torch.arange(max(prefill_rows), device=visible.device) < lengths[:, None]
    return torch.cat([real[:, None].expand(-1, visible.shape[1], -1), visible], 2)


def _shift(surgery: Surgery, begin: Tensor, prefill_rows: list[int]) -> Surgery:
    """Express a surgery on tree rows as one on all rows: prefill rows stay in front, untouched."""
    offset = max(prefill_rows)
    positions = None if surgery.positions is None else begin + surgery.positions
    if offset == 0:
        return surgery if positions is None else replace(surgery, positions=positions)
    keep, append, source, visible = surgery.keep, surgery.append, surgery.source, surgery.visible

    def with_prefill(rows: Tensor | None) -> Tensor | None:
        if rows is None:
            return None
        front = torch.arange(offset, device=rows.device).expand(rows.shape[0], -1)
        return torch.cat([front, torch.where(rows >= 0, rows + offset, rows)], 1)

    if callable(keep):
        choose = keep
        keep = lambda hidden: with_prefill(choose(hidden[:, offset:]))  # noqa: E731
    elif keep is not None:
        keep = with_prefill(keep)
    if source is not None:
        source = source + offset
    elif append is not None:
        make = append
        append = lambda hidden: make(hidden[:, offset:])  # noqa: E731
    if visible is not None:
        visible = _see_prefill(visible, prefill_rows)
    return replace(surgery, keep=keep, append=append, source=source, positions=positions, visible=visible)


def score_prompt(runner: Runner, prompt: Sequence[int], count: int, cache: SlotCache) -> Iterator[list[TokenScores]]:
    """Yield the scores of `prompt[1:]` in chunks; the first token has none.

    Other requests may run passes between the chunks.

    Args:
        count: number of most probable tokens to return with each.
        cache: of one slot, used by no other caller until the last chunk; its content is dropped.
    """
    cache.clear(0)
    recurrence = runner.target.recurrence
    size = SCORED_CHUNK if recurrence is None else recurrence.prompt_rows(SCORED_CHUNK)
    for begin in range(0, len(prompt) - 1, size):
        chunk = list(prompt[begin : min(begin + size, len(prompt) - 1)])
        with runner.guard(), runner.lock:
            root = TokenTree.roots(torch.tensor(chunk[-1:], dtype=torch.long, device=runner.plan_device))
            turn = tree_pass(
                [chunk[:-1]],
                root,
                [begin],
                prompt_lengths=[len(prompt)],
                limit=runner.target.max_positions,
                prompt=True,
            )
            result = runner.run(replace(turn.plan, first_logit_row=0), cache)
            cache.commit(turn.committed([[0]]), result.segments)
            following = prompt[begin + 1 : begin + 1 + len(chunk)]
            scored = [TokenScores.of(result.logits[0, i], token, count) for i, token in enumerate(following)]
        yield scored


class Acceptance:
    """Accept the draft tokens of `drafter`, without loss or by a lossy rule."""

    def __init__(self, rule: LossyRule | None, drafter: Drafter | None) -> None:
        self.rule = rule
        self.drafter = drafter

    def walk(self, requests: list[Request], turn: TreePass, result: PassResult) -> list[AcceptedPath]:
        """Walk the trees of a pass and emit the tokens."""
        trees, rule = turn.trees, self.rule
        node_rows = turn.node_rows(result)
        rows = None if node_rows is None else node_rows.tolist()
        logits = result.logits if rows is not None else result.logits[:, : trees.width]
        choosers = [request.context.chooser for request in requests]
        # All requests at once, because each copy from a device waits for it.
        best = best_tokens(logits) if rule is None and None in choosers else [()] * len(requests)
        tokens, parents, sources = torch.stack([trees.tokens, trees.parents, trees.source]).tolist()
        paths = []
        for b, (request, chooser) in enumerate(zip(requests, choosers, strict=True)):
            where, size = None, trees.sizes[b]
            if rows is not None:
                where = {n: i for i, n in enumerate(rows[b]) if 0 <= n < size}  # Padding is not counted as pruned.
                request.stats.pruned += size - len(where)
            scored = ScoredTree(tokens[b][:size], parents[b][:size], logits[b], where)
            choices = lazy_walk(scored, chooser, best[b]) if rule is None else rule.walk(scored, chooser)
            paths.append(self._emit(request, sources[b], choices, scored))
        return paths

    def _emit(
        self, request: Request, sources: Sequence[int], choices: Iterator[Choice], scored: ScoredTree
    ) -> AcceptedPath:
        """Emit choices until the text ends."""
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
                scores = None if count is None else TokenScores.of(scored.after(node), token, count)
                if request.emit(token, source, scores):
                    break
        except Exception as error:  # Errors in a request's criteria or callback end that request alone.
            request.error, request.finish_reason = error, "error"
        return path
