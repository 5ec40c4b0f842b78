"""A model that was changed between two calls answers with its new weights, however they were changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from few import few
from zoo import CAUSAL, CORE, ENCODER_DECODER, MEMBERS, build, construct

import draftree
from draftree.engine import Engine, Rules
from draftree.runner import inspect_model, open_runner
from draftree.runner.weights import checksum
from draftree.runner.weights.checksum import tensors_checksum, weights_checksums

PROMPT = torch.tensor([[5, 9, 3, 17, 4]])


def by_fused_optimizer(model: Any) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    model(PROMPT, labels=PROMPT).loss.backward()
    optimizer.step()
    model.eval()


def by_data(model: Any) -> None:
    model.get_output_embeddings().weight.data.neg_()


def by_numpy(model: Any) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight.numpy()[5:20] *= -3.0


def by_assigning_data(model: Any) -> None:
    for parameter in model.model.layers[0].parameters():
        parameter.data = -parameter.data


WAYS = (by_fused_optimizer, by_data, by_numpy, by_assigning_data)


def own(model: Any) -> list[int]:
    with torch.no_grad():
        return model.generate(PROMPT, max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()


def ours(model: Any, runner: str, drafter: Any = None) -> list[int]:
    out = draftree.generate(model, PROMPT, drafter=drafter, runner=runner, max_new_tokens=12, do_sample=False)
    return out.sequences[0].tolist()


@pytest.mark.parametrize("runner", ["auto", "eager", "hooked", "cuda_graphs"])
@pytest.mark.parametrize("change", WAYS)
def test_the_next_answer_is_that_of_the_changed_model(runner: str, change: Callable[[Any], None]) -> None:
    model, drafter = construct(MEMBERS["llama"]), draftree.Lookahead()
    before = own(model)
    assert ours(model, runner, drafter) == ours(model, runner) == before
    change(model)
    after = own(model)
    assert after != before, "the change is one that shows"
    assert ours(model, runner) == after
    assert ours(model, runner, drafter) == after


@pytest.mark.parametrize("change", WAYS[:3])
def test_an_engine_does_not_answer_with_old_weights(change: Callable[[Any], None]) -> None:
    model = construct(MEMBERS["llama"])
    engine = Engine(model, slots=2)
    first, second = engine.add([5, 9, 3]), engine.add([4, 4])
    engine.run()
    assert first.output
    assert second.output
    engine.add([7])
    change(model)
    engine.add([8])  # while requests run nothing is looked at
    engine.run()
    with pytest.raises(ValueError, match="model has changed since this engine was made"):
        engine.add([5, 9, 3])
    assert Engine(model).add([5, 9, 3]) is not None


@pytest.mark.parametrize("runner", ["cpu", "eager", "in_place"])
@pytest.mark.parametrize("way", ["cancelled", "refused"])
def test_a_request_that_did_not_run_is_no_reason_not_to_look(runner: str, way: str) -> None:
    model, prompt = construct(MEMBERS["llama"]), [5, 9, 3, 17, 4]
    engine = Engine(model, runner=runner, keep_prefixes=True)
    before = engine.add(prompt, max_new_tokens=6)
    engine.run()
    if way == "cancelled":
        engine.cancel(engine.add(prompt))
    else:
        with pytest.raises(ValueError, match="prompt is empty"):
            engine.add([])
    model.model.layers[0].mlp.down_proj.weight.data.mul_(-1.5)
    if runner == "in_place":
        request = engine.add(prompt, max_new_tokens=6)
        engine.run()
        assert request.reused == 0
        assert request.tokens == ours_of(model, prompt, runner) != before.tokens
    else:
        with pytest.raises(ValueError, match="model has changed since this engine was made"):
            engine.add(prompt)


def test_what_compiled_layers_read_lives_as_long_as_they() -> None:
    """Also where the model gets other tensors of the same numbers in the middle of an answer."""
    found = []
    for moved in (False, True):
        model = construct(MEMBERS["t5"])
        engine = Engine(model)
        assert engine.runner.name == "cpu"
        request = engine.add([0], max_new_tokens=20, encoder_input=PROMPT[0])
        engine.step()
        if moved:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
            held = [torch.full((n,), 7.0) for n in (8, 16, 32, 64, 128) for _ in range(2000)]  # in the freed memory
        engine.run()
        found.append(request.tokens)
    assert found[0] == found[1], len(held)


def test_a_change_before_the_first_request_shows() -> None:
    model = construct(MEMBERS["llama"])
    engine = Engine(model)
    by_data(model)
    with pytest.raises(ValueError, match="make a new Engine"):
        engine.add([1, 2])


def test_a_runner_opened_before_the_change_is_refused() -> None:
    model = construct(MEMBERS["llama"])
    runner: Any = open_runner(model)
    ours(model, runner)
    by_data(model)
    with pytest.raises(ValueError, match="since this runner was opened"):
        ours(model, runner)
    with pytest.raises(ValueError, match="since this runner was opened"):
        model.generate(PROMPT, custom_generate=draftree.custom_generate(runner=runner), max_new_tokens=4)
    assert ours(model, "auto") == own(model)


def test_packed_weights_that_change_are_noticed() -> None:
    model = construct(MEMBERS["llama"])
    draftree.runner.pack_weights(model)
    before = ours(model, "auto")
    model.model.layers[0].mlp.down_proj.panels.neg_()
    model.model.layers[1].mlp.down_proj.panels.data.neg_()
    assert ours(model, "auto") == own(model) != before


def test_an_unchanged_model_keeps_its_runner() -> None:
    model = construct(MEMBERS["llama"])
    assert open_runner(model) is open_runner(model)
    assert not open_runner(model).outdated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])
@pytest.mark.parametrize("count", [1, 3, 127, 4097, 70_001])
@pytest.mark.parametrize("way", ["compiled", "python", "device"])
def test_every_number_counts(dtype: torch.dtype, count: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "python":
        monkeypatch.setattr(checksum, "load_library", lambda: None)
    if way == "device":  # what other devices do, on this one
        monkeypatch.setattr(checksum, "_of_cpu", lambda data: checksum._of_device(torch.from_numpy(data)))
    monkeypatch.setattr(checksum, "CHUNK", 1000)
    tensor = (torch.arange(count) % 7 > 2).to(dtype)
    first = tensors_checksum([tensor])
    assert tensors_checksum([tensor.clone()]) == first
    for place in np.random.default_rng(0).choice(count, min(count, 12), replace=False).tolist():
        changed = tensor.clone()
        changed[place] = 1 - changed[place].long() if dtype != torch.bool else ~changed[place]
        assert tensors_checksum([changed]) != first
    if count > 3:
        assert tensors_checksum([tensor.roll(1)]) != first, "order counts"


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all signs": torch.neg,
    "signs of one row": lambda w: torch.cat([-w[:1], w[1:]]),
    "signs of one column": lambda w: torch.cat([-w[:, :1], w[:, 1:]], 1),
    "signs of two numbers": lambda w: torch.cat([-w[:, :1], w[:, 1:-1], -w[:, -1:]], 1),
    "twice as large": lambda w: w * 2,
    "sixteen times as large": lambda w: w * 16,
    "2 ** 16 times as large": lambda w: w * 2**16,
    "rows turned around": lambda w: w.flip(0),
    "columns turned around": lambda w: w.flip(1),
    "two rows swapped": lambda w: torch.cat([w[1:2], w[:1], w[2:]]),
    "rows moved on": lambda w: w.roll(1, 0),
    "columns moved on": lambda w: w.roll(64, 1),
    "all zero": torch.zeros_like,
    "one row zero": lambda w: torch.cat([w[:1] * 0, w[1:]]),
} | {f"bit {bit} of all": lambda w, bit=bit: (w.view(torch.int32) ^ (1 << bit if bit < 31 else -(2**31))).view(w.dtype)
     for bit in range(32)}  # fmt: skip


@pytest.mark.parametrize("numbers", ["random", "equal"])
@pytest.mark.parametrize("shape", [(64, 128), (112, 64), (512, 1024)])
@pytest.mark.parametrize("way", ["compiled", "python", "device"])
def test_no_change_of_many_numbers_cancels_itself(
    way: str, shape: tuple[int, int], numbers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "python":
        monkeypatch.setattr(checksum, "load_library", lambda: None)
    if way == "device":
        monkeypatch.setattr(checksum, "_of_cpu", lambda data: checksum._of_device(torch.from_numpy(data)))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator) if numbers == "random" else torch.full(shape, 0.37)
    found = {tensors_checksum([weight]): "none"}
    for name, change in CHANGES.items():
        changed = change(weight).contiguous()
        if not torch.equal(changed.view(torch.int32), weight.view(torch.int32)):
            digest = tensors_checksum([changed])
            assert digest not in found, (name, found[digest])
            if name != "all signs":  # which is bit 31 of all
                found[digest] = name


@pytest.mark.parametrize("name", few([member.id for member in CAUSAL + ENCODER_DECODER], CORE))
def test_every_family_on_every_runner_that_has_copies(name: str) -> None:
    """One weight after the other, of a layer far behind or of the embedding: one text before and one behind each."""
    model = construct(MEMBERS[name])
    last = inspect_model(model).layers[-1]
    changed, before = 0, ours(model, "auto")
    for weight in (*(p for p in last.parameters() if p.dim() > 1), model.get_input_embeddings().weight):
        weight.data.copy_(weight.data.flip(0) * -2)
        after = own(model)
        assert ours(model, "auto") == after
        changed += after != before
        before = after
    assert changed


@pytest.mark.parametrize("change", ["all signs", "sixteen times as large", "rows turned around"])
@pytest.mark.parametrize("runner", ["cpu", "eager", "cuda_graphs"])
def test_an_engine_refuses_such_changes(runner: str, change: str) -> None:
    model = construct(MEMBERS["llama"])
    engine = Engine(model, runner=runner)
    engine.add([5, 6, 7], Rules(max_new_tokens=3))
    engine.run()
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data.copy_(CHANGES[change](layer.mlp.up_proj.weight.data))
    with pytest.raises(ValueError, match="The model has changed since this engine was made"):
        engine.add([5, 6, 7])
    assert ours(model, runner) == own(model)


def test_threads_do_not_change_it() -> None:
    model = build("llama")
    threads = torch.get_num_threads()
    try:
        found = set()
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.add(tuple(weights_checksums(model).values()))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


def by_panels(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.panels.mul_(-1.5)


@pytest.mark.parametrize("runner", ["hooked", "in_place", "cpu"])
def test_keys_that_old_weights_made_are_not_taken_over(runner: str) -> None:
    """Passes read the weights where the model has them, so that nothing is copied but what earlier prompts left."""
    model = construct(MEMBERS["llama"])
    if runner == "cpu":
        draftree.pack_weights(model)
    begun = [5, 6, 7, 8, 9, 10]
    with draftree.Engine(model, slots=2, keep_prefixes=True, runner=runner) as engine:
        assert engine.runner.name == runner
        first = engine.add(begun, max_new_tokens=6)
        engine.run()
        again = engine.add([*begun, *first.tokens, 4], max_new_tokens=6)
        engine.run()
        assert again.reused == len(begun) + len(first.tokens) - 1, "as nothing has changed"
        with torch.no_grad():
            if runner == "cpu":
                by_panels(model)
            else:
                model.model.layers[0].mlp.down_proj.weight.data.mul_(-1.5)
        changed = engine.add([*begun, *first.tokens, 4], max_new_tokens=6)
        engine.run()
        assert changed.reused == 0
        assert changed.tokens == ours_of(model, [*begun, *first.tokens, 4], runner)
        assert changed.tokens != again.tokens


def ours_of(model: Any, prompt: list[int], runner: str) -> list[int]:
    out = draftree.generate(model, torch.tensor([prompt]), runner=runner, max_new_tokens=6, do_sample=False)
    return out.sequences[0, len(prompt) :].tolist()


def test_weights_that_are_read_where_they_are_need_no_comparing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = construct(MEMBERS["llama"])
    draftree.pack_weights(model)
    looked: list[int] = []
    summed = checksum._of_cpu
    monkeypatch.setattr(checksum, "_of_cpu", lambda data: looked.append(data.nbytes) or summed(data))
    ours(model, "cpu")
    looked.clear()
    ours(model, "cpu")
    panels = sum(module.panels.nbytes for module in model.modules() if hasattr(module, "panels"))
    assert 0 < sum(looked) < sum(t.nbytes for t in model.parameters()) + 10_000 < panels
    by_panels(model)
    assert ours(model, "cpu") == own(model)


def test_parts_of_quantised_weights_are_compared() -> None:
    model = construct(MEMBERS["llama"])
    from torch.testing._internal.two_tensor import TwoTensor

    one, other = torch.randn(8, 8), torch.randn(8, 8)
    weight = torch.nn.Parameter(TwoTensor(one, other), requires_grad=False)
    model.register_parameter("halves", weight)
    before = [*checksum.weights_checksums(model).values()]
    other[3, 3] += 1
    after = [*checksum.weights_checksums(model).values()]
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


@pytest.mark.parametrize("runner", ["in_place", "eager"])
def test_numbers_that_a_runner_works_with_in_another_form_are_compared(runner: str) -> None:
    """Norms that are stored less one, and angles: copies, wherever the weights are read."""
    model = construct(MEMBERS["gemma"])
    before = ours(model, runner)
    model.model.layers[0].input_layernorm.weight.data.add_(1.5)
    assert ours(model, runner) == own(model) != before
    model = construct(MEMBERS["llama"])
    before = ours(model, runner)
    model.model.rotary_emb.inv_freq.mul_(0.02)
    assert ours(model, runner) == own(model) != before
