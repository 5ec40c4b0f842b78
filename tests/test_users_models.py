"""Models that people write or change themselves, otherwise than stock models are: what they say, or a clear refusal."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from drafters_for_tests import RandomTree
from forked import forked
from generate_driver import NEW, hf, prompts
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaMLP
from zoo import MEMBERS, build, construct

import draftree
from draftree.drafting import SelfSpeculative
from draftree.pruning import EarlyHead, EarlyPruning
from draftree.runner import inspect_model
from draftree.runner.target import CACHES
from draftree.runner.weights import stock
from draftree.runner.weights.stock import alteration
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


def test_a_model_that_is_its_own_decoder_is_let_go() -> None:
    model = of_class(Flat)
    answer(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


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
    pruner = EarlyPruning(EarlyHead.fresh(model, layer=3), keep=3, top_k=10, always=True)
    for options in ({}, {"pruner": pruner}):
        assert torch.equal(answer(model, expected=text, **options), expected)
    assert torch.equal(answer(model, drafter=SelfSpeculative(skip_attention=[1, 2], skip_mlp=[2])), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_layers_in_another_order(name: str) -> None:
    """Text without rows that leave is right; with them it would not be."""
    model = copy.deepcopy(build(name))
    layers = inspect_model(model).layers
    places = next(m for m in model.get_decoder().modules() if isinstance(m, nn.ModuleList) and m[0] is layers[0])
    places[0], places[3] = layers[3], layers[0]
    expected = hf(model, IDS)
    assert torch.equal(answer(model, expected=expected), expected)
    head = EarlyHead.fresh(build(name), layer=2)
    with pytest.raises(ValueError, match="do not stand in the order of their numbers"):
        answer(model, expected=expected, pruner=EarlyPruning(head))


def test_a_copy_that_a_thread_makes_in_the_middle_of_a_pass() -> None:
    model, copies = copy.deepcopy(build("llama")), []
    drafting = model.model.layers[2].mlp  # whose forward is another while a part of the model drafts

    def copied(*_: Any) -> None:
        if not copies and "forward" in vars(drafting):
            thread = threading.Thread(target=lambda: copies.append(copy.deepcopy(model)))
            thread.start()
            thread.join()

    handle = model.model.layers[3].self_attn.register_forward_hook(copied)
    expected = hf(build("llama"), IDS)
    assert torch.equal(answer(model, drafter=SelfSpeculative(skip_attention=[1], skip_mlp=[1, 2])), expected)
    handle.remove()
    (made,) = copies
    made.model.layers[3].self_attn._forward_hooks.clear()  # the one above
    assert torch.equal(made(IDS).logits, model(IDS).logits)
    assert torch.equal(answer(made), expected)


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


class Scaled(nn.Module):
    """Around a part of a layer; what it multiplies by is no parameter, buffer or setting."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.factors = part, torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) * self.factors


@pytest.mark.parametrize("way", ["module", "closure"])
def test_no_prefix_is_kept_where_the_users_code_computes(way: str) -> None:
    model = copy.deepcopy(build("llama"))
    layer: Any = model.model.layers[1]
    factors = torch.ones(1)
    if way == "module":
        layer.mlp = Scaled(layer.mlp)
        factors = layer.mlp.factors
    else:
        usual = layer.mlp.forward
        layer.mlp.forward = lambda x: usual(x) * factors
    with draftree.Engine(model, slots=2, keep_prefixes=True) as engine:
        for factor in (1.0, -1.5):
            factors.fill_(factor)
            request = engine.add(IDS[0].tolist(), max_new_tokens=8)
            engine.run()
            assert request.reused == 0
            assert request.tokens == hf(model, IDS, max_new_tokens=8)[0, IDS.shape[1] :].tolist(), factor


@pytest.mark.parametrize("part", ["head", "embedding"])
def test_a_head_or_embedding_of_several_modules(part: str) -> None:
    model = copy.deepcopy(build("gpt2" if part == "head" else "llama"))
    width, generator = model.config.hidden_size, torch.Generator().manual_seed(0)
    turn = nn.Linear(width, width, bias=False)
    with torch.no_grad():
        turn.weight.copy_(torch.eye(width) + 0.01 * torch.randn(width, width, generator=generator))
    if part == "head":
        model.set_output_embeddings(nn.Sequential(turn, model.get_output_embeddings()))
    else:
        model.set_input_embeddings(nn.Sequential(model.get_input_embeddings(), turn))
    expected = hf(model, IDS)
    assert torch.equal(answer(model, expected=expected), expected)
    assert torch.equal(answer(model), expected)


def test_a_model_whose_config_wants_tuples() -> None:
    model = copy.deepcopy(build("t5"))
    expected = hf(model, IDS)
    model.config.return_dict = False
    for runner in ("auto", "hooked"):
        assert torch.equal(answer(model, runner=runner), expected)


def test_a_forward_that_torch_may_not_leave_uncompiled() -> None:
    model = copy.deepcopy(build("llama"))
    model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
    with pytest.raises(ValueError, match="compile it without fullgraph") as raised:
        answer(model)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("setting", ["sliding_window", "attention_chunk_size"])
