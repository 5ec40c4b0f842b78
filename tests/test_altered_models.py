"""Models that their users have altered, before draftree sees them or between two texts, answer as Hugging Face says.

The runners that compute layers themselves know stock models alone; whatever is altered in another way than its numbers
goes through the model's own `forward`.
"""

from __future__ import annotations

import copy
import functools
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from few import crossed, few
from generate_driver import left_pad, prompts
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.utils import ModelOutput

import draftree
from draftree.engine import generate
from draftree.runner import open_runner
from draftree.runner.weights.stock import _stocks, alteration

IDS, MASK = left_pad(prompts())
DRAFTERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "lookahead": draftree.Lookahead,
    "jacobi": draftree.Jacobi,
}
Patch = pytest.MonkeyPatch


def fresh(family: str = "llama") -> Any:
    return copy.deepcopy(zoo.build(family))


def stock_text(model: Any) -> list[list[int]]:
    found: list[list[int]] = model.generate(IDS, attention_mask=MASK, max_new_tokens=12, do_sample=False).tolist()
    return found


@functools.cache
def unaltered() -> list[list[int]]:
    """The stock text of `fresh()`; what is patched for all models would change it, so it is asked for before."""
    return stock_text(fresh())


def text(model: Any, drafter: str) -> list[list[int]]:
    out = generate(model, IDS, MASK, drafter=DRAFTERS[drafter](), max_new_tokens=12)
    found: list[list[int]] = out.sequences.tolist()
    return found


def layer(model: Any, i: int = 1) -> Any:
    return model.model.layers[i]


