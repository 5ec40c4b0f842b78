"""Alterations that look like transformers' own code, and models that are as they were although something moved."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from few import few
from generate_driver import prompts
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.activations import ACT2FN
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama

import draftree
from draftree.engine import Engine, Rules, generate
from draftree.runner import open_runner
from draftree.runner.weights import stock

IDS = prompts((16,))[0]
Patch = pytest.MonkeyPatch


def fresh(name: str = "llama", **settings: Any) -> Any:
    return zoo.construct(zoo.MEMBERS[name], **settings)


def theirs(model: Any) -> list[int]:
    ids = torch.tensor([IDS])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    found: list[int] = out[0, len(IDS) :].tolist()
    return found


def ours(model: Any) -> list[int]:
    out = generate(model, torch.tensor([IDS]), drafter=draftree.Lookahead(), max_new_tokens=12, do_sample=False)
    found: list[int] = out.sequences[0, len(IDS) :].tolist()
    return found


def wrapped_twice(_: Any, patch: Patch) -> None:
    """The user's function stands between torch's wrapper and the stock one."""
    own = modeling_llama.LlamaMLP.forward

    @torch.no_grad()
    @functools.wraps(own)
    def loud(self: Any, x: Any) -> Any:
        return own(self, x) * -1.5

    patch.setattr(modeling_llama.LlamaMLP, "forward", loud)


def call_of_a_class(_: Any, patch: Patch) -> None:
    """The class gets a method that it did not have when it was first looked at."""
    patch.setattr(
        modeling_llama.LlamaMLP, "__call__", lambda self, x: nn.Module.__call__(self, x) * -1.5, raising=False
    )


def attention_of_one_layer(model: Any, patch: Patch) -> None:
    def turned(*args: Any, **options: Any) -> Any:
        out, weights = sdpa_attention_forward(*args, **options)
        return out * -1.5, weights

    patch.setitem(AttentionInterface._global_mapping, "turned", turned)
    attention = model.model.layers[1].self_attn
    attention.config = copy.copy(attention.config)
    attention.config._attn_implementation = "turned"


def activation_of_a_class(_: Any, patch: Patch) -> None:
    own = modeling_llama.LlamaMLP.__init__

    def relu(self: Any, config: Any) -> None:
        own(self, config)
        self.act_fn = nn.ReLU()

    patch.setattr(modeling_llama.LlamaMLP, "__init__", relu)


ALTERATIONS: dict[str, Callable[[Any, Patch], None]] = {
    "wrapped twice": wrapped_twice,
    "another function of torch": lambda _, patch: patch.setattr(F, "silu", F.relu),
    "another family's function": lambda _, patch: patch.setattr(
        modeling_llama, "apply_rotary_pos_emb", modeling_glm.apply_rotary_pos_emb
    ),
    "call of a class": call_of_a_class,
    "attention of one layer": attention_of_one_layer,
}


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("name", ALTERATIONS)
def test_what_looks_stock_is_obeyed(name: str, when: str, monkeypatch: Patch) -> None:
    model = fresh()
    if when == "between":
        assert ours(model) == theirs(model)
    plain = theirs(model)
    ALTERATIONS[name](model, monkeypatch)
    assert ours(model) == theirs(model) != plain
    assert open_runner(model).name == "hooked"
    monkeypatch.undo()
    assert stock.alteration(fresh()) is None


@pytest.mark.parametrize("name", ["repeat_kv", "pack_gqa", "use_gqa_in_sdpa"])
def test_functions_inside_attention_are_looked_at(name: str, monkeypatch: Patch) -> None:
    own = getattr(sdpa_attention, name)
    monkeypatch.setattr(sdpa_attention, name, lambda *given: own(*given))
    assert name in str(stock.alteration(fresh()))


def test_activations_that_the_configuration_does_not_name(monkeypatch: Patch) -> None:
    model = fresh("gemma")
    for layer in model.model.layers:
        layer.mlp.act_fn.act = torch.tanh  # which GELUTanh holds
    assert ours(model) == theirs(model)
    assert "function 'act'" in str(stock.alteration(model))
    monkeypatch.setitem(ACT2FN, "silu", nn.ReLU)
    model = fresh(vocab_size=139)
    assert "activation 'silu'" in str(stock.alteration(model))


def test_a_model_made_under_a_patch_stays_as_it_was_made(monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        activation_of_a_class(None, patch)
        model = fresh(vocab_size=151)
        assert ours(model) == theirs(model)
    assert ours(model) == theirs(model) != ours(fresh(vocab_size=151))
    with monkeypatch.context() as patch:
        patch.setattr(stock, "ACTIVATIONS", {})  # as where it was replaced before draftree was imported
        patch.setitem(ACT2FN, "silu", nn.ReLU)
        model = fresh(vocab_size=157)
        assert ours(model) == theirs(model)


def test_masks_and_windows_that_a_tree_cannot_follow_are_refused(monkeypatch: Patch) -> None:
    model = fresh("mistral-window")
    model.config = copy.deepcopy(model.config)
    model.config.sliding_window = None  # Hugging Face's mask is made by the decoder's own configuration
    with pytest.raises(ValueError, match="are not those of its branches"):
        ours(model)
    own = AttentionMaskInterface._global_mapping["sdpa"]

    def near(*args: Any, mask_function: Any, **options: Any) -> Any:
        window = masking_utils.and_masks(mask_function, masking_utils.sliding_window_overlay(4))
        return own(*args, mask_function=window, **{**options, "allow_is_causal_skip": False})

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sdpa", near)
    with pytest.raises(ValueError, match="are not those of its branches"):
        ours(fresh())


@pytest.mark.parametrize("name", few([*zoo.MEMBERS], [*zoo.MEMBERS][::3]))
def test_members_of_the_zoo_are_stock(name: str) -> None:
    assert stock.alteration(zoo.build(name)) is None


# ---------------------------------------------------------------- as they were


def answer(engine: Engine, prompt: list[int]) -> list[int]:
    request = engine.add(prompt, Rules(3))
    engine.run()
    return request.tokens


DYNAMIC = {
    "full_attention": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("phi3-longrope", {}),
        ("llama-dynamic", {}),
        ("gemma3", {"max_position_embeddings": 64, "rope_parameters": DYNAMIC}),
    ],
)
def test_a_stock_pass_of_any_length_changes_no_model(name: str, settings: dict[str, Any]) -> None:
    model = fresh(name, **settings)
    with Engine(model) as engine:
        first = answer(engine, IDS)
        for length in (10, 100, 10):  # across the length at which frequencies change
            with torch.no_grad():
                model(torch.tensor([[5] * length]))
            assert answer(engine, IDS) == first


def test_a_pass_that_checks_the_model_does_not_change_it() -> None:
    model = fresh("phi3-longrope")
    model.model.layers[1].mlp.register_forward_hook(lambda module, given, out: out * 0.9)
    with Engine(model) as engine:
        assert len(answer(engine, IDS)) == 3


def test_nothing_is_kept_where_a_hook_may_do_something_else_the_next_time() -> None:
    model, strength = fresh(), [1.5]
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, out: out * strength[0])
    with Engine(model, slots=1, keep_prefixes=True) as engine:
        turn = [*IDS, *answer(engine, IDS), 4]
        strength[0] = -0.5
        found = answer(engine, turn)
    with Engine(model, slots=1) as engine:
        assert answer(engine, turn) == found


def test_bild_heeds_a_small_model_that_has_changed() -> None:
    small = fresh(num_hidden_layers=2)
    drafter = draftree.BiLD(small, fallback_threshold=0.0, rollback_threshold=None)

    def ask(engine: Engine) -> list[int]:
        request = engine.add(IDS, Rules(20))
        engine.run()
        return request.tokens

    with Engine(fresh(), drafter=drafter) as engine:
        before = ask(engine)
        small.lm_head.weight.data.neg_()
        after = ask(engine)
    with Engine(fresh(), drafter=drafter) as engine:
        assert ask(engine) == after != before


def test_a_configuration_that_cannot_be_pickled_is_copied() -> None:
    model = fresh()
    model.config.note = lambda: None
    assert stock.alteration(model) is None


def test_what_was_built_under_a_patch_is_not_believed(monkeypatch: Patch) -> None:
    class Mine(modeling_llama.LlamaMLP):
        pass

    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "LlamaMLP", Mine)
        ours(fresh(vocab_size=149))
    assert stock.alteration(fresh(vocab_size=149)) is None


def test_a_model_compiled_by_torch_is_stock() -> None:
    model = fresh()
    model.compile(backend="eager")
    assert stock.alteration(model) is None


@pytest.mark.parametrize(("name", "linear"), [("llama", "up_proj"), ("phi3", "gate_up_proj")])
def test_packed_weights_count_as_they_are(name: str, linear: str) -> None:
    model = fresh(name)
    draftree.pack_weights(model)
    if open_runner(model).name != "cpu":
        pytest.skip("no compiled layers here")
    with Engine(model) as engine:
        answer(engine, IDS)
        getattr(model.model.layers[0].mlp, linear).panels.neg_()
        found = answer(engine, IDS)
    with Engine(model) as engine:
        assert answer(engine, IDS) == found
