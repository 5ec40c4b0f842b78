"""The zoo: every family on every runner that drives it, each check against the stock model.

One test a family and check. `pytest -k zoo -rA` ends with a table of the largest differences.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from few import few
from runner_driver import BUSHY, Run, Tree, difference, one_thread, prune, runners_for, stock_logits  # noqa: F401
from torch import Tensor
from transformers import DynamicCache

from draftree.runner.base import Runner
from draftree.runner.eager.parts import FAMILIES
from draftree.runner.hooked.families import TESTED_FAMILIES, Family, ViewsFinalRows
from draftree.runner.plan import Surgery
from draftree.runner.target import inspect_model

TOLERANCE = 1e-4
KEPT = [0, 1, 2, 4, 7, 10]  # of the bushy tree; every kept node's parent is kept
BRANCH = [0, 1, 4, 7, 10]

Check = Callable[[Runner, Any], float]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Enter a check in the matrix; it returns its largest difference from stock."""
    CHECKS[function.__name__] = function
    return function


# ---------------------------------------------------------------- the checks


@check
def tree(runner: Runner, model: Any) -> float:
    """Logits of a tree behind a context longer than any window, and of a chain behind it."""
    run, bushy = Run(runner).prefill(), Tree(BUSHY, 2)
    prompt = difference(run.last[None], stock_logits(model, run.texts, run.sources[0]))
    result = run.step([bushy])
    assert result.rows is None
    return max(prompt, run.error([bushy], result))


@check
def chunks(runner: Runner, model: Any) -> float:
    """A prompt prefilled in two pieces, the second longer than the window, says the same."""
    run, bushy = Run(runner, [23]).prefill([9, 14]), Tree(BUSHY, 3)
    prompt = difference(run.last[None], stock_logits(model, run.texts, run.sources[0]))
    return max(prompt, run.error([bushy], run.step([bushy])))


@check
def pruned(runner: Runner, model: Any) -> float:
    """Rows dropped after two layers leave the others' logits; layers then commit by maps of their own."""
    run, bushy, after = Run(runner).prefill(), Tree(BUSHY, 2), Tree((-1, 0, 0, 1), 5)
    result = run.step([bushy], surgeries=prune(2, torch.tensor([KEPT])))
    assert result.rows is not None
    assert result.rows.tolist() == [KEPT]
    here = difference(result.logits[0], run.stock(0, bushy)[KEPT])
    run.commit([bushy], [BRANCH], result)
    return max(here, run.error([after], run.step([after])))


@check
def pruned_by_states(runner: Runner, model: Any) -> float:
    """As `pruned`, twice in one pass and by functions of the hidden states."""
    run, bushy, after = Run(runner).prefill(), Tree(BUSHY, 2), Tree((-1, 0, 0, 1), 5)
    shapes = []

    def keep(rows: list[int]) -> Callable[[Tensor], Tensor]:
        def chosen(hidden: Tensor) -> Tensor:
            shapes.append(tuple(hidden.shape))
            return torch.tensor([rows])

        return chosen

    surgeries = (Surgery(1, keep=keep(KEPT)), Surgery(3, keep=keep([0, 1, 3, 4, 5])))
    result = run.step([bushy], surgeries=surgeries)
    width = runner.target.hidden_size
    assert shapes == [(1, len(BUSHY), width), (1, len(KEPT), width)]
    assert result.rows is not None
    assert result.rows.tolist() == [BRANCH]
    here = difference(result.logits[0], run.stock(0, bushy)[BRANCH])
    run.commit([bushy], [BRANCH], result)
    return max(here, run.error([after], run.step([after])))


@check
def pruned_batch(runner: Runner, model: Any) -> float:
    """Three requests keep different rows of different trees, padded with -1."""
    trees = [Tree(BUSHY, 2), Tree.random(9, 3), Tree.random(6, 4)]
    run = Run(runner, [12, 21, 17], first=1).prefill()
    kept = [trees[0].branches[9] + [2, 6], trees[1].branches[8], trees[2].branches[5]]
    kept = [sorted(k) for k in kept]
    width = max(len(k) for k in kept)
    keep = torch.tensor([k + [-1] * (width - len(k)) for k in kept])
    result = run.step(trees, surgeries=prune(2, keep))
    assert result.rows is not None
    assert result.rows.tolist() == keep.tolist()
    worst = max(difference(result.logits[b, : len(rows)], run.stock(b, trees[b])[rows]) for b, rows in enumerate(kept))
    run.commit(trees, [trees[0].branches[9], trees[1].branches[8], trees[2].branches[5]], result)
    after = [Tree.random(5, 7), Tree.random(7, 8), Tree.random(3, 9)]
    return max(worst, run.error(after, run.step(after)))


