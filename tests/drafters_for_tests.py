"""Drafters that only tests use: random trees half made of the truth, one with rows inside the model, one that raises.

They are the proof that the drafter's contract is enough: nothing of them is known to the engine.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tree_paths import from_arrays, path_of

from draftree.drafting import Attachment, Drafter, RequestState, Step
from draftree.drafting.base import Capabilities, StepPlan
from draftree.runner import HookedRunner, Target
from draftree.runner.plan import Plan, Surgery
from draftree.tree import TokenTree

References = Mapping[tuple[int, ...], Sequence[int]]  # prompt -> what the target says after it


class RandomTree(Drafter):
    """Random trees of ragged sizes, duplicates among siblings, EOS and id 0 in them, partly the true continuation.

    Args:
        references: the true continuations, so that acceptance and rejection both happen at every depth.
        seed: of the trees.
        vocabulary: ids are drawn below it.
        eos: an id that is put into drafts often.
    """

    name = "random"
    max_nodes = 24
    capabilities = Capabilities(observes=True)

    def __init__(self, references: References, seed: int = 0, vocabulary: int = 97, eos: int = 2) -> None:
        self.references, self.seed, self.vocabulary, self.eos = references, seed, vocabulary, eos
        self.live: dict[int, list[int]] = {}
        self.ended = 0

    def source_name(self, source: int) -> str:
        return f"random/{source}"

    def begin(self, request: RequestState) -> None:
        assert request.id not in self.live
        self.live[request.id] = list(request.tokens)

    def observe(self, step: Step) -> None:
        for request, emitted in zip(step.requests, step.emitted, strict=True):
            self.live[request.id] += emitted
            assert self.live[request.id] == request.tokens

    def end(self, request: RequestState) -> None:
        del self.live[request.id]
        self.ended += 1

    def draft(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        return TokenTree.stack([self._tree(r, n) for r, n in zip(requests, budgets, strict=True)])

    def truth(self, request: RequestState) -> list[int]:
        """What the target says next, as far as the references know."""
        prompt, done = request.tokens[: request.prompt_length], request.tokens[request.prompt_length :]
        known = list(self.references.get(tuple(prompt), ()))
        return known[len(done) :] if known[: len(done)] == done else []

    def _tree(self, request: RequestState, budget: int) -> TokenTree:
        rng = random.Random(f"{self.seed} {request.tokens}")
        truth = self.truth(request)
        tokens: list[int] = []
        parents: list[int] = []
        logp: list[float] = []
        held: list[int] = []  # how many tokens of the truth the path to a node holds, -1 off the truth
        for node in range(rng.choice([0, budget // 2, budget, budget])):
            true_nodes = [i for i in range(node) if held[i] >= 0]
            parent = true_nodes[-1] if true_nodes and rng.random() < 0.5 else rng.randrange(-1, node)
            at = 0 if parent < 0 else held[parent]
            roll = rng.random()
            token = rng.randrange(self.vocabulary) if roll > 0.2 else self.eos if roll > 0.1 else 0
            if 0 <= at < len(truth) and rng.random() < 0.6:
                token = truth[at]
            held.append(at + 1 if 0 <= at < len(truth) and truth[at] == token else -1)
            tokens.append(token)
            parents.append(parent)
            logp.append((logp[parent] if parent >= 0 else 0.0) - rng.random())
        source = [rng.choice([1, 2]) for _ in tokens]
        return from_arrays(tokens, parents, logp, source, root=request.tokens[-1])


class Watching(RandomTree):
    """Keeps what it drafted in every step, and what of the verified tree it was shown as its own."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.offered: list[set[tuple[int, ...]]] = []
        self.shown: list[tuple[set[tuple[int, ...]], set[tuple[int, ...]]]] = []

    def draft(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        trees = super().draft(requests, budgets)
        self.offered.append({tuple(path_of(trees, 0, node)) for node in range(1, trees.sizes[0])})
        return trees

    def observe(self, step: Step) -> None:
        super().observe(step)
        verified = {n: tuple(path_of(step.trees, 0, n)) for n in range(1, step.trees.sizes[0])}
        own = {path for n, path in verified.items() if int(step.trees.source[0, n]) & self.source}
        if verified:
            self.shown.append((own, self.offered[-1] & set(verified.values())))


class InModel(RandomTree):
    """Rows inside the model, in the manner of BiTA and Hidden Transfer; its trees are those of `RandomTree`.

    Two mask rows per tree enter with embeddings of their own and see a deep prefix; before layer 2 the second one
    is dropped and a pseudo row, made of the root's hidden state, is appended. The hidden states of layers 1 and
    2 are kept for every committed row, the prompt's included.
    """

    name = "in_model"
    capabilities = Capabilities(attaches=True, observes=True)
    taps = (1, 2)
    masks = 2
    prefix_length = 3

    def bind(self, target: Target, *, eos_token_ids: Sequence[int] = ()) -> None:
        self.layers = len(target.layers)
        self.prefixed = target.recurrence is None
        generator = torch.Generator().manual_seed(7)
        place = target.device, target.dtype
        self.embeddings = torch.randn(self.masks, target.hidden_size, generator=generator).to(*place)
        self.transfer = (torch.randn(target.hidden_size, target.hidden_size, generator=generator) / 8).to(*place)
        self.hidden: dict[int, dict[int, list[Tensor]]] = {}  # request -> layer -> states of committed rows
        self.kept: list[tuple[list[int], dict[int, Tensor]]] = []  # of ended requests: tokens, states
        self.own_predictions: dict[int, list[int]] = {}
        self.passes: Counter[bool] = Counter()

    def deep_prefix(self, target: Target) -> list[tuple[Tensor, Tensor]] | None:
        if target.recurrence is not None:  # A recurrent layer has no keys and values.
            return None
        runner, generator = HookedRunner(target), torch.Generator().manual_seed(8)
        cache = runner.new_cache(1)
        runner.run(Plan.causal(torch.tensor([[3]], device=target.device)), cache)

        def like(states: Tensor | None) -> Tensor:
            assert states is not None
            return torch.randn(states.shape[1], self.prefix_length, states.shape[3], generator=generator).to(states)

        return [(like(keys), like(values)) for keys, values in zip(cache.keys, cache.values, strict=True)]

    def begin(self, request: RequestState) -> None:
        super().begin(request)
        self.hidden[request.id] = {layer: [] for layer in self.taps}

    def plan(self, step: StepPlan) -> Attachment:
        assert step.trees is not None
        batch, n, m, device = step.trees.batch, step.trees.width, self.masks, step.trees.device
        visible = torch.zeros(batch, m, n + m, dtype=torch.bool, device=device)
        visible[:, :, 0] = True
        visible[:, :, n:] = torch.ones(m, m, device=device).tril().bool()
        prefix_rows = torch.zeros(batch, n + m, dtype=torch.bool, device=device)
        prefix_rows[:, n:] = True
        pseudo = torch.zeros(batch, 1, n + m, dtype=torch.bool, device=device)  # n nodes, one mask, the pseudo row
        pseudo[:, :, 0] = pseudo[:, :, -1] = True
        surgery = Surgery(
            2,
            keep=torch.arange(n + m - 1, device=device).expand(batch, -1),
            append=lambda hidden: hidden[:, :1] @ self.transfer,
            positions=torch.ones(batch, 1, dtype=torch.long, device=device),
            visible=pseudo,
        )
        return Attachment(
            self.embeddings.expand(batch, -1, -1),
            torch.arange(1, m + 1, device=device).expand(batch, -1),
            visible,
            prefix_rows if self.prefixed else None,
            (surgery,),
            (*self.taps, self.layers),
        )

    def observe(self, step: Step) -> None:
        super().observe(step)
        self.passes[step.own_rows] += 1
        for b, request in enumerate(step.requests):
            rows = [*range(step.prefill_rows[b]), *(step.offset + node for node in step.accepted[b])]
            for layer in self.taps:
                self.hidden[request.id][layer].append(step.result.hidden[layer][b, rows].clone())
            if step.own_rows:
                assert step.result.rows is not None
                final = step.result.rows[b, step.offset :].tolist()
                own = [final.index(step.offset + step.trees.width + i) for i in (0, self.masks)]
                assert step.result.runner is not None
                states = step.result.hidden[self.layers][b : b + 1, [step.offset + i for i in own]]
                logits = step.result.runner.logits(states)[0]
                assert logits.isfinite().all()
                self.own_predictions[request.id] = logits.argmax(-1).tolist()

    def _tree(self, request: RequestState, budget: int) -> TokenTree:
        tree = super()._tree(request, max(budget - 2, 0))
        own = self.own_predictions.get(request.id, [])
        if budget < 2 or not own:
            return tree
        nodes = tree.sizes[0] - 1
        return from_arrays(
            [*tree.tokens[0, 1:].tolist(), *own],
            [*(tree.parents[0, 1:] - 1).tolist(), -1, *range(nodes, nodes + len(own) - 1)],
            [*tree.logp[0, 1:].tolist(), *(0.0 for _ in own)],
            [*tree.source[0, 1:].tolist(), *(2 for _ in own)],
            root=request.tokens[-1],
        )

    def end(self, request: RequestState) -> None:
        super().end(request)
        states = {layer: torch.cat(parts) for layer, parts in self.hidden.pop(request.id).items() if parts}
        self.kept.append((list(request.tokens), states))
        self.own_predictions.pop(request.id, None)


class Raising(RandomTree):
    """Raises in one of its methods, at the n-th call of it.

    Args:
        stage: name of the method.
        call: which call, from 1.
    """

    name = "raising"
    capabilities = Capabilities(attaches=True, observes=True)

    def __init__(self, references: References, stage: str, call: int = 1) -> None:
        super().__init__(references)
        self.stage, self.call, self.calls = stage, call, Counter[str]()

    def _count(self, stage: str) -> None:
        self.calls[stage] += 1
        if stage == self.stage and self.calls[stage] == self.call:
            raise ArithmeticError(f"{stage} went wrong")

    def begin(self, request: RequestState) -> None:
        super().begin(request)
        self._count("begin")

    def plan(self, step: StepPlan) -> Attachment | None:
        self._count("plan")
        return None

    def draft(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        self._count("draft")
        return super().draft(requests, budgets)

    def observe(self, step: Step) -> None:
        super().observe(step)
        self._count("observe")

    def end(self, request: RequestState) -> None:
        super().end(request)
        self._count("end")
