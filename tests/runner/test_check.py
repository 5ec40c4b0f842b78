"""The look at an unknown model: it passes what works and refuses what ignores masks or positions."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import zoo
from few import crossed
from runner_driver import one_thread, runners_for  # noqa: F401
from transformers import LlamaForCausalLM, MistralForCausalLM

from draftree.runner.hooked.families import TESTED_FAMILIES
from draftree.runner.hooked.runner import HookedRunner, check_trees
from draftree.runner.positions import LayerKind
from draftree.runner.target import inspect_model


@pytest.mark.parametrize(
    ("name", "dtype"),
    crossed(
        ["llama", "gemma3", "mistral-window", "bloom", "t5", "bart", "deepseek_v3"], [torch.float32, torch.bfloat16]
    ),
)
def test_working_models_pass(name: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(zoo.build(name)).to(dtype)
    for runner in runners_for(model):
        assert 0 <= check_trees(runner) < (1e-4 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "ministral3", "doge", "phi4_multimodal"])
def test_windows_of_families_whose_layers_all_have_one(model_type: str) -> None:
    settings = {"head_dim": 16, "sliding_window": 20}
    if model_type == "qwen3_moe":
        settings |= {"use_sliding_window": True, "num_experts": 4, "num_experts_per_tok": 2}
    if model_type == "phi4_multimodal":  # whose other parts have 870 million parameters
        small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
        settings |= {"audio_config": small | {"num_blocks": 1}, "vision_config": small | {"num_hidden_layers": 1}}
    model = zoo.construct(zoo.Member(model_type, model_type, zoo.LLAMA_LIKE | settings))
    target = inspect_model(model)
    assert {kind.window for kind in target.kinds} == {20}
    assert check_trees(HookedRunner(target)) < 1e-4


def test_a_window_that_no_layer_is_known_to_have_is_reached() -> None:
    model = zoo.construct(zoo.MEMBERS["mistral-window"], sliding_window=20)
    target = inspect_model(model)
    blind = dataclasses.replace(target, kinds=(LayerKind("full_attention"),) * len(target.kinds))
    with pytest.raises(ValueError, match="are not those of its branches"):
        check_trees(HookedRunner(blind))


class CountsColumns(LlamaForCausalLM):
    """Ignores explicit positions, as a model does that counts what its cache holds."""

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class AlwaysCausal(LlamaForCausalLM):
    """Builds its own mask whatever it is given."""

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class HiddenWindow(MistralForCausalLM):
    """Has a window that its config does not name."""

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        self.config.sliding_window = 4
        try:
            return super().forward(*args, attention_mask=attention_mask, **kwargs)
        finally:
            self.config.sliding_window = None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("like", "kind"), [("llama", CountsColumns), ("llama", AlwaysCausal), ("mistral", HiddenWindow)]
)
def test_models_that_cannot_be_driven_are_refused(like: str, kind: Any, dtype: torch.dtype) -> None:
    stock = zoo.build(like)
    model = kind(copy.deepcopy(stock.config)).eval()
    model.load_state_dict(stock.state_dict())
    runner = HookedRunner(inspect_model(model.to(dtype)))
    with pytest.raises(ValueError, match="are not those of its branches"):
        check_trees(runner)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("arcee", {}),
        ("apertus", {}),
        ("ministral", {"head_dim": 16, "sliding_window": 8}),
        ("helium", {"head_dim": 16}),
        ("ernie4_5", {"head_dim": 16}),
        ("hunyuan_v1_dense", {"head_dim": 16}),
    ],
)
def test_families_outside_the_zoo_are_tried(model_type: str, settings: dict[str, Any]) -> None:
    assert model_type not in TESTED_FAMILIES
    model = zoo.construct(zoo.Member(model_type, model_type, zoo.LLAMA_LIKE | settings))
    assert check_trees(HookedRunner(inspect_model(model))) < 1e-4


@pytest.mark.parametrize(
    ("member", "settings"),
    [
        ("mistral-window", {"layer_types": ["full_attention"] * 4}),  # all its layers have the window even so
        ("llama4", {"no_rope_layers": [1, 0, 1, 0], "floor_scale": 4, "attn_scale": 0.5}),  # scales by position
    ],
)
def test_settings_that_change_what_layers_see(member: str, settings: dict[str, Any]) -> None:
    model = zoo.construct(zoo.MEMBERS[member], **settings)
    for runner in runners_for(model):
        assert check_trees(runner) < 1e-4
