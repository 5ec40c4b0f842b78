"""The one law for drafters inside the model, with random weights: every method, family, tree, batch and runner."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from few import crossed, shared
from generate_driver import LENGTHS, NEW, SAMPLED, SHAPES, hf, left_pad, prompts, same
from in_model_driver import MAKERS, make
from torch import Tensor
from zoo import CAUSAL, ENCODER_DECODER, MORE_TOKENS, build

from draftree.drafting import BiTA, HiddenTransfer, Lookahead, Medusa, RequestState
from draftree.drafting.base import StepPlan
from draftree.engine import Engine, SamplingParams, generate
from draftree.engine import engine as engine_module
from draftree.runner import EagerRunner, inspect_model
from draftree.runner.step_cost import StepCost
from draftree.shaping import DynamicTree, Fixed
from draftree.shaping.base import Outcome, Sizer
from draftree.shaping.sizer import DynamicSizer, Kind
from draftree.tree import TokenTree

DEFAULT = ("llama", "gpt2", "gemma3", "bart")
NAMES = [m.id for m in CAUSAL + ENCODER_DECODER]
ODD, EVEN = shared(NAMES, DEFAULT)
KINDS = [*MAKERS]
SEED = 11
STEEP = StepCost((1, 2, 64), (1.0, 2.0, 64.0))  # a row costs what a token brings: nothing can pay


def runners(name: str) -> list[str]:
    return ["cpu", "hooked"] if EagerRunner.qualifies(inspect_model(build(name))) else ["hooked"]


def batch(name: str) -> tuple[Tensor, Tensor]:
    """Ragged prompts, padded where the family wants its padding."""
    ids, mask = left_pad(prompts())
    return (ids.flip(1), mask.flip(1)) if build(name).config.is_encoder_decoder else (ids, mask)


def check(
    name: str,
    ids: Tensor,
    mask: Tensor | None,
    expected: Tensor,
    *,
    kinds: Sequence[str] = KINDS,
    on_both: Sequence[str] = KINDS,
    **options: object,
) -> int:
    """Drafters `kinds` on the first runner and those `on_both` on every one, shapes in turn; returns how many draft
    tokens were accepted.
    """
    accepted = 0
    shapes = list(SHAPES)
    for kind in kinds:
        number = KINDS.index(kind)
        for runner in runners(name)[: None if kind in on_both else 1]:
            shape = shapes[number % 2]
            out = generate(
                build(name),
                ids,
                mask,
                drafter=make(kind, build(name)),
                shape=SHAPES[shape](),
                runner=runner,
                max_new_tokens=NEW,
                **options,
            )
            same(out.sequences, expected, f"{name} on {runner} with {kind}, {shape}")
            accepted += out.stats.total.accepted
    return accepted


@pytest.mark.parametrize("name", EVEN)
def test_greedy_in_a_ragged_batch(name: str) -> None:
    ids, mask = batch(name)
    options = {"no_repeat_ngram_size": 3} if build(name).config.is_encoder_decoder else {}
    expected = hf(build(name), ids, mask, **options)
    assert check(name, ids, mask, expected, **options) > 0


@pytest.mark.parametrize("name", ODD)
def test_sampled_in_a_ragged_batch(name: str) -> None:
    """Every other drafter on the slower of two runners; of llama and gemma3 it is not the same ones."""
    ids, mask = batch(name)
    expected = generate(build(name), ids, mask, max_new_tokens=NEW, seed=SEED, **SAMPLED).sequences
    on_both = KINDS[NAMES.index(name) % 2 :: 2]
    assert check(name, ids, mask, expected, on_both=on_both, seed=SEED, **SAMPLED) > 0


@pytest.mark.parametrize("name", [member.id for member in MORE_TOKENS])
def test_more_tokens_than_positions(name: str) -> None:
    ids = torch.tensor(prompts(LENGTHS[:1]))
    expected = hf(build(name), ids)
    check(name, ids, None, expected, kinds=["medusa", "bita", "hidden-transfer"], on_both=[])


@pytest.mark.parametrize(("name", "sampled"), crossed(["llama", "gpt2", "t5"], [False, True]))
def test_alone(name: str, sampled: bool) -> None:
    ids = torch.tensor(prompts(LENGTHS[:1]))
    options = SAMPLED | {"seed": SEED} if sampled else {}
    check(name, ids, None, hf(build(name), ids, **options), **options)


def test_eos_inside_drafts_and_token_0() -> None:
    """The answer ends at a token that drafts hold in their midst; 0 is said, drafted and prompted like any other.

    Each token with a third of the drafters.
    """
    rows = [[0, 0, *prompts((9,))[0], 0, 5, 0], [0, *prompts((4,), seed=7)[0], 0]]
    ids, mask = left_pad(rows)
    plain = hf(build("llama"), ids, mask)
    answer = plain[0, ids.shape[1] :].tolist()
    for turn, eos in enumerate((answer[9], answer[12], 0)):
        expected = hf(build("llama"), ids, mask, eos_token_id=eos)
        check("llama", ids, mask, expected, kinds=KINDS[turn::3], eos_token_id=eos)


def test_up_to_the_last_position_of_the_context() -> None:
    """Masks and pseudo states stand beyond the context's end; what is emitted does not."""
    ids = torch.tensor(prompts((240,), seed=8))
    expected = hf(build("gpt2"), ids, max_new_tokens=16)
    for kind in MAKERS:
        out = generate(build("gpt2"), ids, drafter=make(kind, build("gpt2")), shape=Fixed(16), max_new_tokens=16)
        same(out.sequences, expected, kind)