def _stand_ins(hidden: Tensor, nodes: list[int], steps: list[int]) -> Tensor:
    """Rows that stand for the tokens `steps` behind `nodes`: any fixed function of their states will do."""
    return torch.cat([hidden[:, [n]].roll(s, -1) * (1 + 0.25 * s) for n, s in zip(nodes, steps, strict=True)], 1)


@check
def appended(runner: Runner, model: Any) -> float:
    """Rows that join after two layers: node 12's next and next but one, node 3's next."""
    run, bushy = Run(runner).prefill(), Tree(BUSHY, 2)
    nodes, steps, size = [12, 12, 3], [1, 2, 1], bushy.size
    visible = torch.zeros(1, 3, size + 3, dtype=torch.bool)
    for i, node in enumerate(nodes):
        visible[0, i, bushy.branches[node]] = True
        visible[0, i, size + i] = True
    visible[0, 1, size] = True  # the second sees the first
    positions = torch.tensor([[21 + bushy.depths[n] + s for n, s in zip(nodes, steps, strict=True)]])
    grow = Surgery(2, None, lambda hidden: _stand_ins(hidden, nodes, steps), positions, visible)
    result = run.step([bushy], surgeries=(grow,))
    assert result.rows is None
    assert result.logits.shape[1] == size + 3
    worst = difference(result.logits[0, :size], run.stock(0, bushy))
    for i, (node, step) in enumerate(zip(nodes, steps, strict=True)):
        text = torch.cat([run.texts[0], bushy.tokens[bushy.branches[node]]])
        end = len(text) - 1

        def replace(hidden: Tensor, end: int = end, step: int = step) -> Tensor:
            extra = _stand_ins(hidden, [end] * step, list(range(1, step + 1)))
            return torch.cat([hidden[:, : end + 1], extra], 1)

        stock = stock_logits(model, [torch.cat([text, text[:step]])], run.sources[0], replace=replace)
        worst = max(worst, difference(result.logits[0, [size + i]], stock))
    run.commit([bushy], [BRANCH], result)
    after = Tree((-1, 0, 0, 1), 5)
    return max(worst, run.error([after], run.step([after])))


@check
def ragged_batch(runner: Runner, model: Any) -> float:
    """Three requests of different lengths, three steps, other trees in each step; one has a single row."""
    run, worst = Run(runner, [9, 21, 14], capacity=1).prefill(together=True), 0.0
    for step, sizes in enumerate([(8, 8, 5), (6, 1, 9), (7, 4, 7)]):
        trees = [Tree.random(size, 10 * step + b) for b, size in enumerate(sizes)]
        result = run.step(trees)
        worst = max(worst, run.error(trees, result))
        rows = [max(t.branches, key=len)[: 2 + b] for b, t in enumerate(trees)]
        run.commit(trees, rows, result)
    return worst


@check
def deep_prefix(runner: Runner, model: Any) -> float:
    """Chosen rows see keys and values that no other row sees, whatever their siblings are."""
    probe = Run(runner).prefill()
    shapes = [(k.shape[1], k.shape[3], v.shape[3]) for k, v in zip(probe.cache.keys, probe.cache.values, strict=True)]
    generator = torch.Generator().manual_seed(9)
    prefix = [
        (torch.randn(h, 3, dk, generator=generator), torch.randn(h, 3, dv, generator=generator)) for h, dk, dv in shapes
    ]
    run, bushy = Run(runner, prefix=prefix).prefill(), Tree(BUSHY, 2)
    on = torch.zeros(1, bushy.size, dtype=torch.bool)
    on[0, [3, 12]] = True  # two leaves, so that no row inherits what they saw
    result = run.step([bushy], prefix_rows=on)
    stock = run.stock(0, bushy)
    blind = (~on[0]).nonzero()[:, 0]
    worst = difference(result.logits[0, blind], stock[blind])
    for leaf in (3, 12):
        assert difference(result.logits[0, leaf], stock[leaf]) > 0.01
        alone = Tree([-1, *range(len(bushy.branches[leaf]) - 1)], 0)
        alone.tokens = bushy.tokens[bushy.branches[leaf]]
        seeing = torch.zeros(1, alone.size, dtype=torch.bool)
        seeing[0, -1] = True
        chain = run.step([alone], prefix_rows=seeing)
        worst = max(worst, difference(result.logits[0, leaf], chain.logits[0, -1]))
        if _prefix_reference(runner):
            text = torch.cat([run.texts[0], alone.tokens])
            worst = max(worst, difference(result.logits[0, leaf], _stock_with_prefix(model, text, prefix)))
    return worst


