"""Drafters are copied and pickled with what they have learned, for other processes and for equal beginnings."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import draftree
from draftree import BiLD, DraftModel, Jacobi, Lookahead, Merge, PromptLookup, generate

PROMPT = torch.tensor([[5, 9, 20, 30, 5, 9, 20]])
MAKERS: dict[str, Callable[[Any], Any]] = {
    "lookahead": lambda model: Lookahead(),
    "lookahead in Python": lambda model: Lookahead(backend="python"),
    "prompt lookup": lambda model: PromptLookup(),
    "jacobi": lambda model: Jacobi(),
    "draft model": lambda model: DraftModel(draftree.demo_drafter("draft-model", model).model),
    "bild": lambda model: BiLD(draftree.demo_drafter("draft-model", model).model),
    "medusa": lambda model: draftree.demo_drafter("medusa", model),
    "bita": lambda model: draftree.demo_drafter("bita", model),
    "hidden transfer": lambda model: draftree.demo_drafter("hidden-transfer", model),
    "self speculative": lambda model: draftree.demo_drafter("self-speculative", model),
    "merge": lambda model: Merge([Lookahead(), draftree.demo_drafter("medusa", model)]),
}


def pickled(drafter: Any) -> Any:
    return pickle.loads(pickle.dumps(drafter))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("name", MAKERS)
def test_copies_draft_as_the_original(demo: Any, name: str, copied: Any) -> None:
    drafter = MAKERS[name](demo.model)
    fresh = copied(drafter)  # before it has met a model
    options: dict[str, Any] = {"max_new_tokens": 40}
    if name.startswith("lookahead"):
        options["shape"] = draftree.Fixed(8)  # it drafts however long steps take
    first = generate(demo.model, PROMPT, drafter=drafter, **options)
    again = generate(demo.model, PROMPT, drafter=fresh, **options)
    assert torch.equal(first.sequences, again.sequences)
    late = copied(drafter)
    one, two = (generate(demo.model, PROMPT, drafter=each, **options) for each in (drafter, late))
    assert torch.equal(one.sequences, two.sequences)
    if name.startswith("lookahead"):
        assert one.stats.requests[0].accepted_by_source.get("lookahead/output", 0) > 0
        assert two.stats.requests[0].accepted_by_source.get("lookahead/output", 0) > 0, (
            "the copy knows the first answer"
        )
        assert late.trie.nodes == drafter.trie.nodes
        generate(demo.model, PROMPT + 1, drafter=late, **options)
        assert late.trie.nodes > drafter.trie.nodes, "what the copy learns is its own"
        assert late.trie.backend == drafter.trie.backend


def test_a_copy_in_the_middle_of_a_request_has_none(demo: Any) -> None:
    drafter = Lookahead()
    with draftree.Engine(demo.model, drafter=drafter) as engine:
        stream = engine.stream(engine.add(PROMPT[0].tolist(), max_new_tokens=30))
        next(stream)
        other = copy.deepcopy(drafter)
        assert other.trie.live_requests == 0 < drafter.trie.live_requests
        rest = [emitted.token for emitted in stream]
    assert len(rest) == 29
    assert (
        generate(demo.model, PROMPT, drafter=other, max_new_tokens=30).sequences[0, PROMPT.shape[1] + 1 :].tolist()
        == rest
    )
