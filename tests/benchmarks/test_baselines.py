"""The papers' baselines: Jacobi trajectories against whole passes over the same texts, its pool, and early exits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from generate_driver import NEW, SHAPES, hf, prompts, same
from tree_paths import path_of
from zoo import MEMBERS, build, construct

from benchmarks.drafters.early_exit import SelfSpeculative, early_exit_model
from benchmarks.drafters.jacobi import Jacobi, Pool
from draftree.drafting import RequestState, Step
from draftree.drafting.base import Place, StepPlan
from draftree.engine import Engine, SamplingParams, generate
from draftree.runner import EagerRunner, inspect_model, pack_weights
from draftree.runner.hooked.runner import HookedRunner
from draftree.shaping import Fixed
from draftree.tree import TokenTree


class Watched(Jacobi):
    """Keeps each step's text, window and what the model made of it."""

    def bind(self, target: Any, *, eos_token_ids: Sequence[int] = ()) -> None:
        super().bind(target, eos_token_ids=eos_token_ids)
        self.seen: list[tuple[list[int], list[list[int]], list[int]]] = []
        self.shown = 0

    def observe(self, step: Step) -> None:
        before = {r.id: self._live[r.id].levels.copy() for r in step.requests}
        added: dict[int, Any] = {}
        for request in step.requests:
            pool = self._live[request.id].pool

            def watch(grams: Any, *, pool: Pool = pool, key: int = request.id) -> None:
                added[key] = [list(gram) for gram in grams]
                Pool.add(pool, added[key])

            pool.add = watch  # type: ignore[method-assign]
        super().observe(step)
        for request, emitted in zip(step.requests, step.emitted, strict=True):
            if request.id in added:
                text = request.tokens[: len(request.tokens) - len(emitted)]
                made = [gram[-1] for gram in added[request.id]]
                self.seen.append((text, before[request.id].tolist(), made))
                assert added[request.id][0][0] == text[-1]


@pytest.mark.parametrize(
    ("name", "runner"), [("llama", "cpu"), ("llama", "hooked"), ("gpt2", "auto"), ("gemma3", "auto"), ("bloom", "auto")]
)
def test_trajectories_are_what_the_model_makes_of_them(name: str, runner: str) -> None:
    """Behind prompts, accepted runs of any length and rests, in a ragged batch; each place alone says the same."""
    model = build(name)
    drafter = Watched(4, 4, 6, from_prompt=True)
    engine = Engine(model, drafter=drafter, shape=Fixed(9), slots=3, runner=runner)
    made = [engine.add(p, SamplingParams(max_new_tokens=14 + i)) for i, p in enumerate(prompts((5, 30, 9, 17)))]
    engine.run()
    assert drafter._live == {}
    assert len(drafter.seen) > 12
    checked = 0
    for text, levels, tokens in drafter.seen[::2]:
        for place, token in enumerate(tokens):
            path = [*levels[0][1 : place + 1], *(level[place] for level in levels[1:])]
            with torch.no_grad():
                logits = model(torch.tensor([[*text, *path]])).logits[0, -1]
            best = logits.topk(2).values
            assert token == int(logits.argmax()) or best[0] - best[1] < 1e-3
            checked += 1
    assert checked > 24
    assert sum(r.stats.accepted for r in made) > 0


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_decoders(name: str) -> None:
    ids = torch.tensor(prompts((13,)))
    expected = hf(build(name), ids)
    for shape in SHAPES.values():
        out = generate(build(name), ids, drafter=Jacobi(5, 3, 4), shape=shape(), max_new_tokens=NEW)
        same(out.sequences, expected)


def test_rows_are_attached_only_where_a_step_will_draft_from_them() -> None:
    drafter = Jacobi(4, 3, 2)
    runner = EagerRunner(inspect_model(build("llama")))
    request = RequestState(0, [5, 6, 7], 3, 10, place=Place(runner, runner.new_cache(1, 16), None, 0))
    drafter.begin(request)
    tree = TokenTree.from_paths(7, [[8, 9]])
    attachment = drafter.plan(StepPlan([request], [0], [True], tree))
    assert attachment is not None
    assert attachment.embeddings is not None
    assert attachment.embeddings.shape[:2] == (1, 4 * 2 - 1)
    assert drafter.rows(3, 2) == 3 + 2 * 7
    assert attachment.positions is not None
    assert attachment.positions.tolist() == [[1, 2, 3, 1, 2, 3, 4]]
    assert attachment.visible is not None
    assert not attachment.visible[..., 1:3].any()  # nothing of the tree but its root
    assert attachment.visible[0, 4, 3:].tolist() == [True, False, False, False, True, False, False]
    assert drafter.plan(StepPlan([request], [0], [False], tree)) is None
    drafter.end(request)
    drafter.end(request)


def drafted(drafter: Jacobi, text: list[int], budget: int = 20, room: int = 20, eos: tuple[int, ...] = ()) -> TokenTree:
    request = RequestState(0, text, len(text), room, eos_token_ids=eos)
    drafter.begin(request)
    tree = drafter.draft([request], [budget])
    drafter.end(request)
    return tree


