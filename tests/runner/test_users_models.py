"""Models that people write or change themselves, otherwise than stock models are: what they say, or a clear refusal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from drafters_for_tests import RandomTree
from generate_driver import NEW, hf, prompts
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from zoo import MEMBERS, build, construct

import draftree
from draftree.pruning import EarlyHead, EarlyPruning
from draftree.runner import inspect_model
from draftree.runner.target import CACHES
from draftree.shaping import Fixed

IDS = torch.tensor(prompts((19,)))


def answer(model: Any, ids: Tensor = IDS, expected: Tensor | None = None, **options: Any) -> Tensor:
    """What draftree says, with trees that hold the `expected` text and others."""
    if expected is not None:
        options |= {
            "drafter": RandomTree({tuple(ids[0].tolist()): expected[0, ids.shape[1] :].tolist()}),
            "shape": Fixed(16),
        }
    return draftree.generate(model, ids, **{"max_new_tokens": NEW} | options).sequences


def inner(model: Any, given: dict[str, Any]) -> Any:
    """The decoder's output, by the arguments that the transformers at hand has."""
    return model(**{name: value for name, value in given.items() if name not in ("return_dict", "logits_to_keep")})


class ByWeight(LlamaForCausalLM):
    """Multiplies by its head's weight, and never calls the head."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **given: Any) -> Any:
        given |= {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        out = inner(self.model, given)
        return CausalLMOutputWithPast(logits=F.linear(out.last_hidden_state, self.lm_head.weight), **cache_of(out))


class Handing(LlamaForCausalLM):
    """Hands all that it gets on to the stock forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Flat(LlamaPreTrainedModel, GenerationMixin):
    """Has its layers itself, so that it is its own decoder."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        parts = LlamaModel(config)
        self.embed_tokens, self.layers = parts.embed_tokens, parts.layers
        self.norm, self.rotary_emb = parts.norm, parts.rotary_emb
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **given: Any) -> Any:
        given |= {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        out = inner(lambda **named: LlamaModel.forward(self, **named), given)
        return CausalLMOutputWithPast(logits=self.lm_head(out.last_hidden_state), **cache_of(out))


def cache_of(out: Any) -> dict[str, Any]:
    """The cache of an output, if it has one, by the name that the transformers at hand has for it."""
    given = [(name, found) for name in CACHES if (found := getattr(out, name, None)) is not None]
    return dict(given[:1])


class Steered(nn.Module):
    """Around a layer, adds a vector to what it returns; names none of its arguments."""

    def __init__(self, layer: nn.Module, vector: Tensor) -> None:
        super().__init__()
        self.layer_ = layer
        self.vector = nn.Parameter(vector)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer_"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.layer_(*args, **kwargs)
        return (out[0] + self.vector, *out[1:]) if isinstance(out, tuple) else out + self.vector


def of_class(kind: type) -> Any:
    """A model of the class with the weights of the zoo's llama, as far as they have the same names."""
    usual = build("llama")
    model = kind(copy.deepcopy(usual.config)).eval()
    model.load_state_dict(usual.state_dict(), strict=False)
    model.generation_config = copy.deepcopy(usual.generation_config)
    return model


@pytest.mark.parametrize("kind", [ByWeight, Handing, Flat])
def test_classes_of_the_users_own(kind: type) -> None:
    model = of_class(kind)
    expected = hf(model, IDS)
    assert torch.equal(answer(model, expected=expected), expected)
    assert torch.equal(answer(model), expected)
    inside = model.generate(
        IDS, custom_generate=draftree.custom_generate(drafter=draftree.Lookahead()), max_new_tokens=NEW
    )
    assert torch.equal(inside, expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "t5"])
def test_layers_inside_of_others_that_name_no_argument(name: str) -> None:
    model = copy.deepcopy(build(name))
    layers = inspect_model(model).layers
    places = next(m for m in model.get_decoder().modules() if isinstance(m, nn.ModuleList) and m[0] is layers[0])
    generator = torch.Generator().manual_seed(0)
    for i in (2, 3):
        vector = 0.3 * torch.randn(model.get_input_embeddings().weight.shape[1], generator=generator)
        places[i] = Steered(layers[i], vector).eval()
    expected = hf(model, IDS)
    text = expected if name != "t5" else torch.cat([IDS, expected[:, 1:]], 1)
    pruner = EarlyPruning(EarlyHead.fresh(model, layer=3), top_k=10, always=True)
    for options in ({}, {"pruner": pruner}):
        assert torch.equal(answer(model, expected=text, **options), expected)


@pytest.mark.parametrize("rows", ["one", "several"])
def test_what_acts_by_the_number_of_rows_is_refused(rows: str) -> None:
    """A control vector while decoding alone, or on prompts alone: a tree has several rows where decoding has one."""
    model, vector = copy.deepcopy(build("llama")), torch.randn(64, generator=torch.Generator().manual_seed(0))

    def steered(module: nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        if (hidden.shape[1] == 1) != (rows == "one"):
            return None
        return (hidden + vector, *output[1:]) if isinstance(output, tuple) else hidden + vector

    model.model.layers[1].register_forward_hook(steered)
    with pytest.raises(ValueError, match="are not those of its branches"):
        answer(model, drafter=draftree.PromptLookup())


def test_a_model_that_calls_its_cache_as_older_code_does() -> None:
    """Transformers before 5.24, and code that comes with weights, say past_key_values."""
    model, seen = copy.deepcopy(build("llama")), []
    expected = answer(build("llama"), runner="hooked")
    stock, name = type(model).forward, inspect_model(model).cache_argument

    def forward(
        self: Any, input_ids: Any = None, position_ids: Any = None, past_key_values: Any = None, **given: Any
    ) -> Any:
        seen.append(past_key_values)
        return stock(self, input_ids, position_ids=position_ids, **{name: past_key_values}, **given)

    model.__class__ = type("Older", (type(model),), {"forward": forward})
    assert inspect_model(model).cache_argument == "past_key_values"
    assert torch.equal(answer(model, runner="hooked"), expected)
    assert seen[-1] is not None


def test_a_compiled_wrapper_is_driven_by_the_model_inside() -> None:
    model = build("llama")
    compiled: Any = torch.compile(model, backend="eager")
    assert inspect_model(compiled).model is model


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_a_padding_token_without_an_embedding(family: str) -> None:
    """As training leaves it: drafters inside the model look at another row."""
    model = construct(MEMBERS[family])
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0.0
    expected = hf(model, IDS, no_repeat_ngram_size=3)
    drafter = draftree.Medusa.fresh(model)
    assert torch.equal(answer(model, drafter=drafter, no_repeat_ngram_size=3), expected)
