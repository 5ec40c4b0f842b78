"""Inflated models: they say what the small one says, hidden states keep their place, and bad sizes are refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from few import few
from transformers import AutoModelForCausalLM
from zoo import MEMBERS, VOCABULARY, build, construct

import draftree
from benchmarks.harness.inputs import Subject
from benchmarks.inflate import inflate_drafter
from benchmarks.inflate import sizes as inflation
from benchmarks.inflate.model import inflate, places_of
from benchmarks.inflate.sizes import SIZES, Size, parameters_named, size_for
from draftree.models import encode_prompt
from draftree.prompts import embedded_prompts, take_per_set
from draftree.runner import open_runner
from draftree.runner.plan import Plan

# Of the embedded model: heads and groups other than its 4 and 2, widths that are no multiples, and more tokens.
DEMO_SIZES = {
    "more of all": Size(400, 13, 10, 5, 96, 700, 4096),
    "one group each": Size(512, 8, 8, 8, 64, 512, 4096),
    "larger groups": Size(768, 16, 12, 2, 64, 512, 5000),
    "one more of a few": Size(196, 9, 4, 4, 50, 513, 4097),
}
HYBRID_SIZES = {
    "more of all": Size(400, 13, 10, 5, 96, 700, 5000, 9, 5, 5, 40, 48, 6),
    "the same": Size(192, 8, 4, 2, 48, 512, 4096, 6, 4, 4, 32, 32, 4),
}


def prompts_of(demo, count):
    chosen = take_per_set([p for p in embedded_prompts() if not p.warm], 1)[:count]
    return [torch.tensor([encode_prompt(demo.tokenizer, p.text)]) for p in chosen]


@pytest.mark.parametrize("size", few(DEMO_SIZES, ["more of all"]))
@torch.no_grad()
def test_the_large_model_says_what_the_small_one_says(demo, size):
    shape = DEMO_SIZES[size]
    large = inflate(demo.model, shape=shape)
    assert Size.of(large.config) == shape
    assert sum(p.numel() for p in large.parameters()) == shape.parameters
    for ids in prompts_of(demo, 3):
        logits, expected = large(ids).logits, demo.model(ids).logits
        torch.testing.assert_close(logits[..., :4096], expected, rtol=1e-4, atol=1e-3)
        assert (logits[..., 4096:] < expected.min() - 1000).all(), "tokens that the small model lacks never win"
        wanted = demo.model.generate(ids, max_new_tokens=24, do_sample=False)
        assert torch.equal(large.generate(ids, max_new_tokens=24, do_sample=False), wanted)
        assert torch.equal(draftree.generate(large, ids, max_new_tokens=24).sequences, wanted)


@pytest.mark.parametrize("size", HYBRID_SIZES)
@torch.no_grad()
def test_a_hybrid_says_the_same(demo, hybrid, size):
    shape = HYBRID_SIZES[size]
    large = inflate(hybrid.model, shape=shape)
    assert Size.of(large.config) == shape
    assert sum(p.numel() for p in large.parameters()) == shape.parameters
    for ids in prompts_of(demo, 2):
        logits, expected = large(ids).logits, hybrid.model(ids).logits
        torch.testing.assert_close(logits[..., :4096], expected, rtol=1e-4, atol=1e-3)
        wanted = hybrid.model.generate(ids, max_new_tokens=24, do_sample=False)
        assert torch.equal(large.generate(ids, max_new_tokens=24, do_sample=False), wanted)
        assert torch.equal(draftree.generate(large, ids, max_new_tokens=24).sequences, wanted)


@torch.no_grad()
def test_another_hybrid():
    """Several value heads to a key head, and weights where any mistake shows."""
    model = build("qwen3_5")
    small = Size.of(model.config)
    shape = Size(156, 7, 12, 4, 40, 200, VOCABULARY + 20, 5, *(2 * n for n in (small.key_heads, small.value_heads)))
    large = inflate(model, shape=replace(shape, key_width=40, value_width=24, kernel=small.kernel))
    ids = torch.randint(0, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(large(ids).logits[..., :VOCABULARY], model(ids).logits, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-biased", "mistral", "qwen2"])
@torch.no_grad()
def test_other_models_than_the_embedded_one(name):
    """Sharp random models, where any mistake shows; Qwen 2 has biases, and one llama has them everywhere."""
    if name == "llama-biased":
        model = construct(MEMBERS["llama"], attention_bias=True, mlp_bias=True)
    else:
        model = build(name)
    large = inflate(model, shape=Size(156, 7, 12, 4, 40, 200, VOCABULARY + 20))
    ids = torch.randint(0, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(large(ids).logits[..., :VOCABULARY], model(ids).logits, rtol=1e-4, atol=1e-3)


@torch.no_grad()
def test_states_after_a_share_of_the_layers_are_those_after_the_same_share_of_the_small_model(demo):
    large = inflate(demo.model, shape=DEMO_SIZES["more of all"])
    places = places_of(large)
    ids = prompts_of(demo, 1)[0]
    small_states = demo.model(ids, output_hidden_states=True).hidden_states
    plan = Plan.causal(ids, taps=tuple(range(14)))
    runner = open_runner(large)
    states = runner.run(plan, runner.new_cache(1)).hidden
    for after in range(8):  # behind the last layer Hugging Face gives normed states
        at = places.layer(after)
        assert at == after * 13 // 8
        torch.testing.assert_close(states[at][..., :192], small_states[after], rtol=1e-4, atol=1e-4)
        assert not states[at][..., 192:].any()


def test_zeros_take_memory(demo):
    """A large tensor of the system's zeros is one page, read from a cache at no cost."""
    large = inflate(demo.model, shape=Size(1024, 8, 8, 8, 64, 4096, 4096))
    zeros = large.model.layers[0].mlp.down_proj.weight
    assert not zeros[200:].any()
    pages = resident_pages(zeros.data_ptr(), zeros.nbytes)
    assert pages is None or pages > 0.95