def test_draft_tokens_are_the_pools() -> None:
    text = [1, 2, 3, 4, 1, 2, 5, 9, 1, 2, 3, 7, 1]
    tree = drafted(Jacobi(3, 4, 5, from_prompt=True), text)
    assert {tuple(path_of(tree, 0, n)[1:]) for n in range(1, tree.sizes[0])} == {
        *((2,), (2, 3), (2, 3, 4), (2, 3, 7)),
        *((2, 5), (2, 5, 9)),
    }
    newest = tree.logp[0, [n for n in range(1, tree.sizes[0]) if path_of(tree, 0, n)[1:] == [2, 3, 7]]]
    oldest = tree.logp[0, [n for n in range(1, tree.sizes[0]) if path_of(tree, 0, n)[1:] == [2, 5, 9]]]
    assert newest > oldest
    assert drafted(Jacobi(3, 4, 1, from_prompt=True), text).parents.tolist() == [[-1, 0, 1, 2]]
    assert drafted(Jacobi(3, 4, 5), text).sizes == (1,)  # nothing is known before the first pass
    assert drafted(Jacobi(3, 4, 5, from_prompt=True), text, budget=3).sizes == (4,)
    assert drafted(Jacobi(3, 4, 5, from_prompt=True), text, room=3).height == 2
    assert drafted(Jacobi(3, 4, 5, from_prompt=True), text, room=1).sizes == (1,)
    ending = Jacobi(3, 4, 5, from_prompt=True)
    tree = drafted(ending, text, eos=(3,))
    paths = [path_of(tree, 0, n) for n in range(1, tree.sizes[0])]
    assert [2, 3] in [path[1:] for path in paths]
    assert all(3 not in path[1:-1] for path in paths)


def test_a_shared_pool_outlives_its_requests() -> None:
    text = [1, 2, 3, 4, 1]
    alone, shared = Jacobi(3, 3, 2, from_prompt=True), Jacobi(3, 3, 2, from_prompt=True, shared=True)
    for drafter, known in ((alone, 1), (shared, 3)):
        drafted(drafter, text)
        assert drafted(drafter, [9, 9, 1]).sizes == (known,)


def test_pools_are_bounded() -> None:
    pool = Pool(2, keys=2)
    pool.add([(1, 5, 5), (1, 6, 6), (1, 5, 5), (1, 7, 7)])
    assert pool.behind(1) == [(7, 7), (5, 5)]  # the newest first, what was seen again counts as new
    pool.add([(2, 1, 1), (1, 7, 7), (3, 1, 1)])
    assert pool.behind(2) == []
    assert len(pool) == 3


def test_a_cache_salt_keeps_ngrams_out_of_the_shared_pool() -> None:
    """n-grams of a request with a cache salt stay in its own pool."""
    drafter = Jacobi(4, 4, 6, from_prompt=True, shared=True)
    engine = Engine(build("llama"), drafter=drafter, shape=Fixed(9))
    for cache_salt, known in (("tenant", False), (None, True)):
        engine.add([5, 9, 3, 17, 4, 11], SamplingParams(max_new_tokens=4, cache_salt=cache_salt))
        engine.run()
        assert drafter._shared is not None
        assert ((9, 3, 17) in drafter._shared.behind(5)) is known


# ---------------------------------------------------------------- early exits


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "t5"])
@torch.no_grad()
def test_an_early_exit_model_runs_the_first_layers(name: str) -> None:
    """Its logits are those of the whole model whose later layers add nothing; it shares the parameters."""
    model = build(name)
    small, target = early_exit_model(model, 2), inspect_model(model)
    ids = torch.tensor([[5, 9, 3, 0, 7, 11, 4]])
    given = {"input_ids": ids, "decoder_input_ids": ids} if target.encoder_decoder else {"input_ids": ids}
    hidden: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        hidden.append(output[0] if isinstance(output, tuple) else output)

    handle = target.layers[1].register_forward_hook(keep)
    model(**given)
    handle.remove()
    expected = HookedRunner(target).logits(hidden[0])
    torch.testing.assert_close(small(**given).logits, expected, rtol=0, atol=1e-5)
    own = dict(model.named_parameters())
    assert all(own[key] is parameter for key, parameter in small.named_parameters())


def test_self_speculation_drafts_and_changes_no_text() -> None:
    model = build("llama")
    ids = torch.tensor(prompts((13,)))
    out = generate(model, ids, drafter=SelfSpeculative(model, 2), shape=Fixed(8), max_new_tokens=NEW)
    same(out.sequences, hf(model, ids))
    assert out.stats.total.drafted > 0


def test_what_has_no_early_exit_is_refused() -> None:
    with pytest.raises(ValueError, match="give 1 to 3"):
        early_exit_model(build("llama"), 4)
    packed = construct(MEMBERS["llama"])
    pack_weights(packed)
    with pytest.raises(ValueError, match="take the early layers of the model as it was loaded"):
        early_exit_model(packed, 2)