def louder(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with its output, or the first of several, times -1.5."""

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        found = method(*args, **options)
        if isinstance(found, ModelOutput):
            found.last_hidden_state = found.last_hidden_state * -1.5
            return found
        return (found[0] * -1.5, *found[1:]) if isinstance(found, tuple) else found * -1.5

    return call


def on_the_object(part: Callable[[Any], Any]) -> Callable[[Any, Patch], None]:
    def patch(model: Any, _: Patch) -> None:
        module = part(model)
        module.forward = louder(module.forward)

    return patch


def on_the_class(kind: type) -> Callable[[Any, Patch], None]:
    return lambda model, patch: patch.setattr(kind, "forward", louder(kind.forward))  # type: ignore[attr-defined]


def patched_model(model: Any, _: Patch) -> None:
    method = type(model).forward

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        out = method(self, *args, **options)
        out.logits = out.logits + torch.arange(out.logits.shape[-1]) * 0.05
        return out

    model.forward = types.MethodType(forward, model)


class Doubled(nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2 + 0.1


def doubled_head(model: Any, _: Patch) -> None:
    head = Doubled(model.config.hidden_size, model.config.vocab_size, bias=False)
    head.weight = nn.Parameter(model.lm_head.weight.detach().flip(0))
    model.lm_head = head


def biased(model: Any, _: Patch) -> None:
    old = layer(model).self_attn.q_proj
    new = nn.Linear(old.in_features, old.out_features, bias=True)
    new.weight = nn.Parameter(old.weight.detach())
    nn.init.normal_(new.bias)
    layer(model).self_attn.q_proj = new


def fewer_heads(model: Any, _: Patch) -> None:
    """Half of the query heads of one layer are pruned."""
    attention = layer(model).self_attn
    old, kept = attention.q_proj, attention.q_proj.out_features // 2
    attention.q_proj = nn.Linear(old.in_features, kept, bias=False)
    attention.q_proj.weight = nn.Parameter(old.weight.detach()[:kept].clone())
    old = attention.o_proj
    attention.o_proj = nn.Linear(kept, old.out_features, bias=False)
    attention.o_proj.weight = nn.Parameter(old.weight.detach()[:, :kept].clone())
    attention.num_key_value_groups //= 2


def activation_function(model: Any, _: Patch) -> None:
    del layer(model).mlp.act_fn
    layer(model).mlp.act_fn = torch.tanh


def setting(part: Callable[[Any], Any], name: str, value: Any) -> Callable[[Any, Patch], None]:
    return lambda model, patch: setattr(part(model), name, value)


def norm_weight(change: Callable[[Any], Any]) -> Callable[[Any, Patch], None]:
    def patch(model: Any, _: Patch) -> None:
        norm = layer(model).input_layernorm
        norm.weight = nn.Parameter(change(norm.weight.detach()))

    return patch


def every_module(register: Callable[..., Any], hook: Callable[..., Any]) -> Callable[[Any, Patch], Any]:
    return lambda model, patch: register(hook)


def loud_linear(module: Any, args: Any, out: Any) -> Any:
    return out * -1.5 if isinstance(module, nn.Linear) else None


def loud_input(module: Any, args: Any) -> Any:
    return (args[0] * -1.5,) if isinstance(module, nn.Linear) else None


def loud_function(place: Any, name: str) -> Callable[[Any, Patch], None]:
    return lambda model, patch: patch.setattr(place, name, louder(getattr(place, name)))


def inverse_frequencies(model: Any, _: Patch) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.3)


ALTERATIONS: dict[str, Callable[[Any, Patch], Any]] = {
    "forward of one MLP": on_the_object(lambda m: layer(m).mlp),
    "forward of one layer": on_the_object(layer),
    "forward of one norm": on_the_object(lambda m: layer(m).input_layernorm),
    "forward of one linear": on_the_object(lambda m: layer(m).self_attn.o_proj),
    "forward of the head": on_the_object(lambda m: m.lm_head),
    "forward of the embedding": on_the_object(lambda m: m.model.embed_tokens),
    "forward of the model": patched_model,
    "class of MLPs": on_the_class(modeling_llama.LlamaMLP),
    "class of norms": on_the_class(modeling_llama.LlamaRMSNorm),
    "function of rotation": loud_function(modeling_llama, "rotate_half"),
    "torch's attention": loud_function(F, "scaled_dot_product_attention"),
    "torch's linear": loud_function(F, "linear"),
    "torch's silu": loud_function(F, "silu"),
    "torch's embedding": loud_function(F, "embedding"),
    "transformers' attention": lambda model, patch: patch.setitem(
        ALL_ATTENTION_FUNCTIONS, "sdpa", louder(ALL_ATTENTION_FUNCTIONS["sdpa"])
    ),
    "hook on every module": every_module(register_module_forward_hook, loud_linear),
    "hook before every module": every_module(register_module_forward_pre_hook, loud_input),
    "hook on one module": lambda model, patch: layer(model).mlp.register_forward_hook(lambda m, a, out: out * -1.5),
    "another activation": setting(lambda m: layer(m).mlp, "act_fn", nn.ReLU()),
    "another activation function": activation_function,
    "another norm": lambda model, patch: setattr(
        layer(model), "input_layernorm", nn.LayerNorm(model.config.hidden_size)
    ),
    "norm weights in 16 bits": norm_weight(lambda weight: (weight * 1.37).bfloat16()),
    "norm weights with gaps": norm_weight(lambda weight: torch.stack([weight * 1.37, weight], 1)[:, 0]),
    "another head": doubled_head,
    "a bias in one layer": biased,
    "fewer heads in one layer": fewer_heads,
    "epsilon": setting(lambda m: layer(m).input_layernorm, "variance_epsilon", 0.7),
    "scaling": setting(lambda m: layer(m).self_attn, "scaling", 2.0),
    "attention_scaling": setting(lambda m: m.model.rotary_emb, "attention_scaling", 1.9),
    "inverse frequencies": inverse_frequencies,
    "epsilon in the configuration": setting(lambda m: m.config, "rms_norm_eps", 0.7),
    "heads in the configuration": setting(lambda m: m.config, "num_attention_heads", 16),
    "key heads in the configuration": setting(lambda m: m.config, "num_key_value_heads", 1),
    "width in the configuration": setting(lambda m: m.config, "hidden_size", 4096),
    "activation in the configuration": setting(lambda m: m.config, "hidden_act", "relu"),
}


@pytest.fixture(autouse=True)
def _no_hooks_stay() -> Any:
    yield
    hooks = torch.nn.modules.module
    hooks._global_forward_hooks.clear()
    hooks._global_forward_pre_hooks.clear()


@pytest.mark.parametrize(("when", "name", "drafter"), crossed(["before", "between"], [*ALTERATIONS], [*DRAFTERS]))
def test_altered_models_answer_as_they_are(when: str, name: str, drafter: str, monkeypatch: Patch) -> None:
    model, before = fresh(), unaltered()
    if when == "between":
        assert text(model, drafter) == before
    ALTERATIONS[name](model, monkeypatch)
    expected = stock_text(model)
    if name == "forward of the model" and drafter == "jacobi":  # its heads read what the model's head reads
        with pytest.raises(ValueError, match="Cannot follow a 'llama' model from its head to its logits"):
            text(model, drafter)
        return
    assert text(model, drafter) == expected
    if "configuration" not in name:
        assert expected != before


@pytest.mark.parametrize("name", [name for name in ALTERATIONS if name != "inverse frequencies"])
def test_the_refusal_says_what_is_altered(name: str, monkeypatch: Patch) -> None:
    model = fresh()
    assert alteration(model) is None
    ALTERATIONS[name](model, monkeypatch)
    assert open_runner(model).name == "hooked"
    with pytest.raises(ValueError, match=r"drives stock models alone, and .*: use runner='hooked' or runner='auto'\.$"):
        open_runner(model, "eager")


def test_t5_heeds_its_configuration_between_two_texts() -> None:
    """Its `forward` reads from the configuration whether the head's input is scaled."""
    model = fresh("t5")
    assert text(model, "jacobi") == stock_text(model)
    model.config.tie_word_embeddings = not model.config.tie_word_embeddings
    assert text(model, "jacobi") == stock_text(model)


@pytest.mark.parametrize("part", ["mlp", "norm", "encoder"])
def test_altered_t5(part: str) -> None:
    model = fresh("t5")
    assert text(model, "lookahead") == stock_text(model)
    block = (model.encoder if part == "encoder" else model.decoder).block[1].layer[-1]
    if part == "norm":
        block.layer_norm.variance_epsilon = 3.0
    else:
        block.DenseReluDense.forward = louder(block.DenseReluDense.forward)
    assert text(model, "lookahead") == stock_text(model)


class Nosy(nn.Module):
    """Adds the mean of a pass's rows to each of them, so that a row's output depends on its neighbours."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        found = self.inner(x)
        return found + found.mean(1, keepdim=True)


@pytest.mark.parametrize("when", ["before", "between"])
def test_rows_that_depend_on_each_other_are_refused(when: str) -> None:
    model = fresh()
    if when == "between":
        text(model, "lookahead")
    layer(model).mlp = Nosy(layer(model).mlp)
    with pytest.raises(ValueError, match="are not those of its branches"):
        text(model, "lookahead")


def test_looking_leaves_nothing_behind() -> None:
    """The seed of what comes, the configuration and torch's defaults stay as they were."""
    model = fresh()
    state, config = torch.get_rng_state(), model.config.to_json_string()
    assert alteration(model) is None
    assert torch.equal(state, torch.get_rng_state())
    assert model.config.to_json_string() == config


def test_a_class_is_built_once_for_one_configuration() -> None:
    model = zoo.construct(zoo.MEMBERS["llama"], vocab_size=131)
    assert alteration(model) is None
    kept = [*_stocks.values()]
    assert alteration(copy.deepcopy(model)) is None
    assert all(one is other for one, other in zip(kept, _stocks.values(), strict=True))
    model.config.rms_norm_eps = 0.7
    assert "variance_epsilon" in str(alteration(model))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_layers_that_were_taken_out(drafter: str) -> None:
    model = fresh()
    before = text(model, drafter)
    model.model.layers = model.model.layers[:3]
    with pytest.raises(ValueError, match=r"set config\.num_hidden_layers to the number that there are"):
        text(model, drafter)
    model.config.num_hidden_layers = 3
    assert text(model, drafter) == stock_text(model) != before


def subclassed(module: nn.Module, rng: random.Random) -> None:
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": louder(kind.forward)})


def resized(module: nn.Module, rng: random.Random) -> None:
    name = rng.choice(sorted(name for name, value in vars(module).items() if type(value) is float) or [""])
    setattr(module, name or "training", vars(module)[name] * 1.7 + 0.01 if name else False)


ANYWHERE: dict[str, Callable[[nn.Module, random.Random], Any]] = {
    "forward": lambda module, rng: setattr(module, "forward", louder(module.forward)),
    "hook": lambda module, rng: module.register_forward_hook(lambda m, a, out: louder(lambda: out)()),
    "class": subclassed,
    "setting": resized,
}


def altered_anywhere(family: str, number: int) -> None:
    """A random module of the model is altered in a random way, before the first text or between two."""
    rng = random.Random(f"{family} {number}")
    model, drafter, alter = fresh(family), rng.choice(list(DRAFTERS)), rng.choice(list(ANYWHERE))
    modules = [m for _, m in model.named_modules() if m is not model and not isinstance(m, nn.ModuleList)]
    if rng.random() < 0.5:
        assert text(model, drafter) == stock_text(model)
    ANYWHERE[alter](rng.choice(modules), rng)
    try:
        expected = stock_text(model)
    except (RuntimeError, ValueError):  # a family may not run like that at all
        return
    try:
        found = text(model, drafter)
    except ValueError:  # longrope's angles are our own, and a rotary module that gives others is refused
        assert family == "phi3-longrope"
        return
    assert found == expected, (family, number, alter)


# Their short rows of a left-padded batch are not read as Hugging Face reads them.
FAMILIES = [member.id for member in zoo.CAUSAL + zoo.ENCODER_DECODER if zoo.LEFT not in member.note]


@pytest.mark.parametrize("family", few(FAMILIES, zoo.CORE))
def test_any_family_altered_anywhere(family: str) -> None:
    altered_anywhere(family, 0)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_any_family_altered_anywhere_often(family: str) -> None:
    for number in range(1, 12):
        altered_anywhere(family, number)
