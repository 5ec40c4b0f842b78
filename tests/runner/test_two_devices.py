"""A model whose later half lies on another, simulated device, as `device_map="auto"` may place it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from far_device import FAR, FarDevice, moved
from few import crossed
from generate_driver import LENGTHS, NEW, drafters, hf, left_pad, prompts, references_of
from in_model_driver import MAKERS, make
from pruning_driver import randomised_head
from runner_driver import one_thread  # noqa: F401
from zoo import build

from draftree.drafting import Drafter, Merge
from draftree.engine import Engine, Request, SamplingParams
from draftree.pruning import EarlyHead, EarlyPruning
from draftree.shaping import Fixed

FAMILIES = ("llama", "gemma2", "gpt_neox")


def spread(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return the model with accelerate's hooks for two devices; its ids and embeddings lie on the CPU."""
    model = copy.deepcopy(build(name)).to(dtype)
    decoder = model.get_decoder()
    layers: Any = next(m for m in decoder.children() if isinstance(m, torch.nn.ModuleList))
    for layer in layers[len(layers) // 2 :]:
        add_hook_to_module(moved(layer), AlignDevicesHook(execution_device=FAR, io_same_device=False))
    norm = getattr(decoder, "norm", None) or decoder.final_layer_norm
    add_hook_to_module(moved(norm), AlignDevicesHook(execution_device=FAR))
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # not the embedding's, where they were tied
    add_hook_to_module(moved(head), AlignDevicesHook(execution_device=FAR))
    add_hook_to_module(model, AlignDevicesHook(execution_device="cpu", io_same_device=True), append=True)
    return model


def drafter_of(kind: str, model: Any, references: Any) -> Drafter | None:
    if kind == "merge":
        return Merge([drafters(references)["lookahead"](), make("hidden-transfer-one-layer", model)])
    return make(kind, model) if kind in MAKERS else drafters(references)[kind]()


def check(requests: list[Request], expected: torch.Tensor) -> None:
    """Compare answers with those [B, n] of Hugging Face on one device."""
    for request, text in zip(requests, expected, strict=True):
        assert request.error is None
        assert request.tokens == text.tolist()[: len(request.tokens)]


KINDS = [*MAKERS, "merge", "lookahead"]


@pytest.mark.parametrize(("name", "kind"), crossed(FAMILIES, KINDS))
def test_the_text_is_that_of_one_device(name: str, kind: str) -> None:
    rows = prompts(LENGTHS[:2])
    ids, mask = left_pad(rows)
    expected = hf(build(name), ids, mask)
    with FarDevice():
        drafter = drafter_of(kind, build(name), references_of(rows, expected))
        engine = Engine(spread(name), runner="hooked", drafter=drafter, slots=2, shape=Fixed(9))
        requests = [engine.add(row, SamplingParams(max_new_tokens=NEW // 2, eos_token_ids=(2,))) for row in rows]
        engine.run()
    check(requests, expected[:, ids.shape[1] :])
    assert sum(request.stats.drafted for request in requests) > 0


def test_trees_are_pruned_in_the_later_half() -> None:
    """Prune rows there, so that fewer rows join behind them."""
    rows = prompts(LENGTHS[:2])
    ids, mask = left_pad(rows)
    expected = hf(build("llama"), ids, mask)
    early = EarlyPruning(randomised_head(EarlyHead.fresh(build("llama"), layer=3)), top_k=20, always=True)
    with FarDevice():
        drafter = make("hidden-transfer-one-layer", build("llama"))
        model = spread("llama")
        engine = Engine(model, runner="hooked", drafter=drafter, pruner=early, slots=2, shape=Fixed(9))
        requests = [engine.add(row, SamplingParams(max_new_tokens=NEW // 2, eos_token_ids=(2,))) for row in rows]
        engine.run()
    check(requests, expected[:, ids.shape[1] :])
    assert sum(request.stats.pruned for request in requests) > 0
