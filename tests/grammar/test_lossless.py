"""Losslessness under a grammar, over families, drafters, runners, batches, greedy and sampled.

Constrained texts equal those of plain constrained decoding, and of Hugging Face's `generate` with the same library's
mask.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
import torch
from drafters_for_tests import RandomTree
from few import few, shared
from generate_driver import (
    ON_EVERY_RUNNER,
    SAMPLED,
    drafters,
    hf,
    left_pad,
    prompts,
    references_of,
    same,
    tries_in_turn,
)
from grammar_cases import OTHERS, ascii_tokenizer
from torch import Tensor
from transformers import LogitsProcessorList
from zoo import CAUSAL, ENCODER_DECODER, VOCABULARY, build

import draftree
from benchmarks.machine.schemas import Reference, listed, record, reference_grammar, reference_words, text
from draftree import BiLD, EarlyHead, EarlyPruning, Grammar, GrammarDrafter, Lookahead, LossyTypical, Merge
from draftree.drafting import Drafter
from draftree.engine import Engine, SamplingParams, generate
from draftree.runner import EagerRunner, inspect_model
from draftree.shaping import Fixed

EOS = 2
NEW = 90
SEED = 11
DEFAULT = ("llama", "gpt2", "t5")
NAMES = [m.id for m in CAUSAL]
ODD, EVEN = shared(NAMES, DEFAULT)
TURNS = [*DEFAULT[:2], *(name for name in NAMES if name not in DEFAULT)]
SEQ2SEQ = few([m.id for m in ENCODER_DECODER], DEFAULT)
# Tiny models know no words, so the shortest texts are the likeliest to hold every kind of step.
SCHEMA = record(kind={"enum": ["ab", "abba", "cab"]}, tags=listed(text(4), most=2, least=1))
GRAMMAR = Grammar.json_schema(SCHEMA)
WORDS = reference_words(ascii_tokenizer(), VOCABULARY, EOS)


def reference(count: int, start: int) -> LogitsProcessorList:
    own = Reference(WORDS, [reference_grammar(SCHEMA)] * count, start, EOS)
    return LogitsProcessorList([own])


def of_grammar(kind: str, references: Any) -> Drafter:
    """Drafters that belong to grammars."""
    return {
        "forced": GrammarDrafter,
        "forced+lookahead": lambda: Merge([GrammarDrafter(), Lookahead()]),
        "forced+random": lambda: Merge([GrammarDrafter(), RandomTree(references, 4)]),
    }[kind]()


KINDS = ("forced", "forced+lookahead", "forced+random")


def check_all(
    name: str, ids: Tensor, mask: Tensor | None, rows: Sequence[Sequence[int]], expected: Tensor, **options: Any
):
    """Check every drafter against `expected`, on every runner if it sees one; answers fit the grammar.

    Every second family has half of the tries.
    """
    tokenizer, width = ascii_tokenizer(), ids.shape[1]
    for row in expected[:, width:].tolist():
        answer = tokenizer.decode(row[: row.index(EOS)])
        jsonschema.validate(json.loads(answer), SCHEMA)
    references = references_of(rows, expected)
    accepted = 0
    runners = ["cpu", "hooked"] if EagerRunner.qualifies(inspect_model(build(name))) else ["hooked"]
    for runner in runners:
        made = {kind: of_grammar(kind, references) for kind in KINDS}
        made |= {kind: make() for kind, make in drafters(references).items()}
        for kind in tries_in_turn(made, TURNS.index(name), 2):
            if runner != runners[0] and kind not in (*ON_EVERY_RUNNER, "forced+random"):
                continue
            out = generate(
                build(name),
                ids,
                mask,
                drafter=made[kind],
                shape=Fixed(12),
                runner=runner,
                max_new_tokens=NEW,
                eos_token_id=EOS,
                grammar=GRAMMAR,
                tokenizer=tokenizer,
                **options,
            )
            same(out.sequences, expected, f"{name} on {runner} with {kind}")
            accepted += out.stats.total.accepted
    assert accepted > 3 * (expected.shape[1] - width)


@pytest.mark.parametrize("name", EVEN)
def test_greedy_batch(name: str) -> None:
    rows = prompts()
    ids, mask = left_pad(rows)
    options: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": EOS}
    theirs = hf(build(name), ids, mask, logits_processor=reference(len(ids), ids.shape[1]), **options)
    plain = generate(build(name), ids, mask, grammar=GRAMMAR, tokenizer=ascii_tokenizer(), **options)
    same(plain.sequences, theirs, f"{name} without a drafter")
    check_all(name, ids, mask, rows, theirs)


@pytest.mark.parametrize("name", ODD)
def test_sampled_batch(name: str) -> None:
    rows = prompts()
    ids, mask = left_pad(rows)
    plain = generate(
        build(name),
        ids,
        mask,
        max_new_tokens=NEW,
        eos_token_id=EOS,
        seed=SEED,
        grammar=GRAMMAR,
        tokenizer=ascii_tokenizer(),
        **SAMPLED,
    ).sequences
    for b, row in enumerate(rows):
        alone = torch.tensor([row])
        options = SAMPLED | {"max_new_tokens": NEW, "eos_token_id": EOS, "logits_processor": reference(1, len(row))}
        theirs = hf(build(name), alone, seed=SEED + b, **options)[0, len(row) :]
        same(plain[b, None, ids.shape[1] : ids.shape[1] + len(theirs)], theirs[None], f"{name}, row {b}")
    check_all(name, ids, mask, rows, plain, seed=SEED, **SAMPLED)


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_encoder_decoders(name: str) -> None:
    ids, tokenizer = torch.tensor(prompts((13,))), ascii_tokenizer()
    model = build(name)
    if model.generation_config.forced_bos_token_id is not None:
        pytest.skip("the family forces its first token, which is none of the grammar")
    options: dict[str, Any] = {"max_new_tokens": NEW}
    theirs = hf(model, ids, logits_processor=reference(1, 1), **options)
    options |= {"grammar": GRAMMAR, "tokenizer": tokenizer}
    same(generate(model, ids, **options).sequences, theirs, name)
    accepted = 0
    for kind in KINDS:
        drafter = of_grammar(kind, {(int(theirs[0, 0]),): theirs[0, 1:].tolist()})
        out = generate(model, ids, drafter=drafter, shape=Fixed(8), **options)
        same(out.sequences, theirs, f"{name} with {kind}")
        accepted += out.stats.total.accepted
    assert accepted > theirs.shape[1]


def test_through_hugging_faces_door_each_row_its_own_grammar() -> None:
    rows, model, tokenizer = prompts(), build("llama"), ascii_tokenizer()
    ids, mask = left_pad(rows)
    grammars = [GRAMMAR, None, OTHERS["gbnf"][0]]
    loop = draftree.custom_generate(
        Merge([GrammarDrafter(), Lookahead()]), grammar=grammars, tokenizer=tokenizer, shape=Fixed(8)
    )
    ours = model.generate(ids, attention_mask=mask, custom_generate=loop, max_new_tokens=NEW, do_sample=False)
    for b, (row, grammar) in enumerate(zip(rows, grammars, strict=True)):
        alone = generate(
            model, torch.tensor([row]), max_new_tokens=NEW, grammar=grammar, tokenizer=tokenizer
        ).sequences[0, len(row) :]
        same(ours[b, None, ids.shape[1] : ids.shape[1] + len(alone)], alone[None], f"row {b}")
    answer = ours[2, ids.shape[1] :].tolist()
    assert re.fullmatch(OTHERS["gbnf"][1], tokenizer.decode(answer[: answer.index(EOS)]))


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_grammars_of_every_kind(kind: str, sample: bool) -> None:
    grammar, pattern = OTHERS[kind]
    tokenizer, model = ascii_tokenizer(), build("llama")
    rows = prompts((9, 5, 14, 7))
    ids, mask = left_pad(rows)
    options: dict[str, Any] = {"max_new_tokens": NEW, "grammar": grammar, "tokenizer": tokenizer}
    if sample:
        options |= {"do_sample": True, "temperature": 1.3, "seed": 5}
    plain = generate(model, ids, mask, **options)
    references = references_of(rows, plain.sequences)
    for drafter in (GrammarDrafter(), RandomTree(references, 2), Merge([GrammarDrafter(), Lookahead()])):
        for _ in range(2):  # the second time with what was learned
            out = generate(model, ids, mask, drafter=drafter, shape=Fixed(10), **options)
            same(out.sequences, plain.sequences, kind)
    for row in plain.sequences[:, ids.shape[1] :].tolist():
        assert re.fullmatch(pattern, tokenizer.decode(row[: row.index(EOS)]))


def test_processors_of_hugging_face_with_a_grammar() -> None:
    model, ids, tokenizer = build("llama"), torch.tensor(prompts((9,))), ascii_tokenizer()
    options: dict[str, Any] = {
        **{"repetition_penalty": 1.4, "min_new_tokens": 20, "bad_words_ids": [[40], [41, 42]]},
        **{"suppress_tokens": [50, 60, 70], "max_new_tokens": NEW},
    }
    theirs = hf(model, ids, logits_processor=reference(1, ids.shape[1]), **options)
    for drafter in (None, GrammarDrafter(), Merge([GrammarDrafter(), Lookahead()])):
        ours = generate(model, ids, drafter=drafter, grammar=GRAMMAR, tokenizer=tokenizer, **options)
        same(ours.sequences, theirs)


def test_unconstrained_requests_of_the_batch_are_left_as_they_are() -> None:
    model, grammar = build("llama"), GRAMMAR.compile(ascii_tokenizer(), VOCABULARY, [EOS])
    rows = prompts((9, 5, 14, 7))

    def run(drafter: Drafter | None, constrained: tuple[int, ...]) -> list[list[int]]:
        with Engine(model, slots=4, drafter=drafter, shape=None if drafter is None else Fixed(8)) as engine:
            requests = [
                engine.add(row, SamplingParams(40, (EOS,), grammar=grammar if b in constrained else None))
                for b, row in enumerate(rows)
            ]
            engine.run()
        return [request.tokens for request in requests]

    free, mixed = run(None, ()), run(None, (1, 3))
    drafted = run(Merge([GrammarDrafter(), Lookahead()]), (1, 3))
    assert drafted == mixed
    assert [mixed[0], mixed[2]] == [free[0], free[2]]
    assert mixed[1] != free[1]


def test_early_pruning_under_a_grammar() -> None:
    model, ids, tokenizer = build("llama"), torch.tensor(prompts((9,))), ascii_tokenizer()
    options: dict[str, Any] = {"max_new_tokens": NEW, "grammar": GRAMMAR, "tokenizer": tokenizer}
    plain = generate(model, ids, **options)
    references = {tuple(ids[0].tolist()): plain.sequences[0, ids.shape[1] :].tolist()}
    pruner = EarlyPruning(EarlyHead.fresh(model, layer=1), always=True, top_k=10)
    drafter = Merge([GrammarDrafter(), RandomTree(references, 4)])
    out = generate(model, ids, drafter=drafter, pruner=pruner, shape=Fixed(12), **options)
    same(out.sequences, plain.sequences)
    assert out.stats.total.pruned


@pytest.mark.parametrize("lossy", ["typical", "bild"])
def test_lossy_rules_stay_inside_the_grammar(lossy: str) -> None:
    model, ids, tokenizer = build("llama"), torch.tensor(prompts((9,))), ascii_tokenizer()
    options: dict[str, Any] = {"max_new_tokens": NEW, "grammar": GRAMMAR, "tokenizer": tokenizer}
    plain = generate(model, ids, **options).sequences
    references = {tuple(ids[0].tolist()): plain[0, ids.shape[1] :].tolist()}
    made: dict[str, dict[str, Any]] = {
        "typical": {"drafter": RandomTree(references, 3), "acceptance": LossyTypical()},
        "bild": {"drafter": BiLD(build("llama"), fallback_threshold=0.01)},
    }
    out = generate(model, ids, **made[lossy], **options)
    answer = out.sequences[0, ids.shape[1] :].tolist()
    jsonschema.validate(json.loads(tokenizer.decode(answer[: answer.index(EOS)])), SCHEMA)


def test_draft_tokens_outside_the_grammar_do_not_pass_and_leave_their_place_to_others() -> None:
    """Half of a random tree is forbidden; the allowed half fills the node budget."""
    model, grammar = build("llama"), GRAMMAR.compile(ascii_tokenizer(), VOCABULARY, [EOS])
    prompt = prompts((9,))[0]
    with Engine(model, slots=1) as engine:
        plain = engine.add(prompt, SamplingParams(NEW, (EOS,), grammar=grammar))
        engine.run()
    drafter = RandomTree({tuple(prompt): plain.tokens}, 6)
    with Engine(model, slots=1, drafter=drafter, shape=Fixed(6)) as engine:
        drafted = engine.add(prompt, SamplingParams(NEW, (EOS,), grammar=grammar, keep_trees=True))
        engine.run()
    assert drafted.tokens == plain.tokens
    emitted: list[int] = []
    full = 0
    for tree in drafted.trees:
        assert all(grammar.begin().permits(emitted or [1], tree.tokens, tree.parents)) or not emitted
        full += len(tree.tokens) == 7
        emitted += tree.emitted
    assert full
