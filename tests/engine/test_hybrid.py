"""The package's model with recurrent layers: ids equal Hugging Face's with each drafter outside the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafters_for_tests import RandomTree
from generate_driver import SAMPLED, hf, left_pad, references_of, same

from draftree.drafting import BiLD, Drafter, DraftModel, Lookahead, Merge, PromptLookup
from draftree.engine import generate
from draftree.models import encode_prompt
from draftree.prompts import embedded_prompts, take_per_set
from draftree.shaping import Fixed

NEW, SEED = 40, 11
ANSWERED = [prompt.text for prompt in take_per_set([p for p in embedded_prompts() if not p.warm], 1)]


def drafters(references: Any, demo: Any, hybrid: Any) -> dict[str, Callable[[], Drafter]]:
    def trie() -> Lookahead:
        drafter = Lookahead()
        drafter.warm([answer[: NEW // 2] for answer in references.values()])
        return drafter

    def noisy() -> Any:
        model, generator = copy.deepcopy(hybrid.model), torch.Generator().manual_seed(5)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.05 * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
        return model

    return {
        "random": lambda: RandomTree(references, vocabulary=4096, eos=4091),
        "cold trie": Lookahead,
        "warm trie": trie,
        "prompt lookup": PromptLookup,
        "llama": lambda: DraftModel(demo.model, depth=4, branching=2, beam=2, confidence=0),
        "hybrid": lambda: DraftModel(noisy(), depth=3, branching=2, beam=2, confidence=0),
        "bild": lambda: BiLD(demo.model, 0.1, lossless=True, num_draft_tokens=5),
        "merged": lambda: Merge([trie(), DraftModel(demo.model, depth=3)]),
    }


@pytest.mark.filterwarnings("ignore:The small model is no smaller")
@pytest.mark.parametrize("ragged", [False, True], ids=["alone", "ragged"])
@pytest.mark.parametrize("options", [{}, SAMPLED | {"seed": SEED}], ids=["greedy", "sampled"])
def test_ids_are_hugging_faces(demo: Any, hybrid: Any, options: dict[str, Any], ragged: bool) -> None:
    rows = [encode_prompt(hybrid.tokenizer, text) for text in ANSWERED[: 4 if ragged else 1]]
    ids, mask = left_pad(rows, pad=4095)
    if ragged and options:  # Request b draws from seed + b, as Hugging Face does for it alone.
        expected = torch.full((len(rows), ids.shape[1] + NEW), 4095)
        expected[:, : ids.shape[1]] = ids
        for b, row in enumerate(rows):
            own = hf(hybrid.model, torch.tensor([row]), **options | {"seed": SEED + b, "max_new_tokens": NEW})
            expected[b, ids.shape[1] :][: own.shape[1] - len(row)] = own[0, len(row) :]
    else:
        expected = hf(hybrid.model, ids, mask, **options | {"max_new_tokens": NEW})
    made = drafters(references_of(rows, expected), demo, hybrid)
    accepted: dict[str, int] = {}
    for kind, make in made.items():
        for runner in ("cpu", "hooked") if kind == "random" else ("auto",):
            given = {"drafter": make(), "shape": Fixed(10), "runner": runner, "max_new_tokens": NEW}
            out = generate(hybrid.model, ids, mask, **given, **options)
            wanted = expected[:, : out.sequences.shape[1]]
            same(out.sequences, wanted, f"{kind} on {runner}")
            accepted[kind] = out.stats.total.accepted
    assert accepted["random"], accepted
    assert sum(accepted.values()) > NEW, accepted  # Otherwise the test shows nothing.
