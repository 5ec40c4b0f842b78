"""Typical acceptance follows its definition, and changes texts only on request."""

from __future__ import annotations

import math

import pytest
import torch
from drafters_for_tests import RandomTree
from generate_driver import NEW, SAMPLED, left_pad, prompts
from torch import Tensor
from transformers import LogitsProcessorList
from tree_paths import path_of, scored_tree
from zoo import build

import draftree
from draftree.acceptance import LossyTypical, PrefixChooser
from draftree.engine import Engine, SamplingParams, generate
from draftree.shaping import Fixed
from draftree.tree import TokenTree


def logits_of(*rows: dict[int, float]) -> Tensor:
    """[N, 8], rows of probabilities as given, the rest spread over the other tokens."""
    made = torch.zeros(len(rows), 8)
    for row, given in zip(made, rows, strict=True):
        row[:] = (1 - sum(given.values())) / (8 - len(given))
        for token, p in given.items():
            row[token] = p
    return made.log()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rule", [LossyTypical(), LossyTypical(0.2, 0.8), LossyTypical(0.9, 0.05)])
def test_a_draft_token_is_kept_by_the_formula(rule: LossyTypical, seed: int) -> None:
    scores = 3 * torch.randn(40, generator=torch.Generator().manual_seed(seed))
    p = [math.exp(x) for x in scores.double().log_softmax(0).tolist()]
    entropy = -sum(x * math.log(x) for x in p)
    least = min(rule.posterior_threshold, rule.posterior_alpha * math.exp(-entropy))
    kept = rule.keeps(scores, range(40))
    assert [k > 0 for k in kept] == [x > least for x in p]
    assert kept[int(scores.argmax())] > 0  # the best token always is
    assert 0 < sum(k > 0 for k in kept) < 40
    assert all(k == pytest.approx(x, rel=1e-4) for k, x in zip(kept, p, strict=True) if k)


def test_the_longest_path_is_accepted_then_the_likelier() -> None:
    """The model's best token (3) ends early; less likely ones (2, then 5 or 6) lead further."""
    tree = TokenTree.from_paths(1, [[3], [2, 5], [2, 6], [4, 7]])
    by_path = {tuple(path_of(tree, 0, n)): n for n in range(tree.width)}
    rows = [{0: 0.9}] * tree.width
    rows[0] = {3: 0.6, 2: 0.2, 4: 0.01}
    rows[by_path[1, 2]] = {5: 0.3, 6: 0.4}
    logits = logits_of(*rows)
    rule = LossyTypical()
    found = list(rule.walk(scored_tree(tree, 0, logits), None))
    two, six = by_path[1, 2], by_path[1, 2, 6]
    assert found == [(0, 2, two), (two, 6, six), (six, 0, None)]
    pruned = {node: i for i, node in enumerate([0, by_path[1, 3], two])}
    found = list(rule.walk(scored_tree(tree, 0, logits[list(pruned)], pruned), None))
    assert found[-1][1] == 0 or found[-1][0] in pruned
    assert [node for node, *_ in found] in ([0, by_path[1, 3]], [0, two])


def test_processors_see_the_draft_tokens_before_them() -> None:
    seen = []

    def watch(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids[0].tolist())
        return scores

    tree = TokenTree.from_paths(1, [[3, 4, 5]])
    chooser = PrefixChooser(torch.tensor([[6, 1]]), LogitsProcessorList([watch]), None, False)
    logits = logits_of({3: 0.9}, {4: 0.9}, {5: 0.9}, {0: 0.9})
    assert [token for _, token, _ in LossyTypical().walk(scored_tree(tree, 0, logits), chooser)] == [3, 4, 5, 0]
    assert seen == [[6, 1], [6, 1, 3], [6, 1, 3, 4], [6, 1, 3, 4, 5]]


def random_drafter(scale: int = 1) -> RandomTree:
    return RandomTree({}, seed=scale)


@pytest.mark.parametrize("sampled", [False, True])
def test_every_kept_draft_token_is_plausible_at_its_place(sampled: bool) -> None:
    """Whole texts, checked with stock passes: draft tokens by the rule, other tokens the model's own."""
    model = build("llama")
    rule = LossyTypical(posterior_threshold=0.02, posterior_alpha=0.5)
    ids, mask = left_pad(prompts())
    options = {"seed": 3, **SAMPLED} if sampled else {}
    out = generate(
        model, ids, mask, drafter=random_drafter(), shape=Fixed(24), acceptance=rule, max_new_tokens=NEW, **options
    )
    assert out.stats.total.accepted > 0
    if sampled:
        return
    plain = generate(model, ids, mask, max_new_tokens=NEW).sequences
    assert not torch.equal(out.sequences, plain)
    engine = Engine(model, drafter=random_drafter(), shape=Fixed(24), acceptance=rule)
    request = engine.add(prompts()[0], SamplingParams(NEW))
    engine.run()
    kept = 0
    for i, emitted in enumerate(request.output):
        with torch.no_grad():
            row = model(torch.tensor([prompts()[0] + request.tokens[:i]])).logits[0, -1]
        if emitted.source is None:
            assert emitted.token == int(row.argmax())
        else:
            kept += emitted.token != int(row.argmax())
            assert rule.keeps(row, [emitted.token])[0] > 0
    assert kept > 0


def test_an_eos_inside_a_kept_path_ends_the_text_and_room_is_kept() -> None:
    model = build("llama")
    rule = LossyTypical(0.0, 0.0)  # everything is plausible
    prompt = prompts()[0]
    engine = Engine(model, drafter=random_drafter(), shape=Fixed(24), acceptance=rule)
    request = engine.add(prompt, SamplingParams(20))
    engine.run()
    assert len(request.tokens) == 20
    assert request.stats.accepted > 8
    eos = request.tokens[4]
    engine = Engine(model, drafter=random_drafter(), shape=Fixed(24), acceptance=rule)
    ended = engine.add(prompt, SamplingParams(20, (eos,)))
    engine.run()
    assert ended.tokens.count(eos) <= 1
    assert (ended.finish_reason == "eos") == (ended.tokens[-1] == eos)


def test_what_does_not_go_with_it_is_refused() -> None:
    model = build("llama")
    ids = torch.tensor(prompts((5,)))
    for name in ("posterior_threshold", "posterior_alpha"):
        for value in (-0.1, 1.0):
            with pytest.raises(ValueError, match=name):
                LossyTypical(**{name: value})
    with pytest.raises(ValueError, match="strict"):
        generate(model, ids, acceptance=draftree.LossyTypical(), strict=True)
    with pytest.raises(TypeError, match="LossyTypical"):
        generate(model, ids, acceptance="typical")
    with pytest.raises(ValueError, match="keeps a state"):
        generate(model, ids, acceptance=LossyTypical(), guidance_scale=1.5, max_new_tokens=2)
