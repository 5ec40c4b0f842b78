"""Draft tokens that the model does not have are dropped with what hangs below them, whoever drafted them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafters_for_tests import InModel, RandomTree, References
from few import crossed
from generate_driver import NEW, SAMPLED, hf, left_pad, prompts, references_of, same
from zoo import MEMBERS, VOCABULARY, build, construct

from draftree.acceptance import LossyTypical
from draftree.drafting import Drafter, DraftModel, Lookahead, Merge, PromptLookup
from draftree.drafting.second_model import check_pair
from draftree.engine import Recorder, generate
from draftree.pruning import EarlyHead, EarlyPruning
from draftree.shaping import DynamicTree, Fixed
from draftree.tree import TokenTree

LARGER = 300


@functools.cache
def larger() -> Any:
    """A model of 300 token ids."""
    return construct(MEMBERS["llama"], vocab_size=LARGER)


class Negative(RandomTree):
    """A drafter with a fault: some of its ids are below 0."""

    def _tree(self, request: Any, budget: int) -> TokenTree:
        tree = super()._tree(request, budget)
        tokens = tree.tokens.where((tree.depth == 0) | (tree.tokens % 5 > 0), -1 - tree.tokens)
        return TokenTree(tokens, tree.parents, tree.logp, tree.source, tree.sizes)


def after_the_larger(drafter: Drafter) -> Drafter:
    """`drafter`, having drafted for the larger model, whose answers hold ids that the smaller one lacks."""
    for row in prompts():
        generate(larger(), torch.tensor([row]), drafter=drafter, shape=Fixed(8), max_new_tokens=NEW)
    return drafter


def learned(references: References, **options: Any) -> Lookahead:
    """A trie that follows every token of the answers with the true one, and with ids of the larger model."""
    trie = Lookahead(decoding_length=24, branch_length=6, **options)
    for prompt, answer in references.items():
        text = [prompt[-1], *answer]
        for i, token in enumerate(text[:-1]):
            trie.warm([[token, VOCABULARY + i, text[i + 1]], [token, text[i + 1], LARGER - 1, 5]])
    return trie


class Tokenizer:
    """Two models of one tokenizer may have tables of different lengths."""

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}


def loaded(references: References, folder: Path) -> Lookahead:
    learned(references).save(folder / "trie", Tokenizer())
    return Lookahead.load(folder / "trie", Tokenizer())


MAKERS: dict[str, Callable[[References, Path], Drafter]] = {
    "user-written": lambda references, _: RandomTree(references, 1, vocabulary=LARGER),
    "negative": lambda references, _: Negative(references, 1),
    "in-model": lambda references, _: InModel(references, 1, vocabulary=LARGER),
    "trie": lambda references, _: learned(references),
    "trie of one branch": lambda references, _: learned(references, mode="single"),
    "trie after another model": lambda references, _: after_the_larger(learned(references)),
    "trie file": loaded,
    "merge": lambda references, _: Merge([learned(references), PromptLookup(4)]),
}


@pytest.mark.parametrize(("options", "runner", "kind"), crossed([{}, SAMPLED | {"seed": 4}], ["hooked", "cpu"], MAKERS))
def test_ids_that_the_model_lacks_are_dropped(kind: str, runner: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, rows = build("llama"), prompts()
    ids, mask = left_pad(rows)
    expected = generate(model, ids, mask, max_new_tokens=NEW, **options).sequences
    references = references_of(rows, expected)
    recorder = Recorder()
    out = generate(
        model,
        ids,
        mask,
        drafter=MAKERS[kind](references, tmp_path),
        shape=Fixed(16),
        runner=runner,
        recorder=recorder,
        max_new_tokens=NEW,
        **options,
    )
    same(out.sequences, expected)
    assert out.stats.total.accepted > 0, "siblings of what is dropped stay"
    verified = [t for record in recorder.records() for m in record.get("members", ()) for t in m["tokens"]]
    assert 0 <= min(verified) <= max(verified) < VOCABULARY


def test_before_pruners_lossy_rules_and_shapes_that_learn() -> None:
    model, rows = build("llama"), prompts()
    ids, mask = left_pad(rows)
    expected = hf(model, ids, mask)
    references = references_of(rows, expected)
    pruner = EarlyPruning(EarlyHead.fresh(model, layer=1), top_k=30, always=True)
    for options in ({"pruner": pruner, "shape": Fixed(16)}, {"shape": DynamicTree()}):
        drafter = RandomTree(references, 1, vocabulary=LARGER)
        same(generate(model, ids, mask, drafter=drafter, max_new_tokens=NEW, **options).sequences, expected)
    drafter = RandomTree(references, 1, vocabulary=LARGER)
    kept = generate(model, ids, mask, drafter=drafter, acceptance=LossyTypical(), shape=Fixed(16), max_new_tokens=NEW)
    assert int(kept.sequences.max()) < VOCABULARY


def test_a_source_of_another_vocabulary() -> None:
    """An encoder may read ids that its decoder does not write."""
    model = construct(MEMBERS["marian"], decoder_vocab_size=40, share_encoder_decoder_embeddings=False)
    ids = torch.tensor([[60, 61, 62, 63, 64, 65, 66, 67]])
    expected = hf(model, ids)
    trie = Lookahead(decoding_length=16, branch_length=4)
    for token in expected[0].tolist():
        trie.warm([[token, 60, 61], [token, 5, 39]])
    same(generate(model, ids, drafter=trie, shape=Fixed(8), max_new_tokens=NEW).sequences, expected)


def padded(model: Any, more: int) -> Any:
    """A copy of a model whose tables have rows more, which any tokenizer leaves unused, or fewer; head not tied."""
    made = construct(MEMBERS["llama"], vocab_size=VOCABULARY + more, tie_word_embeddings=False)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = made.state_dict()[name].clone()
        both = min(VOCABULARY, VOCABULARY + more)
        rows[:both] = weights[name][:both]
        weights[name] = rows
    made.load_state_dict(weights)
    return made


@pytest.mark.filterwarnings("ignore:The small model is no smaller")
@pytest.mark.parametrize("more", [40, -7])
@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_a_draft_model_may_be_padded_to_another_size(
    more: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftModel, "padding", 0.5)
    model, rows = build("llama"), [*prompts(), [5, VOCABULARY - 1, 6]]
    ids, mask = left_pad(rows)
    given = options | {"max_new_tokens": NEW, "seed": 3}
    drafter = DraftModel(padded(model, more), confidence=0)
    out = generate(model, ids, mask, drafter=drafter, shape=Fixed(8), **given)
    same(out.sequences, generate(model, ids, mask, **given).sequences if options else hf(model, ids, mask))
    assert out.stats.total.accepted > 0
    assert out.stats.requests[-1].drafted > 0, "where it lacks a token of the prompt, too"


def test_how_far_sizes_may_differ() -> None:
    def sized(rows: int) -> Any:
        return SimpleNamespace(vocab_size=rows, encoder_decoder=False)

    for small, large in ((151_936, 152_064), (50_304, 50_688), (32_001, 32_000), (97, 97)):
        check_pair(sized(small), sized(large), DraftModel.padding)
    for small, large in ((32_000, 32_768), (128_256, 126_000)):
        with pytest.raises(ValueError, match=f"vocabulary of {small} and the large one of {large}"):
            check_pair(sized(small), sized(large), DraftModel.padding)


def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary of 300 and the large one of 97") as raised:
        generate(build("llama"), torch.tensor(prompts((9,))), drafter=DraftModel(larger()))
    assert "\n" not in str(raised.value)
