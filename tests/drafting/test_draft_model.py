"""DraftModel: what the small model reads and drafts, against a reading of whole texts; and what is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from few import crossed
from generate_driver import LENGTHS, NEW, SAMPLED, hf, left_pad, noisy, prompts, same
from tree_paths import children_of, path_of
from zoo import build

from draftree.drafting import DraftModel, RequestState
from draftree.engine import Engine, SamplingParams, generate
from draftree.runner.plan import Plan
from draftree.shaping import DynamicTree, Fixed
from draftree.tree import TokenTree

EVERY_FAMILY = ("llama", "gpt2", "gemma3", "mistral", "bloom")


class Watched(DraftModel):
    """Keeps what it drafted, and counts the rows that its small model reads."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.drafted: list[tuple[list[int], TokenTree]] = []
        self.passes = self.rows = 0
        run = self._small.runner.run

        def counting(plan: Plan, *arguments: Any) -> Any:
            self.passes += 1
            self.rows += plan.tokens.numel()
            return run(plan, *arguments)

        self._small.runner = copy.copy(self._small.runner)  # runners are shared by all who open the model
        self._small.runner.run = counting  # type: ignore[method-assign]

    def bind(self, target: Any, *, eos_token_ids: Sequence[int] = ()) -> None:
        small = self._small
        super().bind(target, eos_token_ids=eos_token_ids)
        self._small = small  # with its counter

    def draft(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        trees = super().draft(requests, budgets)
        for b, (request, size) in enumerate(zip(requests, trees.sizes, strict=True)):
            columns = (trees.tokens, trees.parents, trees.logp, trees.source)
            own = [column[b : b + 1, :size] for column in columns]
            self.drafted.append((list(request.tokens), TokenTree(*own, (size,))))
        return trees


@torch.no_grad()
def path_logp(model: Any, text: Sequence[int], path: Sequence[int]) -> float:
    """What the model alone says of `path` behind `text`."""
    logp = model(torch.tensor([[*text, *path]])).logits[0].float().log_softmax(-1)
    return sum(float(logp[len(text) - 1 + i, token]) for i, token in enumerate(path))


@pytest.mark.parametrize(("beam", "runner", "name"), crossed([1, 3], ["cpu", "hooked"], EVERY_FAMILY))
def test_draft_tokens_have_the_probabilities_of_the_small_model(name: str, runner: str, beam: int) -> None:
    """In a ragged batch, behind texts partly drafted and partly not, with requests that join and leave."""
    if runner == "cpu" and name not in ("llama", "mistral"):
        pytest.skip("the CPU runner does not drive it")
    drafter = Watched(noisy(name), depth=4, branching=3, beam=beam, confidence=0, runner=runner)
    engine = Engine(build(name), drafter=drafter, shape=Fixed(9), slots=3)
    made = [engine.add(p, SamplingParams(max_new_tokens=6 + 3 * i)) for i, p in enumerate(prompts((5, 40, 9, 30, 1)))]
    engine.run()
    assert drafter._small._slots == []
    assert sum(r.stats.accepted for r in made) > 5
    assert sum(r.stats.accepted < r.stats.drafted for r in made) == len(made)
    # A window sees a node's column as its position, and a distance likewise: draft tokens are a little off there.
    tolerance = {"gemma3": 1.0, "bloom": 1.0}.get(name, 2e-3)
    checked = 0
    for text, tree in drafter.drafted[::3]:
        for node in range(1, tree.sizes[0]):
            logp = path_logp(drafter.model, text, path_of(tree, 0, node)[1:])
            assert float(tree.logp[0, node]) == pytest.approx(logp, abs=tolerance)
            checked += 1
    assert checked > 30


@pytest.mark.parametrize("beam", [1, 2])
@pytest.mark.parametrize("branching", [1, 3])
def test_a_model_that_drafts_for_itself_is_always_right(branching: int, beam: int) -> None:
    """Every step emits as many tokens as the tree is deep and one, and every token is read once."""
    rows = prompts((19,))
    expected = hf(build("llama"), torch.tensor(rows))
    drafter = Watched(copy.deepcopy(build("llama")), depth=4, branching=branching, beam=beam, confidence=0)
    with pytest.warns(UserWarning, match="no smaller"):
        out = generate(build("llama"), torch.tensor(rows), drafter=drafter, shape=Fixed(64), max_new_tokens=NEW)
    same(out.sequences, expected)
    emitted = expected.shape[1] - 19
    total = out.stats.total
    assert total.steps == math.ceil(emitted / 5)
    if branching == 1:
        assert total.accepted == total.drafted
    assert drafter.passes <= 4 * total.steps
    if beam == 1 or branching == 1:
        # Prompt and answer, less the last node and the token behind it; what the last step read ahead is in vain.
        assert 19 + emitted - 2 <= drafter.rows <= 19 + emitted + 4


def test_what_was_accepted_is_not_read_again() -> None:
    """Rows of a text are its tokens and the nodes off its path, nothing else."""
    drafter = Watched(noisy("llama"), depth=4, branching=2, beam=2, confidence=0)
    ids = torch.tensor(prompts((25,)))
    out = generate(build("llama"), ids, drafter=drafter, shape=Fixed(8), max_new_tokens=40)
    total = out.stats.total
    assert total.accepted > 8
    read_ahead = 3 * 2 * total.steps  # three depths of at most two nodes
    kept = sum(1 for depth, hits in enumerate(total.accepted_by_depth, 1) for _ in range(hits) if depth < 4)
    assert drafter.rows <= 25 + total.emitted + read_ahead - kept


def drafted(
    drafter: DraftModel,
    text: list[int],
    budget: int = 64,
    room: int = 50,
    request: int = 0,
    eos: tuple[int, ...] = (),
) -> TokenTree:
    context = RequestState(request, text, len(text), room, eos_token_ids=eos)
    drafter.begin(context)
    tree = drafter.draft([context], [budget])
    drafter.end(context)
    assert tree.tokens[0, 0] == text[-1]
    return tree


def test_trees_keep_to_their_limits() -> None:
    text = prompts((12,))[0]
    for budget, room, depth, branching, beam in (
        (5, 50, 8, 4, 4),
        (64, 3, 8, 2, 4),
        (64, 50, 3, 5, 2),
        (7, 9, 7, 1, 9),
    ):
        drafter = DraftModel(noisy("llama"), depth=depth, branching=branching, beam=beam, confidence=0)
        tree = drafted(drafter, text, budget, room)
        assert 0 < tree.sizes[0] - 1 <= budget
        assert tree.height <= min(depth, room - 1)
        inner = [node for node in range(tree.sizes[0]) if children_of(tree, 0, node)]
        assert all(len(children_of(tree, 0, node)) <= branching for node in inner)
        by_depth = [sum(int(tree.depth[0, node]) == d for node in inner) for d in range(1, depth)]
        assert max(by_depth, default=0) <= beam
        assert (tree.logp[0, 1:].diff() <= 0).all()  # likeliest first, so that cutting to size is cheap
        assert drafted(drafter, text, 0, room).sizes == (1,)
        assert drafted(drafter, text, budget, 1).sizes == (1,)
    chain = drafted(DraftModel(noisy("llama"), depth=6, branching=1, confidence=0), text)
    assert chain.parents[0].tolist() == [-1, 0, 1, 2, 3, 4, 5]


def test_the_best_nodes_of_the_beam_are_the_tree() -> None:
    """With a beam as wide as the tree, no path outside is likelier than one inside."""
    model, text = noisy("llama"), prompts((12,))[0]
    tree = drafted(DraftModel(model, depth=3, branching=97, beam=97, confidence=0), text, budget=20)
    worst = float(tree.logp[0, 1 : tree.sizes[0]].min())
    inside = {tuple(path_of(tree, 0, node)[1:]) for node in range(1, tree.sizes[0])}
    with torch.no_grad():
        for path in [(), *inside]:
            if len(path) == 3:
                continue
            logp = model(torch.tensor([[*text, *path]])).logits[0, -1].log_softmax(-1) + path_logp(model, text, path)
            for token in (logp > worst + 1e-4).nonzero()[:, 0].tolist():
                assert (*path, token) in inside


def test_confidence_stops_the_growth() -> None:
    text = prompts((12,))[0]
    model = noisy("llama")
    never = drafted(DraftModel(model, branching=1, confidence=0), text)
    assert never.height == 8
    assert never.logp[0, -1] < math.log(0.2)
    doubtful = drafted(DraftModel(model, beam=4, confidence=0.2), text)
    assert 1 < doubtful.height < 8
    inner = {int(p) for p in doubtful.parents[0] if p > 0}
    by_depth = [sum(math.exp(doubtful.logp[0, n]) for n in inner if doubtful.depth[0, n] == d) for d in (1, 2)]
    assert all(mass == 0 or mass > 0.2 for mass in by_depth)
    assert drafted(DraftModel(model, confidence=1), text).height == 1


def test_nothing_is_drafted_behind_an_eos() -> None:
    model, text = noisy("llama"), prompts((12,))[0]
    likely = int(drafted(DraftModel(model, confidence=0), text).tokens[0, 1])
    tree = drafted(DraftModel(model, confidence=0), text, eos=(likely,))
    ends = [node for node in range(1, tree.sizes[0]) if tree.tokens[0, node] == likely]
    assert ends
    assert not any(children_of(tree, 0, node) for node in ends)


# ------------------------------------------------------------------------------- requests come and go


def test_requests_in_any_order_and_number() -> None:
    """What is drafted for a request does not depend on who is drafted for beside it, or in which order."""
    rows = prompts((12, 30, 5, 18))
    alone = [drafted(DraftModel(noisy("llama"), confidence=0), row, 8) for row in rows]
    drafter = DraftModel(noisy("llama"), confidence=0)
    contexts = [RequestState(i, list(row), len(row), 50) for i, row in enumerate(rows)]
    for context in contexts:
        drafter.begin(context)
    drafter._small._arrange = None  # type: ignore[assignment,method-assign]  # which makes the whole cache anew
    for order in ([0, 1, 2, 3], [3, 1], [2], [1, 3, 0, 2]):
        trees = drafter.draft([contexts[i] for i in order], [8] * len(order))
        for b, i in enumerate(order):
            size = trees.sizes[b]
            assert trees.tokens[b, :size].tolist() == alone[i].tokens[0].tolist()
            torch.testing.assert_close(trees.logp[b, :size], alone[i].logp[0], rtol=0, atol=1e-4)
    drafter.end(contexts[1])
    trees = drafter.draft([contexts[2], contexts[0]], [8, 0])  # the second asks for nothing
    assert trees.sizes == (alone[2].sizes[0], 1)
    for context in (contexts[2], contexts[0], contexts[3], contexts[3]):
        drafter.end(context)
    assert drafter._small._slots == []


def test_two_engines_and_a_long_rest() -> None:
    """One drafter serves two engines in turns; a request that was not drafted for catches up."""
    drafter = DraftModel(noisy("llama"), depth=3, confidence=0)
    rows = prompts()
    expected = [hf(build("llama"), torch.tensor([row]), max_new_tokens=40)[0, len(row) :].tolist() for row in rows]
    first, second = (Engine(build("llama"), drafter=drafter, shape=s, slots=2) for s in (Fixed(6), DynamicTree()))
    made = [
        (first, second)[i % 2].add(row, SamplingParams(max_new_tokens=40, eos_token_ids=(2,)))
        for i, row in enumerate(rows)
    ]
    while first.busy or second.busy:
        for engine in (first, second):
            engine.step()
    assert [r.tokens for r in made] == expected


def test_prompts_longer_than_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = prompts((70, 3, 40))
    whole = [drafted(DraftModel(noisy("llama"), confidence=0), row, 8) for row in rows]
    monkeypatch.setattr("draftree.drafting.small_model.CHUNK", 16)
    drafter = DraftModel(noisy("llama"), confidence=0)
    again = [drafted(drafter, row, 8, request=i) for i, row in enumerate(rows)]
    contexts = [RequestState(9 + i, row, len(row), 50) for i, row in enumerate(rows)]
    for context in contexts:
        drafter.begin(context)
    together = drafter.draft(contexts, [8, 8, 8])
    for b, (one, two) in enumerate(zip(whole, again, strict=True)):
        assert one.tokens.tolist() == two.tokens.tolist() == together.tokens[b : b + 1, : one.width].tolist()


def test_texts_beyond_the_small_models_context() -> None:
    """It falls silent; the large model goes on."""
    small = copy.deepcopy(build("gpt2"))
    small.config.n_positions = 24
    ids, mask = left_pad(prompts())
    expected = hf(build("gpt2"), ids, mask)
    out = generate(
        build("gpt2"), ids, mask, drafter=DraftModel(small, confidence=0), shape=Fixed(8), max_new_tokens=NEW
    )
    same(out.sequences, expected)
    assert out.stats.requests[0].drafted < out.stats.requests[1].drafted


def test_weights_that_change_between_calls() -> None:
    small = copy.deepcopy(noisy("llama"))
    drafter = DraftModel(small, confidence=0)
    ids = torch.tensor(prompts(LENGTHS[:1]))
    expected = hf(build("llama"), ids)
    before = generate(build("llama"), ids, drafter=drafter, shape=Fixed(8), max_new_tokens=NEW).stats.total.accepted
    with torch.no_grad():
        for weight in small.parameters():
            weight.normal_()
    out = generate(build("llama"), ids, drafter=drafter, shape=Fixed(8), max_new_tokens=NEW)
    same(out.sequences, expected)
    assert out.stats.total.accepted < before


def test_strict_mode_in_16_bits() -> None:
    model = copy.deepcopy(build("llama")).bfloat16()
    small = copy.deepcopy(noisy("llama")).bfloat16()
    ids = torch.tensor(prompts(LENGTHS[:1]))
    for options in ({}, SAMPLED | {"seed": 3}):
        plain = generate(model, ids, max_new_tokens=NEW, strict=True, **options)
        out = generate(
            model, ids, drafter=DraftModel(small), shape=Fixed(8), max_new_tokens=NEW, strict=True, **options
        )
        same(out.sequences, plain.sequences)
        assert out.stats.total.accepted > 0


# ------------------------------------------------------------------------------- bad input


def test_pairs_that_do_not_fit(demo: Any) -> None:
    drafter = DraftModel(noisy("llama"))
    with pytest.raises(ValueError, match=r"vocabulary of 97 .* of 4096: choose"):
        Engine(demo.model, drafter=drafter)
    with pytest.raises(ValueError, match=r"encoder-decoder .* and the small one is not"):
        Engine(build("t5"), drafter=drafter)
    with pytest.raises(ValueError, match=r"encoder-decoder .* give a causal language model"):
        Engine(build("llama"), drafter=DraftModel(build("t5")))
    with pytest.raises(TypeError):
        DraftModel("a-name")
    with pytest.warns(UserWarning, match="no smaller than the large one"):
        Engine(build("llama"), drafter=drafter)


@pytest.mark.parametrize(
    "options", [{"depth": 0}, {"branching": 0}, {"beam": -1}, {"confidence": 1.5}, {"runner": "fast"}]
)
def test_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        DraftModel(noisy("llama"), **options)


def test_other_tokenizers_are_refused(demo: Any, tmp_path: Any) -> None:
    noisy("llama").save_pretrained(tmp_path)
    assert isinstance(DraftModel.from_pretrained(tmp_path, demo.tokenizer, depth=3), DraftModel)  # it has none
    demo.tokenizer.save_pretrained(tmp_path)
    assert DraftModel.from_pretrained(tmp_path, demo.tokenizer, depth=3).depth == 3
    other = copy.deepcopy(demo.tokenizer)
    other.add_tokens(["<other>"])
    with pytest.raises(ValueError, match="another tokenizer"):
        DraftModel.from_pretrained(tmp_path, other)
