"""What runner tests share: trees, a run of several requests through a runner, and stock Hugging Face references.

References never go through draftree: they call the stock model's `forward` on whole sequences, at most with a
plain hook where a check replaces hidden states mid-stack.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import VOCABULARY

from draftree.runner import choose
from draftree.runner.base import Runner
from draftree.runner.hooked.runner import HookedRunner
from draftree.runner.plan import PassResult, Plan, Surgery
from draftree.runner.target import inspect_model


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small only lose by handing work over; a module that imports this runs on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Tree:
    """A token tree as plain lists; node 0 is the root."""

    def __init__(self, parents: Sequence[int], seed: int) -> None:
        self.parents = list(parents)
        self.size = len(self.parents)
        self.branches: list[list[int]] = []
        for node, parent in enumerate(self.parents):
            self.branches.append([*(self.branches[parent] if parent >= 0 else []), node])
        self.depths = [len(branch) - 1 for branch in self.branches]
        generator = torch.Generator().manual_seed(seed)
        self.tokens = random_ids(self.size, generator)

    @classmethod
    def random(cls, size: int, seed: int) -> Tree:
        generator = torch.Generator().manual_seed(1000 + seed)
        parents = [-1] + [int(torch.randint(0, n, (1,), generator=generator)) for n in range(1, size)]
        return cls(parents, seed)

    def visible(self, width: int) -> Tensor:
        """BoolTensor [width, width]; rows past the tree see themselves only."""
        seen = torch.eye(width, dtype=torch.bool)
        for node, branch in enumerate(self.branches):
            seen[node, branch] = True
        return seen


BUSHY = (-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 10)


def random_ids(count: int, generator: torch.Generator) -> Tensor:
    """LongTensor [count]; no special tokens, as some stock models treat them apart."""
    return torch.randint(3, VOCABULARY, (count,), generator=generator)


def runners_for(model: Any) -> list[Runner]:
    """Every runner that drives `model`."""
    target = inspect_model(model)
    runners: list[Runner] = [HookedRunner(target)]
    way = choose(target)
    if way is not HookedRunner:
        runners.append(way(target))
    return runners


class Run:
    """Requests of given lengths in consecutive slots of one cache, with their texts kept for reference.

    Args:
        runner: the runner to drive.
        lengths: prompt length of each request.
        seed: of the prompts (and of the encoder's inputs, which are ragged too).
        first: slot of the first request; lower slots stay empty.
        prefix: deep prefix for the cache.
        capacity: first size of the cache.
        prompt_lengths: whether plans give the lengths of prompts, which length-dependent RoPE needs.
    """

    def __init__(
        self,
        runner: Runner,
        lengths: Sequence[int] = (21,),
        *,
        seed: int = 1,
        first: int = 0,
        prefix: list[tuple[Tensor, Tensor]] | None = None,
        capacity: int = 64,
        prompt_lengths: bool = True,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.runner, self.first, self.prompt_lengths = runner, first, prompt_lengths
        self.prompts = [random_ids(n, generator) for n in lengths]
        self.texts = [torch.empty(0, dtype=torch.long) for _ in lengths]
        self.cache = runner.new_cache(first + len(lengths), capacity, prefix)
        self.sources: list[Tensor | None] = [None] * len(lengths)
        self.encoder: Any = None
        if runner.target.encoder_decoder:
            from draftree.runner.kv.encoder import EncoderState

            self.encoder = EncoderState(runner.target, first + len(lengths))
            for b in range(len(lengths)):
                source = random_ids(11 - 3 * b, generator)
                self.sources[b] = source
                self.encoder.admit(first + b, source)

    def prefill(self, chunks: Sequence[int] = (1000,), *, together: bool = False) -> Run:
        """Commit the prompts in pieces of the given sizes: request by request, or padded `together`."""
        begin = 0
        for size in chunks:
            pieces = [p[begin : begin + size] for p in self.prompts]
            if together and self.runner.target.recurrence is None:  # Recurrent layers see padding.
                self._feed(pieces, begin, 0)
            else:
                for b, piece in enumerate(pieces):
                    self._feed([piece], begin, b)
            begin += size
        return self

    def _feed(self, pieces: list[Tensor], begin: int, b: int) -> None:
        width = max(len(p) for p in pieces)
        tokens = torch.stack([torch.nn.functional.pad(p, (0, width - len(p))) for p in pieces])
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        plan = Plan(
            tokens,
            (begin + torch.arange(width)).expand(len(pieces), -1),
            causal.expand(len(pieces), -1, -1),
            first_logit_row=width - 1,
            prompt_lengths=self._prompt_lengths(b, len(pieces)),
            prompt=len(pieces) == 1,
        )
        result = self.runner.run(plan.to(self.runner.plan_device), self.cache, self.first + b, self.encoder)
        assert result.logits.shape == (len(pieces), 1, self.runner.target.config.vocab_size)
        if len(pieces) == 1:
            self.last = result.logits[0, 0]
        self.cache.commit([list(range(len(p))) for p in pieces], result.segments)
        for i, piece in enumerate(pieces):
            self.texts[b + i] = torch.cat([self.texts[b + i], piece])

    def _prompt_lengths(self, b: int, count: int) -> tuple[int, ...]:
        return tuple(len(p) for p in self.prompts[b : b + count]) if self.prompt_lengths else ()

    def plan(self, trees: Sequence[Tree], **extra: Any) -> Plan:
        """The pass over one tree a request, padded to the widest."""
        width = max(tree.size for tree in trees)
        tokens = torch.zeros(len(trees), width, dtype=torch.long)
        positions = torch.zeros(len(trees), width, dtype=torch.long)
        for b, tree in enumerate(trees):
            tokens[b, : tree.size] = tree.tokens
            positions[b, : tree.size] = len(self.texts[b]) + torch.tensor(tree.depths)
        visible = torch.stack([tree.visible(width) for tree in trees])
        return Plan(tokens, positions, visible, prompt_lengths=self._prompt_lengths(0, len(trees)), **extra)

    def step(self, trees: Sequence[Tree], **extra: Any) -> PassResult:
        """Run `plan(trees, **extra)`."""
        plan = self.plan(trees, **extra).to(self.runner.plan_device)
        return self.runner.run(plan, self.cache, self.first, self.encoder)

    def commit(self, trees: Sequence[Tree], rows: list[list[int]], result: PassResult) -> None:
        """Keep `rows` of each request's tree."""
        self.cache.commit(rows, result.segments)
        for b, tree in enumerate(trees):
            self.texts[b] = torch.cat([self.texts[b], tree.tokens[rows[b]]])

    def stock(self, b: int, tree: Tree, **hooks: Any) -> Tensor:
        """Stock logits [tree.size, V] at the end of every branch behind request b's text."""
        sequences = [torch.cat([self.texts[b], tree.tokens[branch]]) for branch in tree.branches]
        return stock_logits(self.runner.target.model, sequences, self.sources[b], **hooks)

    def error(self, trees: Sequence[Tree], result: PassResult) -> float:
        """Largest difference of an unpruned pass from stock, over all requests and nodes."""
        return max(difference(result.logits[b, : tree.size], self.stock(b, tree)) for b, tree in enumerate(trees))


@torch.no_grad()
def stock_logits(
    model: Any,
    sequences: Sequence[Tensor],
    source: Tensor | None = None,
    replace: Callable[..., Tensor] | None = None,
) -> Tensor:
    """The stock model's logits [n, V] after each sequence; pads behind a sequence cannot reach it.

    `replace(hidden)` may change what enters decoder layer 2.
    """
    ends = torch.tensor([len(s) - 1 for s in sequences])
    ids = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if source is not None:
        arguments = {"input_ids": source.expand(len(ids), -1), "decoder_input_ids": ids, "use_cache": False}
    handle = None
    if replace is not None:

        def hook(module: Any, args: Any, kwargs: Any) -> Any:
            if args:
                return (replace(args[0]), *args[1:]), kwargs
            return args, kwargs | {"hidden_states": replace(kwargs["hidden_states"])}

        handle = inspect_model(model).layers[2].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        logits = model(**arguments).logits
    finally:
        if handle is not None:
            handle.remove()
    return logits[torch.arange(len(ids)), ends]


class Stepwise:
    """A stock model that reads a prompt in one pass and then token by token; for models with recurrent layers."""

    def __init__(self, model: Any, prompt: Tensor) -> None:
        names = inspect.signature(model.forward).parameters
        self._name = next(name for name in ("cache", "cache_params", "past_key_values") if name in names)
        self._model, self._length = model, 0
        self._cache = self._read(None, prompt, 0)[1]
        self._length = len(prompt)

    @torch.no_grad()
    def _read(self, cache: Any, tokens: Tensor, begin: int) -> tuple[Tensor, Any]:
        positions = torch.arange(begin, begin + len(tokens))[None]
        out = self._model(tokens[None], position_ids=positions, use_cache=True, **{self._name: cache})
        return out.logits[0, -1], out["cache_params" if "cache_params" in out else "past_key_values"]

    def nodes(self, tree: Tree) -> Tensor:
        """Logits [tree.size, V] behind every branch of `tree`."""
        caches, found = {-1: self._cache}, []
        for node, parent in enumerate(tree.parents):
            cache = copy.deepcopy(caches[parent])
            begin = self._length + tree.depths[node]
            logits, caches[node] = self._read(cache, tree.tokens[node : node + 1], begin)
            found.append(logits)
        return torch.stack(found)

    def accept(self, tokens: Tensor) -> None:
        """Read `tokens`, one by one."""
        for token in tokens:
            self._cache = self._read(self._cache, token[None], self._length)[1]
            self._length += 1


def difference(ours: Tensor, stock: Tensor) -> float:
    """Largest absolute difference; shapes must agree and nothing may be NaN."""
    assert ours.shape == stock.shape
    return float((ours - stock).abs().max().nan_to_num(nan=float("inf")))


def prune(layer: int, keep: Any) -> tuple[Surgery, ...]:
    """The surgery that keeps rows `keep` before `layer`."""
    return (Surgery(layer, keep=keep),)