@pytest.mark.parametrize("kind", MAKERS)
def test_prompts_in_pieces_change_no_draft_token(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = left_pad(prompts())
    counts = []
    for chunk in (engine_module.PREFILL_CHUNK, 5):
        monkeypatch.setattr(engine_module, "PREFILL_CHUNK", chunk)
        drafter = make(kind, build("llama"))
        out = generate(build("llama"), ids, mask, drafter=drafter, shape=Fixed(16), max_new_tokens=NEW)
        counts.append((out.stats.total.steps, out.stats.total.accepted, out.sequences.tolist()))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("kind", MAKERS)
def test_requests_come_and_go(kind: str) -> None:
    """Two slots, three requests: one joins in another's place, and nothing of anyone stays behind."""
    model = build("llama")
    rows = prompts()
    expected = [hf(model, torch.tensor([row]), max_new_tokens=NEW - 5 * b)[0, len(row) :] for b, row in enumerate(rows)]
    drafter = make(kind, model)
    engine = Engine(model, drafter=drafter, slots=2, shape=Fixed(12))
    requests = [engine.add(row, SamplingParams(NEW - 5 * b, (2,))) for b, row in enumerate(rows)]
    engine.run()
    assert [r.tokens for r in requests] == [w.tolist() for w in expected]
    assert not drafter._held


@pytest.mark.parametrize("kind", MAKERS)
def test_strict_mode(kind: str) -> None:
    """Passes without the drafter's rows give no draft tokens, and the next ones start again."""
    ids, mask = left_pad(prompts())
    model = build("llama")
    expected = hf(model, ids, mask)
    out = generate(model, ids, mask, drafter=make(kind, model), shape=Fixed(16), max_new_tokens=NEW, strict=True)
    same(out.sequences, expected, kind)
    assert out.stats.total.drafted > 0


@pytest.mark.parametrize("kind", ["bita", "hidden-transfer", "bita-masks-only-groups"])
def test_a_drafter_that_does_not_pay_rests_without_rows(kind: str) -> None:
    """Its draft tokens are poor and rows are dear: most passes are plain rows, and now and then it drafts again."""
    cost = StepCost((1, 2, 64), (1.0, 1.2, 13.6))
    model = build("llama")
    ids = torch.tensor(prompts((9,)))
    drafter = make(kind, model)
    attached: list[bool] = []
    plan = drafter.plan

    def watched(step):  # type: ignore[no-untyped-def]
        found = plan(step)
        attached.append(found is not None)
        return found

    drafter.plan = watched  # type: ignore[method-assign]
    options = {"max_new_tokens": 90, "eos_token_id": None}
    shape, expected = DynamicTree(cost=cost), generate(model, ids, **options).sequences
    for _ in range(3):
        assert torch.equal(generate(model, ids, drafter=drafter, shape=shape, **options).sequences, expected)
    assert attached[:2] == [True] * 2
    assert 1 <= sum(attached[30:]) <= len(attached[30:]) // 4


def test_a_drafter_that_pays_does_not_rest() -> None:
    """Draft tokens are always accepted: rows are attached to every pass but the last, trees have the size that pays."""
    model = build("llama")
    ids = torch.tensor(prompts((9,)))
    drafter = make("bita", model)
    cost = StepCost((1, 8, 64), (1.0, 1.1, 3.0))
    shape = DynamicTree(cost=cost)
    truth = generate(model, ids, max_new_tokens=90, eos_token_id=None).sequences[0].tolist()
    draft_logits = drafter.draft_logits

    def right(step, paths):  # type: ignore[no-untyped-def]
        logits = draft_logits(step, paths)
        if logits is None:  # the last pass prepares nothing
            return None
        logits = logits.new_full((1, drafter.depth, logits.shape[-1]), -10)
        at = len(step.requests[0].tokens)
        for d, token in enumerate(truth[at : at + 3]):
            logits[0, d, token] = 5
        return logits

    drafter.draft_logits = right  # type: ignore[method-assign]
    out = generate(model, ids, drafter=drafter, shape=shape, max_new_tokens=90, eos_token_id=None)
    assert out.sequences[0].tolist() == truth
    assert out.stats.total.steps < 30
    # The rows that it attaches come on top: a tree that is worth its rows to a trie is too large for it.
    steps = [[0.9, 0.9, 0.9], [0.07], [0.07]]
    tree = TokenTree.from_paths(5, [[6, 7, 8], [9], [10]], [[math.log(p) for p in path] for path in steps])
    sizes = []
    for one in (drafter, Lookahead()):
        sizer, request = DynamicTree(cost=cost).bind(cost, one), RequestState(1, [4, 5], 2, 99)
        if one is drafter:
            stepped(sizer, request, tree)  # it has nothing prepared before the first step
        plan = stepped(sizer, request, tree)
        assert plan.trees is not None
        sizes.append(plan.trees.width)
    assert sizes[0] < sizes[1] == 6


def stepped(sizer: Sizer, request: RequestState, tree: TokenTree, accepted: int = 0, price: float = 1.0) -> StepPlan:
    """One step for which `tree` is drafted, of which `accepted` tokens are; one with rows attached costs `price`."""
    plan = sizer.plan([request], 8)
    plan = sizer.trim(plan, tree if plan.budgets[0] else TokenTree.roots(torch.tensor([5])))
    assert plan.trees is not None
    path = list(range(min(1 + accepted, plan.trees.width)))
    outcome = Outcome([path], plan.trees.width, price if plan.prepares_any else 1.0, 0.0, plan.prepares_any)
    sizer.observe(plan, outcome)
    return plan


@pytest.mark.parametrize(("price", "prepared"), [(1.1, (40, 60)), (4.0, (1, 30))])
def test_what_its_steps_take_is_found_out(price: float, prepared: tuple[int, int]) -> None:
    """Where passes with its rows turn out dear it pauses, cheap ones it goes on with; plain steps' curve stays."""
    drafter = make("bita", build("llama"))
    cost = StepCost((1, 8, 64), (1.0, 1.1, 2.0))
    sizer, request = DynamicTree().bind(cost, drafter), RequestState(1, [4, 5], 2, 99)
    assert isinstance(sizer, DynamicSizer)
    tree = TokenTree.from_paths(5, [[6]], [[-0.1]])
    plans = [stepped(sizer, request, tree, accepted=1, price=price) for _ in range(60)]
    least, most = prepared
    assert least <= sum(plan.prepares_any for plan in plans[20:]) + 20 * (price < 2) <= most
    assert sizer._times.plain(1) == pytest.approx(1.0, rel=0.02)  # steps of two rows are met too, a little below it
    assert sizer._times.curve(1, Kind.ATTACHED).of(5) == pytest.approx(price, rel=0.1)
    assert cost.seconds.tolist() == [1.0, 1.1, 2.0]


@pytest.mark.parametrize("kind", ["bita", "hidden-transfer"])
@pytest.mark.parametrize(("slope", "nodes"), [(0.0, 6), (1.0, 1)])
def test_all_nodes_have_rows_where_rows_are_free_and_else_the_root(kind: str, slope: float, nodes: int) -> None:
    drafter = make(kind, build("llama"))
    drafter.bind(inspect_model(build("llama")))
    tree = TokenTree.from_paths(5, [[6, 7, 8], [9], [10]], [[-0.1, -0.7, -1.0], [-3.0], [-4.0]])
    cost = StepCost((1, 64), (1.0, 1.0 + 63 * slope))
    sizer, request = DynamicTree(cost=cost).bind(cost, drafter), RequestState(1, [4, 5], 2, 99)
    stepped(sizer, request, tree)
    plan = stepped(sizer, request, tree)
    assert plan.trees is not None
    assert plan.attach_to == nodes
    attached = drafter.attach(plan.trees, plan.attach_to, torch.float32)
    if attached.embeddings is not None:
        assert attached.embeddings.shape[1] == nodes * drafter.depth
    else:
        positions = attached.surgeries[0].positions
        assert positions is not None
        together = sum(layer == drafter.transfer_layers[0] for layer in drafter.transfer_layers)
        assert positions.shape[1] == nodes * together


@pytest.mark.parametrize("cls", [Medusa, BiTA, HiddenTransfer])
def test_another_model_is_refused(cls: type[BiTA]) -> None:
    drafter = cls.fresh(build("llama"))
    for name, what in (("gpt_neox", "kv_heads"), ("falcon", "kv_heads")):
        with pytest.raises(ValueError, match=what):
            Engine(build(name), drafter=drafter)
    with pytest.raises(ValueError, match="hidden_size"):
        cls({})


def test_settings_make_the_same_drafter_again() -> None:
    model = build("llama")
    for kind, maker in MAKERS.items():
        drafter = maker(model)
        again = type(drafter).fresh(model, **drafter.settings)
        assert (again.choices, again.depth, again.candidates) == (drafter.choices, drafter.depth, drafter.candidates)
        assert again.settings == drafter.settings, kind
        assert {k: v.shape for k, v in again.weights.state_dict().items()} == {
            k: v.shape for k, v in drafter.weights.state_dict().items()
        }