@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_window_that_no_layer_reads(name: str, setting: str) -> None:
    """Hugging Face's cache is cut to it, so its text behind it is another than the layers' masks say."""
    model = construct(MEMBERS[name], **{setting: 24})
    with pytest.warns(UserWarning, match="texts of more than 24 tokens are refused"):
        inside = answer(model, IDS[:, :12], max_new_tokens=12)
    assert torch.equal(inside, hf(model, IDS[:, :12], max_new_tokens=12))
    with pytest.raises(ValueError, match="context of 24"):
        answer(model)


def test_opening_models_leaves_the_generator_to_other_threads() -> None:
    model, ended = build("llama"), threading.Event()
    configs = [copy.deepcopy(model.config) for _ in range(8)]
    drawn: list[tuple[float, ...]] = []

    def sample() -> None:
        while not ended.is_set():
            drawn.append(tuple(torch.rand(4).tolist()))

    sampling = threading.Thread(target=sample)
    sampling.start()
    try:
        for i, config in enumerate(configs):
            config.name_or_path = str(i)  # not known yet
            alteration(LlamaForCausalLM(config))
    finally:
        ended.set()
        sampling.join()
    assert len(drawn) == len(set(drawn)) > 0
    zoo = [build(name) for name in MEMBERS]
    before = torch.get_rng_state()
    for each in zoo:
        alteration(each)
    assert torch.equal(torch.get_rng_state(), before)


def scaled(module: Any, output: Any) -> Any:
    return 1.5 * output if type(module) is LlamaMLP else output


class Standing:
    """Stands for a method of a class."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def __get__(self, module: Any, kind: Any = None) -> Any:
        return self if module is None else lambda *args, **kwargs: 1.5 * self.method(module, *args, **kwargs)


@pytest.mark.parametrize("name", ["forward", "__call__", "_call_impl"])
def test_classes_that_are_patched_before_anything_is_opened(name: str) -> None:
    """In a process of its own, as torch itself is changed."""

    def patched() -> None:
        model = copy.deepcopy(build("llama"))
        before = model(IDS).logits
        stock._seen.clear()  # as if no model had been looked at
        stock._stocks.clear()
        if name == "forward":
            LlamaMLP.forward = Standing(LlamaMLP.forward)  # type: ignore[assignment]
        else:
            call = getattr(nn.Module, name)
            setattr(nn.Module, name, lambda self, *args, **kwargs: scaled(self, call(self, *args, **kwargs)))
        assert not torch.equal(model(IDS).logits, before)
        assert torch.equal(answer(model), hf(model, IDS))

    done = forked(patched)
    assert done.status == 0, done.err[-2000:]


def test_what_a_hook_reads_is_looked_at_before_every_text() -> None:
    """A coefficient that is no setting of a module: at 0 the hook does nothing, later it steers the last row alone."""
    model, steering, coefficient = copy.deepcopy(build("llama")), torch.randn(64), [0.0]

    def steer(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return torch.cat([output[:, :-1], output[:, -1:] + coefficient[0] * steering], 1)

    model.model.layers[1].register_forward_hook(steer)
    expected = hf(model, IDS)
    engine = draftree.Engine(model, runner="hooked")
    for _ in range(2):
        assert torch.equal(answer(model, expected=expected), expected)
        engine.add(IDS[0].tolist(), max_new_tokens=4)
        engine.run()
    coefficient[0] = 5.0
    custom = draftree.custom_generate(draftree.Lookahead())
    for ask in (
        lambda: answer(model, expected=expected),
        lambda: model.generate(IDS, custom_generate=custom, do_sample=False, max_new_tokens=4),
        lambda: engine.add(IDS[0].tolist(), max_new_tokens=4),
    ):
        with pytest.raises(ValueError, match="are not those of its branches"):
            ask()
    coefficient[0] = 0.0
    assert torch.equal(answer(model, expected=expected), expected)


class Preparing(LlamaForCausalLM):
    """Changes what a pass gets."""

    def prepare_inputs_for_generation(self, input_ids: Tensor, **given: Any) -> Any:
        prepared = super().prepare_inputs_for_generation(input_ids, **given)
        return prepared | {"input_ids": prepared["input_ids"].clamp(max=50)}


def test_inputs_that_the_model_prepares_otherwise_are_refused() -> None:
    model = construct(MEMBERS["llama"])
    usual = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda ids, **given: usual(ids.clamp(max=50), **given)
    for one in (Preparing(model.config).eval(), model):
        with pytest.raises(ValueError, match="has a prepare_inputs_for_generation of its own"):
            answer(one)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_a_padding_token_without_an_embedding(family: str) -> None:
    """As training leaves it: drafters inside the model look at another row."""
    model = construct(MEMBERS[family])
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0.0
    expected = hf(model, IDS, no_repeat_ngram_size=3)
    drafter = draftree.Medusa.fresh(model)
    assert torch.equal(answer(model, drafter=drafter, no_repeat_ngram_size=3), expected)
