"""Logits where they are asked for: of some rows of a pass, and afterwards of tapped rows."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from in_model_driver import make
from runner_driver import BUSHY, Run, Tree, difference, runners_for
from torch import Tensor
from transformers import AutoConfig, Gemma3Config, Gemma3ForConditionalGeneration
from zoo import CAUSAL, ENCODER_DECODER, MEMBERS, build, construct, draw_weights

from draftree.engine import Engine, SamplingParams
from draftree.runner import EagerRunner, HookedRunner, inspect_model
from draftree.runner.cuda_graphs.runner import CudaGraphRunner
from draftree.runner.plan import Plan, Surgery
from draftree.shaping import Fixed


@pytest.mark.parametrize("name", [m.id for m in CAUSAL + ENCODER_DECODER])
def test_tapped_states_give_the_logits_of_the_pass(name: str) -> None:
    """Scaled (Cohere, Granite, T5), bent (Gemma 2) or shifted ones among them; 256 rows or one make no difference."""
    model = build(name)
    bushy = Tree(BUSHY, 2)
    for runner in runners_for(model):
        last = len(runner.target.layers)
        result = Run(runner).prefill().step([bushy], taps=(last,))
        with runner.guard():
            assert difference(runner.logits(result.hidden[last]), result.logits) < 1e-4
            assert difference(runner.logits(result.hidden[last][:, 4:5]), result.logits[:, 4:5]) < 1e-4
            read = runner.close(result.hidden[last])
            assert difference(runner.head(read), model.get_output_embeddings()(read)) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [m.id for m in CAUSAL if "experts" not in m.note])  # near-ties choose among experts
def test_in_16_bits_a_tree_has_the_logits_of_the_stock_model(name: str, dtype: torch.dtype) -> None:
    """On every runner, as far as such numbers go; a few families have angles, norms or biases of another type."""
    model = copy.deepcopy(build(name)).to(dtype)
    target = inspect_model(model)
    bushy = Tree(BUSHY, 2)
    for way in (HookedRunner, EagerRunner, CudaGraphRunner):
        if not way.qualifies(target):
            continue
        run = Run(way(target)).prefill()
        result = run.step([bushy])
        assert run.error([bushy], result) < 0.05 * float(result.logits.abs().max()), way.name


def test_a_bias_on_logits_is_followed() -> None:
    model = construct(MEMBERS["bart"])
    model.final_logits_bias.copy_(torch.randn(model.final_logits_bias.shape))
    runner = HookedRunner(inspect_model(model))
    last = len(runner.target.layers)
    result = Run(runner).prefill().step([Tree(BUSHY, 2)], taps=(last,))
    assert difference(runner.logits(result.hidden[last]), result.logits) < 1e-4


def test_logits_that_cannot_be_followed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = construct(MEMBERS["llama"])
    forward = model.forward

    def squared(*args: object, **kwargs: object) -> object:
        out = forward(*args, **kwargs)
        out.logits = out.logits**2
        return out

    monkeypatch.setattr(model, "forward", squared)
    runner = HookedRunner(inspect_model(model))
    with pytest.raises(ValueError, match="from its last layer to its logits"):
        runner.logits(torch.zeros(1, 1, 64))


def test_only_gemma2s_eager_attention_caps_scores() -> None:
    model = construct(dataclasses.replace(MEMBERS["gemma3"], attention="eager"), attn_logit_softcapping=0.5)
    for runner in runners_for(model):
        run = Run(runner).prefill()
        assert run.error([Tree(BUSHY, 2)], run.step([Tree(BUSHY, 2)])) < 1e-4


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_logits_are_capped_where_the_models_class_does_it(name: str) -> None:
    """Not by a key in the configuration alone: the model for images around Gemma 3 leaves it be."""
    if name == "llama":
        model = construct(MEMBERS[name], final_logit_softcapping=0.5)
    else:
        text = AutoConfig.for_model("gemma3_text", **MEMBERS[name].settings, final_logit_softcapping=0.5)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision = {**sizes, "image_size": 28, "patch_size": 14}
        config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=95)
        model = Gemma3ForConditionalGeneration(config).eval()
        draw_weights(model)
    for runner in runners_for(model):
        last, run = len(runner.target.layers), Run(runner).prefill()
        result = run.step([Tree(BUSHY, 2)], taps=(last,))
        assert run.error([Tree(BUSHY, 2)], result) < 1e-4
        with runner.guard():
            assert difference(runner.logits(result.hidden[last]), result.logits) < 1e-4


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "gemma3", "mpt", "bart"])
def test_rows_without_logits(name: str) -> None:
    """Rows from `last_logit_row` on get none, those that join included, and the others' stay the same."""
    model = build(name)
    bushy = Tree(BUSHY, 2)
    size = bushy.size
    seen = torch.zeros(1, 2, size + 2, dtype=torch.bool)
    seen[:, :, 0] = seen[:, :, -1] = True

    def doubled(hidden: Tensor) -> Tensor:
        return hidden[:, :2] * 2

    grow = Surgery(2, append=doubled, positions=torch.full((1, 2), 25), visible=seen)
    for runner in runners_for(model):
        run = Run(runner).prefill()
        for surgeries in ((), (grow,)):
            whole = run.step([bushy], surgeries=surgeries).logits
            assert whole.shape[1] == size + 2 * len(surgeries)
            part = run.step([bushy], surgeries=surgeries, first_logit_row=2, last_logit_row=size - 1).logits
            assert difference(part, whole[:, 2 : size - 1]) < 1e-5


@pytest.mark.parametrize("kind", ["bita", "hidden-transfer", "medusa"])
def test_the_engine_asks_for_logits_of_trees_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    engine = Engine(model, drafter=make(kind, model), shape=Fixed(6))
    rows: list[tuple[int, int]] = []
    run = engine.runner.run

    def watched(plan: Plan, *args: object) -> object:
        result = run(plan, *args)  # type: ignore[arg-type]
        if plan.taps:  # the last pass prepares nothing
            rows.append((result.logits.shape[1], result.hidden[len(engine.target.layers)].shape[1]))
        return result

    monkeypatch.setattr(engine.runner, "run", watched)
    engine.add([5, 6, 7, 8, 9], SamplingParams(12))
    engine.run()
    factor = {"bita": 4, "hidden-transfer": 4, "medusa": 1}[kind]
    assert rows[1:]
    assert all(deep == factor * scored and scored <= 7 for scored, deep in rows[1:])


@pytest.mark.parametrize("kind", ["bita", "hidden-transfer"])
def test_a_request_without_drafting_gets_no_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    engine = Engine(model, drafter=make(kind, model), shape=Fixed(6))
    bare: list[bool] = []
    run = engine.runner.run

    def watched(plan: Plan, *args: object) -> object:
        bare.append(plan.embeddings is None and not plan.surgeries)
        return run(plan, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.runner, "run", watched)
    engine.add([5, 6, 7], SamplingParams(6, drafting=False))
    engine.run()
    assert len(bare) == 6
    assert all(bare)
    engine.add([5, 6, 7], SamplingParams(6))
    engine.run()
    assert not all(bare)
