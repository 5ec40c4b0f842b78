"""Drafters are copied and pickled with what they have learned, for other processes and for equal beginnings."""

from __future__ import annotations

import collections
import copy
import itertools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from few import crossed

import draftree
from draftree import BiLD, DraftModel, Lookahead, Merge, PromptLookup, generate

PROMPT = torch.tensor([[5, 9, 20, 30, 5, 9, 20]])
MAKERS: dict[str, Callable[[Any], Any]] = {
    "lookahead": lambda model: Lookahead(),
    "lookahead without a compiler": lambda model: Lookahead(compiled=False),
    "prompt lookup": lambda model: PromptLookup(),
    "draft model": lambda model: DraftModel(draftree.demo_drafter("draft-model", model).model),
    "bild": lambda model: BiLD(draftree.demo_drafter("draft-model", model).model),
    "medusa": lambda model: draftree.demo_drafter("medusa", model),
    "bita": lambda model: draftree.demo_drafter("bita", model),
    "hidden transfer": lambda model: draftree.demo_drafter("hidden-transfer", model),
    "merge": lambda model: Merge([Lookahead(), draftree.demo_drafter("medusa", model)]),
}
MORE: dict[str, Callable[[Any], Any]] = {
    "merge of several": lambda model: Merge([Lookahead(), PromptLookup(), MAKERS["draft model"](model)])
}


def pickled(drafter: Any) -> Any:
    return pickle.loads(pickle.dumps(drafter))


@pytest.mark.parametrize(("copied", "name"), crossed([copy.deepcopy, pickled], MAKERS))
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
        assert late.trie.compiled == drafter.trie.compiled


@pytest.mark.parametrize(("copied", "name"), crossed([copy.deepcopy, pickled], [*MAKERS, *MORE]))
def test_a_copy_in_the_middle_of_requests_knows_none_of_them(
    demo: Any, name: str, copied: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftree.engine.request._ids", itertools.count(7_000_001))  # found again wherever they stand
    drafter = (MAKERS | MORE)[name](demo.model)
    prompt = PROMPT[0].tolist()
    shape = None if name == "bild" else draftree.Fixed(8)  # so that it drafts however long steps take
    with draftree.Engine(demo.model, drafter=drafter, slots=2, shape=shape) as engine:
        requests = [engine.add(prompt, max_new_tokens=30) for _ in range(2)]
        for _ in range(6):
            engine.step()
        assert [request.id for request in requests] == [7_000_001, 7_000_002]
        other = copied(drafter)
        if not name.startswith("self"):  # which keeps nothing of a request
            assert ids_in(drafter), "the original knows them"
        assert not ids_in(other)
        rest = [emitted.token for emitted in engine.stream(requests[0])]
    again = generate(demo.model, PROMPT, drafter=other, max_new_tokens=30).sequences[0, PROMPT.shape[1] :]
    assert again.tolist() == requests[0].tokens
    assert rest == requests[0].tokens[-len(rest) :]


def ids_in(thing: Any, seen: set[int] | None = None) -> list[int]:
    """The ids of running requests that are kept anywhere in an object, as keys or values."""
    seen = set() if seen is None else seen
    if isinstance(thing, int):
        return [thing] if 7_000_000 < thing < 7_000_100 else []
    if id(thing) in seen or isinstance(thing, torch.nn.Module | type | str | bytes):
        return []
    seen.add(id(thing))
    if isinstance(thing, draftree.drafting.lookahead.trie.Trie):
        return [7_000_001] * thing.live_requests
    if isinstance(thing, dict):
        inside = [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple | set | frozenset | collections.deque):
        inside = list(thing)
    else:
        inside = [*getattr(thing, "__dict__", {}).values()]
    return [found for one in inside for found in ids_in(one, seen)]


def test_a_pickled_drafter_has_nothing_of_the_model(demo: Any) -> None:
    for maker in (lambda: Lookahead(), lambda: draftree.demo_drafter("bita", demo.model)):
        drafter = maker()
        before = len(pickle.dumps(drafter))
        generate(demo.model, PROMPT, drafter=drafter, max_new_tokens=20)
        assert len(pickle.dumps(drafter)) < 2 * before + 10_000


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copied_shape_keeps_what_it_has_learned(demo: Any, copied: Any) -> None:
    shape = draftree.DynamicTree()
    drafter = Lookahead()
    for _ in range(2):
        generate(demo.model, PROMPT, drafter=drafter, max_new_tokens=40, shape=shape)
    other = copied(shape)
    learned = other._learned.statistics.chances()
    assert learned == shape._learned.statistics.chances() != draftree.DynamicTree()._learned.statistics.chances()
    one, two = (
        generate(demo.model, PROMPT, drafter=drafter, max_new_tokens=20, shape=each).sequences
        for each in (shape, other)
    )
    assert torch.equal(one, two)


def test_a_request_that_ends_while_its_drafter_is_copied_holds_nothing_up() -> None:
    """As when the garbage collector ends an engine then, in the thread that copies."""
    drafter, copies = Lookahead(), []

    def copying() -> None:
        with drafter._making:
            drafter.trie_of("other")
        copies.append(pickle.loads(pickle.dumps(drafter)))

    thread = threading.Thread(target=copying, daemon=True)
    thread.start()
    thread.join(20)
    assert copies