def _prefix_reference(runner: Runner) -> bool:
    """Return whether stock can be given a prefix: full attention, no positions or bias by KV position."""
    hooked = getattr(runner, "_stock", None)  # None for runners of a single shape
    plain = hooked is None or type(hooked.family) in (Family, ViewsFinalRows)
    full = all(kind.window is None and kind.chunk is None for kind in runner.target.kinds)
    return plain and full


@torch.no_grad()
def _stock_with_prefix(model: Any, text: Tensor, prefix: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Logits [V] of the text's last row, which alone sees `prefix` in front of the text's keys and values."""
    plain, joined = DynamicCache(), DynamicCache()
    model(input_ids=text[None, :-1], past_key_values=plain, use_cache=True)
    for i, (keys, values) in enumerate(prefix):
        held = plain.layers[i]
        joined.update(torch.cat([keys[None], held.keys], 2), torch.cat([values[None], held.values], 2), i)
    position = torch.tensor([[len(text) - 1]])
    logits: Tensor = model(
        input_ids=text[None, -1:], past_key_values=joined, position_ids=position, use_cache=True
    ).logits
    return logits[0, -1]


@check
def embeddings(runner: Runner, model: Any) -> float:
    """Rows that enter by their embedding equal rows that enter by their token."""
    run, bushy = Run(runner).prefill(), Tree(BUSHY, 2)
    plan = run.plan([bushy])
    decoder = runner.target.decoder
    table = decoder.get_input_embeddings() or model.get_input_embeddings()
    with torch.no_grad():
        plan.embeddings = table(plan.tokens[:, -4:])
    plan.tokens = plan.tokens.clone()
    plan.tokens[:, -4:] = 5  # must not be looked at
    return run.error([bushy], runner.run(plan, run.cache, 0, run.encoder))


@check
def taps(runner: Runner, model: Any) -> float:
    """Tapped states are those that the stock model reports, also of rows that leave later."""
    run = Run(runner).prefill()
    chain = Tree((-1, 0, 1, 2), 4)
    layers = len(runner.target.layers)
    model = copy.deepcopy(model)  # asked for hidden states, a stock model keeps hooks of its own
    with torch.no_grad():
        text = torch.cat([run.texts[0], chain.tokens])[None]
        last = []
        inspect_model(model).layers[-1].register_forward_hook(
            lambda module, args, output: last.append(output[0] if isinstance(output, tuple) else output)
        )
        arguments = {"input_ids": text}
        if run.sources[0] is not None:
            arguments = {"input_ids": run.sources[0][None], "decoder_input_ids": text}
        out = model(**arguments, output_hidden_states=True, use_cache=False)
    stock = out.decoder_hidden_states if run.sources[0] is not None else out.hidden_states
    expected = [*stock[:layers], last[0]]
    result = run.step([chain], taps=tuple(range(layers + 1)))
    large = [max(1.0, float(states.abs().max())) for states in expected]  # Falcon H1's reach a thousand.
    worst = max(difference(result.hidden[i][0], expected[i][0, -4:]) / large[i] for i in range(layers + 1))
    cut = run.step([chain], taps=(1, 2, layers), surgeries=prune(2, torch.tensor([[0, 1]])))
    worst = max(worst, difference(cut.hidden[1][0], expected[1][0, -4:]) / large[1])
    worst = max(worst, difference(cut.hidden[2][0], expected[2][0, -4:-2]) / large[2])
    return max(worst, difference(cut.hidden[layers][0], expected[layers][0, -4:-2]) / large[layers])


@check
def control(runner: Runner, model: Any) -> float:
    """The comparison notices wrong trees: a causal mask, KV positions for positions, a window one too long."""
    run, bushy = Run(runner).prefill(), Tree(BUSHY, 2)
    stock = run.stock(0, bushy)
    causal, counted = run.plan([bushy]), run.plan([bushy])
    causal.visible = torch.ones_like(causal.visible).tril()
    counted.positions = 21 + torch.arange(bushy.size)[None]
    for plan in (causal, counted) if _positioned(runner) else (causal,):
        wrong = runner.run(plan, run.cache, 0, run.encoder)
        assert difference(wrong.logits[0], stock) > 100 * TOLERANCE
    if any(kind.window for kind in runner.target.kinds):
        kinds = tuple(replace(k, window=k.window and k.window + 1) for k in runner.target.kinds)
        wide = type(runner)(replace(runner.target, kinds=kinds))
        assert difference(Run(wide).prefill().step([bushy]).logits[0], stock) > 10 * TOLERANCE
    return run.error([bushy], run.step([bushy]))


def _positioned(runner: Runner) -> bool:
    """Return whether positions matter: some hybrid models leave them to their recurrent layers."""
    attends = runner.target.model_type not in ("mamba", "mamba2", "falcon_mamba", "jamba", "kimi_linear", "nemotron_h")
    return attends and runner.target.model_type != "zamba2"


@check
def restored(runner: Runner, model: Any) -> float:
    """A pass that fails half-way leaves no hook, no patch and no trace in the cache."""
    run, bushy = Run(runner).prefill(), Tree(BUSHY, 2)
    before_hooks, before_state, before = _hooks(model), _instance_state(model), run.stock(0, bushy)

    def fail(hidden: Tensor) -> Tensor:
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        run.step([bushy], surgeries=prune(2, fail))
    assert _hooks(model) == before_hooks
    assert _instance_state(model) == before_state
    assert torch.equal(run.stock(0, bushy), before)
    return run.error([bushy], run.step([bushy]))


def _hooks(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def _instance_state(model: Any) -> list[tuple[list[str], list[int]]]:
    """What each module holds: attribute names and the identity of its buffers."""
    return [(sorted(vars(m)), [id(b) for b in m._buffers.values()]) for m in model.modules()]


# ---------------------------------------------------------------- the matrix

MEMBERS = [m.id for m in (*zoo.CAUSAL, *zoo.ENCODER_DECODER, *zoo.RECURRENT)]
# Of families whose code paths others have as well, every day one check in three, each of another family.
# Zamba 2's layers also read the embeddings of the rows that entered.
ROWS_STAY = {
    ("zamba2", check) for check in ("pruned", "pruned_by_states", "pruned_batch", "appended", "taps", "restored")
}
# These models report other states than those that enter their layers.
ROWS_STAY |= {(member, "taps") for member in ("mamba", "mamba2", "falcon_mamba")}
WHOLE_PROMPTS = {(member, "chunks") for member in ("jamba", "mamba", "falcon_mamba")}
CASES = [
    case
    for case in product(MEMBERS, CHECKS)
    if case not in ROWS_STAY | WHOLE_PROMPTS
    and not (case[1] == "deep_prefix" and case[0] in {member.id for member in zoo.RECURRENT})
]
DAILY = [
    (member, check)
    for i, member in enumerate(MEMBERS)
    for j, check in enumerate(CHECKS)
    if member in zoo.CORE or (i + j) % 3 == 0
]
RESULTS: dict[tuple[str, str, str], float] = {}


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Print the table of largest differences when the matrix is done."""
    yield
    rows = sorted({(member, runner) for member, runner, _ in RESULTS}, key=lambda row: (MEMBERS.index(row[0]), row[1]))
    print("\n" + " ".join(["zoo: largest difference from stock", *CHECKS]))
    for member, runner in rows:
        figures = (RESULTS.get((member, runner, name)) for name in CHECKS)
        print(f"{member:18s} {runner:7s}", " ".join("   -   " if f is None else f"{f:7.0e}" for f in figures))


@pytest.mark.parametrize(("member", "name"), few(CASES, [case for case in DAILY if case in CASES]))
def test_zoo(member: str, name: str) -> None:
    model = zoo.build(member)
    for runner in runners_for(model):
        error = CHECKS[name](runner, model)
        RESULTS[member, runner.name, name] = error
        assert error <= TOLERANCE, f"{runner.name} runner: {error:.1e}"


def test_every_member_of_a_known_shape_has_both_runners() -> None:
    for member in zoo.CAUSAL:
        runners = [runner.name for runner in runners_for(zoo.build(member.id))]
        assert runners == ["hooked"] + ["cpu"] * (member.model_type in FAMILIES)


def test_zoo_is_what_the_library_calls_tested() -> None:
    assert zoo.families() == TESTED_FAMILIES


def test_the_docs_show_the_zoo() -> None:
    page = (Path(__file__).parents[2] / "docs" / "runners.md").read_text()
    assert zoo.table() in page, "docs/runners.md: replace the table by what `python tests/zoo.py` prints"
    for family in zoo.families(refused=True):
        assert family in page