def resident_pages(address: int, size: int) -> float | None:
    """The share of pages that have memory of their own; None where the system does not tell."""
    try:
        with open("/proc/self/pagemap", "rb") as file:
            file.seek(address // 4096 * 8)
            words = memoryview(file.read(size // 4096 * 8)).cast("Q")
    except OSError:
        return None
    return sum(word >> 63 for word in words) / len(words)


def test_the_model_given_stays_as_it_is(demo):
    before = {name: tensor.clone() for name, tensor in demo.model.state_dict().items()}
    config = demo.model.config.to_dict()
    inflate(demo.model, "20M")
    assert demo.model.config.to_dict() == config
    assert all(torch.equal(tensor, before[name]) for name, tensor in demo.model.state_dict().items())


def test_saved_and_loaded_it_still_knows_what_it_was(demo, tmp_path):
    large = inflate(demo.model, shape=DEMO_SIZES["one group each"])
    large.save_pretrained(tmp_path)
    loaded = type(large).from_pretrained(tmp_path)
    assert places_of(loaded) == places_of(large)
    ids = prompts_of(demo, 1)[0]
    assert torch.equal(loaded(ids).logits, large(ids).logits)


@pytest.mark.parametrize("text", ["20M", "50M", "400M", "1.3B", "7B"])
def test_sizes_have_the_number_of_parameters_asked_for(text):
    small = Size(192, 8, 4, 2, 48, 512, 4096)
    size = size_for(parameters_named(text), small)
    assert abs(size.parameters / parameters_named(text) - 1) < 0.03
    assert size.layers % small.layers == 0
    assert size.head_dim % small.head_dim == 0
    assert size.groups == small.groups
    assert 1 < size.intermediate_size / size.hidden_size < 4


def test_named_sizes_are_those_of_the_models():
    """Public parameter counts, in millions; two of the models tie their head to the embedding."""
    millions = {name: round(size.parameters / 1e6) for name, size in SIZES.items()}
    assert millions["llama-7b"] == 6738
    assert millions["llama-13b"] == 13016
    assert millions["llama-3-8b"] == 8030
    assert millions["tinyllama-1.1b"] == 1100
    assert millions["llama-3.2-1b"] == round(1235.8 + 2048 * 128256 / 1e6)
    assert millions["smollm2-360m"] == round(361.8 + 960 * 49152 / 1e6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give one of them"),
        ({"params": "50M", "shape": "llama-7b"}, "give one of them"),
        ({"params": "lots"}, "'lots' is no number of parameters: write one such as 400M"),
        ({"params": "2M"}, "too few to hold this model of 4,"),
        ({"params": 10_000_000}, "too few"),
        ({"shape": "lama-7b"}, "Did you mean 'llama-7b'"),
        ({"shape": Size(192, 8, 4, 2, 48, 512, 5000)}, "hidden_size is 192, and to hold this model it takes 193"),
        ({"shape": Size(200, 7, 4, 2, 48, 512, 4096)}, "layers is 7"),
        ({"shape": Size(200, 8, 2, 2, 48, 512, 4096)}, "heads is 2"),
        ({"shape": Size(200, 8, 3, 3, 48, 512, 4096)}, "heads is 3"),
        ({"shape": Size(200, 8, 4, 2, 46, 512, 4096)}, "head_dim is 46"),
        ({"shape": Size(200, 8, 4, 2, 48, 511, 4096)}, "intermediate_size is 511"),
        ({"shape": Size(200, 8, 4, 2, 48, 512, 4095)}, "vocab_size is 4095"),
        ({"shape": Size(200, 8, 9, 4, 48, 512, 4096)}, "9 heads of 48 entries with 4"),
        ({"shape": Size(200, 8, 4, 2, 49, 512, 4096)}, "width is even"),
        ({"shape": Size(202, 8, 4, 2, 48, 512, 4096)}, "hidden_size is a multiple"),
        ({"params": "900B"}, "GiB are free: inflate to a smaller size"),
    ],
)
def test_refused_in_one_sentence(demo, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        inflate(demo.model, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("llama-7b", "recurrent is 0, and to hold this model it takes 6"),
        (replace(HYBRID_SIZES["more of all"], recurrent=10), "of 13 layers it takes 9"),
        (replace(HYBRID_SIZES["more of all"], value_heads=10), "10 value heads on 5 key heads"),
        (replace(HYBRID_SIZES["more of all"], key_width=31), "key_width is 31"),
    ],
)
def test_sizes_of_hybrids_are_refused_in_one_sentence(hybrid, shape, message):
    with pytest.raises(ValueError, match=message):
        inflate(hybrid.model, shape=shape)


@pytest.mark.parametrize("text", ["60M", "400M", "7B"])
def test_hybrids_have_the_proportions_of_public_ones(text):
    size = size_for(parameters_named(text), HYBRID_SIZES["the same"])
    assert abs(size.parameters / parameters_named(text) - 1) < 0.03
    assert size.recurrent * 4 == size.layers * 3
    assert (size.key_width, size.value_width) == (128, 128)
    assert 1 < size.intermediate_size / size.hidden_size < 4


@pytest.mark.parametrize(
    ("name", "message"),
    [("gpt2", "A 'gpt2' model"), ("qwen3", "A 'qwen3' model"), ("t5", "A 't5'"), ("mistral-window", "sliding windows")],
)
def test_models_that_cannot_be_inflated(name, message):
    with pytest.raises(ValueError, match=message):
        inflate(build(name), "50M")


def test_stretched_angles_fit_one_head_width():
    model = build("llama-yarn")
    with pytest.raises(ValueError, match=r"\(yarn\).*head_dim 16"):
        inflate(model, shape=Size(156, 7, 12, 4, 40, 200, VOCABULARY))
    large = inflate(model, shape=Size(156, 7, 12, 4, 16, 200, VOCABULARY))
    ids = torch.randint(0, VOCABULARY, (1, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(large(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-3)


def test_another_activation_is_named():
    model = copy.deepcopy(build("llama"))
    model.config.hidden_act = "gelu"
    with pytest.raises(ValueError, match="An MLP with gelu"):
        inflate(model, "50M")


def test_free_memory_is_looked_at_before_any_work(demo, monkeypatch):
    monkeypatch.setattr(inflation, "free_bytes", lambda _: 2**30)
    with pytest.raises(ValueError, match=r"takes 1\.5 GiB and 1\.0 GiB are free"):
        inflate(demo.model, "400M")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_are_those_of_a_published_checkpoint(demo: Any, dtype: torch.dtype) -> None:
    """Numbers of bfloat16 in another type, as one loads most checkpoints; `--params` of benchmarks makes such."""
    large = inflate(demo.model, "20M", dtype=dtype, published=torch.bfloat16)
    for name, weight in large.named_parameters():
        assert weight.dtype == dtype
        assert torch.equal(weight, weight.bfloat16().to(dtype)), name
    plain = dict(inflate(demo.model, "20M").named_parameters())
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in plain.values())
    measured = Subject.load(None).inflated("20M").model
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in measured.parameters())


@pytest.mark.parametrize("name", ["speculators_eagle3", "original_eagle3"])
def test_an_eagle_head_drafts_the_same_on_an_inflated_model(name, monkeypatch):
    folder = Path(__file__).parents[1] / "data" / "drafters"
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    size = Size.of(target.config)
    large = inflate(target, shape=replace(size, hidden_size=size.hidden_size + 40, layers=2 * size.layers))
    drafts = {}
    for model in (target, large):
        drafter = draftree.load_drafter(folder / name, target)
        drafter = drafter if model is target else inflate_drafter(drafter, model)
        own, drawn = drafter.draft_live, drafts.setdefault(model is target, [])
        monkeypatch.setattr(drafter, "draft_live", lambda *a, own=own, drawn=drawn: drawn.append(own(*a)) or drawn[-1])
        ids = torch.arange(3, 15)[None]
        draftree.generate(model, ids, max_new_tokens=12, drafter=drafter, shape=draftree.Fixed(6))
    assert len(drafts[True]) > 3
    assert [tree.tokens.tolist() for tree in drafts[True]] == [tree.tokens.tolist() for tree in drafts[False]]
