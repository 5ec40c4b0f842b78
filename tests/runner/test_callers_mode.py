"""Code of the caller's is called as Hugging Face calls it: without gradients, yet with tensors that can have some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafters_for_tests import RandomTree
from generate_driver import LENGTHS, NEW, hf, prompts, references_of, same
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList
from transformers.generation import UnbatchedClassifierFreeGuidanceLogitsProcessor
from zoo import build

from draftree import Engine, custom_generate, generate
from draftree.shaping import Fixed

IDS = torch.tensor(prompts(LENGTHS[:1]))
RUNNERS = pytest.mark.parametrize("runner", ["auto", "eager", "hooked"])


class Steered(LogitsProcessor):
    """Follows a gradient, and counts tokens in a tensor of its own."""

    def __init__(self) -> None:
        self.counts: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        assert not input_ids.is_inference()
        assert not scores.is_inference()
        if self.counts is None:
            self.counts = torch.zeros(scores.shape[-1])
        self.counts[input_ids[0, -1]] += 1
        with torch.enable_grad():
            free = scores.clone().requires_grad_()
            (slope,) = torch.autograd.grad(free.softmax(-1)[:, :10].sum(), free)
        return scores + 50 * slope - self.counts


@RUNNERS
@pytest.mark.parametrize("sample", [False, True])
def test_processors(runner: str, sample: bool) -> None:
    processor = Steered()
    expected = hf(build("llama"), IDS, logits_processor=[Steered()], do_sample=sample, seed=4)
    references = references_of(IDS.tolist(), expected)
    loop = custom_generate(RandomTree(references, 1), shape=Fixed(16), runner=runner, seed=4)
    options = {"max_new_tokens": NEW, "do_sample": sample}
    out = build("llama").generate(IDS, custom_generate=loop, logits_processor=[processor], **options)
    same(out, expected)
    assert processor.counts is not None
    processor.counts.zero_()  # in another mode than it was made in, were that inference mode


def test_what_hugging_faces_own_processors_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of the caller's, and for guidance the model, which may keep tensors of its passes."""
    seen: list[bool] = []

    def allowed(row: int, prefix: Tensor) -> list[int]:
        seen.append(prefix.is_inference() or torch.is_inference_mode_enabled())
        return [*range(97)]

    given = {"max_new_tokens": 4, "do_sample": False, "prefix_allowed_tokens_fn": allowed}
    build("llama").generate(IDS, custom_generate=custom_generate(), **given)
    guided = UnbatchedClassifierFreeGuidanceLogitsProcessor.get_unconditional_logits

    def watched(self: Any, ids: Tensor) -> Any:
        seen.append(torch.is_inference_mode_enabled())
        return guided(self, ids)

    monkeypatch.setattr(UnbatchedClassifierFreeGuidanceLogitsProcessor, "get_unconditional_logits", watched)
    generate(build("llama"), IDS, max_new_tokens=4, guidance_scale=1.5)
    assert len(seen) == 8
    assert not any(seen)


class Reading(StoppingCriteria):
    def __init__(self) -> None:
        self.read: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        assert not torch.is_grad_enabled()
        self.read.append(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Keeping:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        self.kept.append(value)

    def end(self) -> None:
        pass


@RUNNERS
def test_criteria_streamers_and_callbacks(runner: str) -> None:
    criterion, streamer, table = Reading(), Keeping(), torch.nn.Embedding(97, 4)
    criteria = StoppingCriteriaList([criterion])
    generate(build("llama"), IDS, runner=runner, max_new_tokens=6, stopping_criteria=criteria, streamer=streamer)
    for tensor in (*criterion.read, *streamer.kept):
        table(tensor).sum().backward()
    heard: list[Tensor] = []
    with Engine(build("llama"), runner=runner) as engine:
        engine.add(IDS[0], max_new_tokens=6, on_token=lambda emitted: heard.append(torch.tensor(emitted.token)))
        engine.run()
    table(torch.stack(heard)).sum().backward()
