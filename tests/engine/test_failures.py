"""An error in one request ends that request; an error in a pass ends all running requests and no waiting one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafters_for_tests import InModel, Raising, RandomTree
from generate_driver import prompts
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from zoo import build

from draftree.drafting import Drafter, Lookahead, Merge
from draftree.engine import Emitted, Engine, Request, SamplingParams, State, generate
from draftree.shaping import Fixed
from draftree.tree import TokenTree

PROMPTS = prompts((5, 17, 9, 12), seed=6)
NEW = 14


def plain(number: int) -> list[int]:
    engine = Engine(build("llama"))
    request = engine.add(PROMPTS[number], SamplingParams(max_new_tokens=NEW))
    engine.run()
    return request.tokens


REFERENCES = {tuple(p): plain(n) for n, p in enumerate(PROMPTS)}


class TrapError(Exception):
    pass


class TrapCriteria(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if input_ids.shape[1] == len(PROMPTS[1]) + 4:
            raise TrapError
        return torch.zeros(1, dtype=torch.bool)


class TrapProcessor(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == len(PROMPTS[1]) + 4:
            raise TrapError
        return scores


def hooks(model: Any) -> int:
    """Count hooks on the model's modules, without those that transformers leaves behind."""
    found = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return sum(not str(getattr(h, "__module__", "")).startswith("transformers.") for h in found)


def goes_on(engine: Engine) -> None:
    """Check that the engine answers new requests correctly."""
    assert not engine.running
    made = [engine.add(prompt, SamplingParams(max_new_tokens=NEW)) for prompt in PROMPTS]
    engine.run()
    assert [r.tokens for r in made] == [REFERENCES[tuple(p)] for p in PROMPTS]
    assert hooks(build("llama")) == 0


@pytest.mark.parametrize(
    ("where", "kind"), [("criteria", RandomTree), ("processor", InModel), ("callback", RandomTree)]
)
def test_a_failing_request_leaves_the_others_running(where: str, kind: type[RandomTree]) -> None:
    drafter = kind(REFERENCES, 3)
    engine = Engine(build("llama"), drafter=drafter, shape=Fixed(8), slots=3)
    request: list[Request] = []

    def trap(emitted: Emitted) -> None:
        if len(request[0].output) == 4:
            raise TrapError

    params = {
        "criteria": SamplingParams(max_new_tokens=NEW, criteria=StoppingCriteriaList([TrapCriteria()])),
        "processor": SamplingParams(max_new_tokens=NEW, processors=LogitsProcessorList([TrapProcessor()])),
        "callback": SamplingParams(max_new_tokens=NEW),
    }[where]
    others = [engine.add(PROMPTS[n], SamplingParams(max_new_tokens=NEW)) for n in (0,)]
    request.append(engine.add(PROMPTS[1], params, on_token=trap if where == "callback" else None))
    others += [engine.add(PROMPTS[n], SamplingParams(max_new_tokens=NEW)) for n in (2, 3)]
    engine.run()
    assert [r.tokens for r in others] == [REFERENCES[tuple(PROMPTS[n])] for n in (0, 2, 3)]
    failed = request[0]
    assert isinstance(failed.error, TrapError)
    assert failed.finish_reason == "error"
    assert failed.state is State.FINISHED
    assert failed.tokens == REFERENCES[tuple(PROMPTS[1])][:4]
    assert failed.stats.emitted == 4
    assert sum(failed.stats.accepted_by_source.values()) == failed.stats.accepted
    assert not drafter.live
    with pytest.raises(TrapError):
        list(engine.stream(failed))
    goes_on(engine)


@pytest.mark.parametrize(("stage", "call"), [("plan", 1), ("draft", 2), ("observe", 4)])
def test_a_drafter_that_raises_fails_the_running_requests(stage: str, call: int) -> None:
    drafter = Raising(REFERENCES, stage, call)
    engine = Engine(build("llama"), drafter=drafter, shape=Fixed(8), slots=2)
    made = [engine.add(prompt, SamplingParams(max_new_tokens=NEW)) for prompt in PROMPTS]
    with pytest.raises(ArithmeticError, match=f"{stage} went wrong"):
        engine.run()
    failed = [r for r in made if r.error is not None]
    assert 1 <= len(failed) <= 2
    assert all(r.finish_reason == "error" and r.state is State.FINISHED for r in failed)
    for request in failed:
        expected = REFERENCES[tuple(PROMPTS[made.index(request)])]
        assert request.tokens == expected[: len(request.tokens)]
    engine.run()  # The waiting requests.
    for n, request in enumerate(made):
        if request not in failed:
            assert request.tokens == REFERENCES[tuple(PROMPTS[n])]
    assert not drafter.live
    goes_on(engine)


@pytest.mark.parametrize("stage", ["begin", "end"])
def test_a_drafter_that_raises_over_one_request(stage: str) -> None:
    drafter = Raising(REFERENCES, stage, 2)
    engine = Engine(build("llama"), drafter=drafter, shape=Fixed(8), slots=2)
    made = [engine.add(prompt, SamplingParams(max_new_tokens=NEW)) for prompt in PROMPTS]
    engine.run()
    failed = [r for r in made if r.error is not None]
    assert len(failed) == 1
    assert isinstance(failed[0].error, ArithmeticError)
    for n, request in enumerate(made):
        if request not in failed or stage == "end":
            assert request.tokens == REFERENCES[tuple(PROMPTS[n])]
    goes_on(engine)


@pytest.mark.parametrize(("runner", "kind", "layer"), [("cpu", RandomTree, 3), ("hooked", InModel, 0)])
def test_a_failing_pass(runner: str, kind: type[RandomTree], layer: int) -> None:
    """Also in the middle of the stack, after rows were changed."""
    model = build("llama")
    drafter = kind(REFERENCES, 3)
    engine = Engine(model, drafter=drafter, shape=Fixed(8), slots=2, runner=runner)
    made = [engine.add(prompt, SamplingParams(max_new_tokens=NEW)) for prompt in PROMPTS]
    engine.step()
    stores = engine.cache.stores

    def broken(index: int, *args: Any) -> Any:
        if index == layer:
            raise TrapError
        return stores(index, *args)

    engine.cache.stores = broken  # type: ignore[method-assign]
    with pytest.raises(TrapError):
        engine.step()
    assert [type(r.error) for r in made] == [TrapError, TrapError, type(None), type(None)]
    assert hooks(model) == 0
    engine.cache.stores = stores  # type: ignore[method-assign]
    engine.run()
    assert [r.tokens for r in made[2:]] == [REFERENCES[tuple(p)] for p in PROMPTS[2:]]
    assert not drafter.live
    goes_on(engine)


def test_an_interrupt_ends_the_running_requests() -> None:
    engine = Engine(build("llama"), slots=2)

    def interrupt(emitted: Emitted) -> None:
        raise KeyboardInterrupt

    made = [engine.add(PROMPTS[0], SamplingParams(max_new_tokens=NEW), on_token=interrupt)]
    made.append(engine.add(PROMPTS[1], SamplingParams(max_new_tokens=NEW)))
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert [r.finish_reason for r in made] == ["error", "error"]
    goes_on(engine)


def test_a_step_within_a_step_is_refused() -> None:
    engine = Engine(build("llama"), slots=2)
    request = engine.add(PROMPTS[0], SamplingParams(max_new_tokens=NEW), on_token=lambda emitted: engine.step())
    engine.run()
    assert isinstance(request.error, RuntimeError)
    goes_on(engine)


class Written(Drafter):
    """A user's drafter that drafts the same tokens for every request, below roots of its own."""

    name, max_nodes = "written", 8

    def __init__(self, draft: Any, roots: Any = list) -> None:
        self._draft, self._roots = draft, roots

    def draft(self, requests: Any, budgets: Any) -> TokenTree:
        roots = self._roots([request.tokens[-1] for request in requests])
        return TokenTree.from_drafts(roots, [self._draft] * len(roots), budgets)


@pytest.mark.parametrize("roots", [lambda tokens: [token + 1 for token in tokens], lambda tokens: tokens[::-1]])
def test_trees_of_other_roots_are_refused(roots: Any) -> None:
    drafter = Written(([5, 6], [-1, 0], [-0.1, -0.2], 1), roots)
    engine = Engine(build("llama"), drafter=drafter, slots=2, shape=Fixed(4))
    for prompt in ([5, 9, 20], [7, 8, 30]):
        engine.add(prompt, max_new_tokens=6)
    with pytest.raises(ValueError, match="whose roots are not the requests' newest tokens"):
        engine.run()


@pytest.mark.parametrize(
    "draft",
    [([5, 6, 7], [0, 1, 2], [-0.1, -0.1, -0.1], 1), ([7, 8, 9], [-1, 0, 1], [-2.0, -0.1, -0.5], 1)],
    ids=["parents that count the root", "log-probabilities of tokens and not of paths"],
)
@pytest.mark.parametrize("merged", [False, True])
def test_nodes_before_their_parents_are_refused(draft: Any, merged: bool) -> None:
    drafter = Merge([Written(draft), Lookahead()]) if merged else Written(draft)
    with pytest.raises(ValueError, match="does not stand behind its parent"):
        generate(build("llama"), torch.tensor([[5, 9, 20]]), drafter=drafter, max_new_tokens=6)


def test_mistakes_raise_clear_errors() -> None:
    engine = Engine(build("llama"))
    with pytest.raises(TypeError, match=r"give tokenizer\(text\)\.input_ids"):
        engine.add("The sea", max_new_tokens=4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"pass draftree\.SamplingParams\(\.\.\.\), or options by name"):
        engine.add([5, 9], {"max_new_tokens": 4})  # type: ignore[arg-type]
    for name in ("inputs_embeds", "past_key_values", "position_ids", "token_type_ids"):
        with pytest.raises(TypeError, match=f"{name} has no effect here"):
            generate(build("llama"), torch.tensor([[5, 9]]), **{name: None})
