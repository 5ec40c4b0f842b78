"""Weights in a GGUF file's blocks: what they are, products with them on every kind of processor, and whole models."""

from __future__ import annotations

import ctypes
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from few import crossed, few
from generate_driver import same
from gguf.quants import dequantize, quantize
from gguf_files import random_blocks, write_gguf
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from zoo import MEMBERS, construct

import draftree
from draftree.drafting.folder import model_hash
from draftree.gguf import load_gguf
from draftree.gguf.model import stop_tokens
from draftree.gguf.reader import OTHERS, recoded
from draftree.native import LIBRARY, started
from draftree.native.structures import address
from draftree.runner import inspect_model, open_runner
from draftree.runner.weights.blocks import FORMATS, PackedEmbedding, blocks_matrix, floats_of, pack_blocks
from draftree.runner.weights.packed import PackedLinear, parameter_count

INPUTS, OUTPUTS = 512, 50
ROWS = (1, 2, 3, 4, 5, 6, 7, 13, 40)  # tiles of every height, and several
SETTINGS = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


@functools.cache
def limited(widest: int) -> Any:
    """The compiled functions as on a processor whose registers hold at most so many floats."""
    with tempfile.TemporaryDirectory() as folder:  # a copy has statics of its own, and stays mapped
        return started(ctypes.CDLL(str(shutil.copy(LIBRARY, folder))), widest)


def reference(form: str, rows: Any) -> Tensor:
    """The same weights by the package gguf."""
    return torch.from_numpy(dequantize(rows, gguf.GGMLQuantizationType[form]))


@pytest.mark.parametrize("form", FORMATS)
def test_blocks_hold_the_files_numbers_in_its_bits(form: str) -> None:
    rows = random_blocks(form, OUTPUTS, INPUTS)
    packed = pack_blocks(rows, form, INPUTS)
    assert packed.nbytes <= 1.03 * rows.nbytes * -(-OUTPUTS // 16) * 16 / OUTPUTS
    assert torch.equal(floats_of(packed, form, INPUTS, torch.arange(OUTPUTS)), reference(form, rows))
    some = torch.tensor([3, 49, 3, 16])
    assert torch.equal(floats_of(packed, form, INPUTS, some), reference(form, rows)[some])


@pytest.mark.parametrize("form", OTHERS)
def test_formats_are_written_as_others_with_the_same_numbers(form: str) -> None:
    rows = random_blocks(form, OUTPUTS, INPUTS)
    other, written = recoded(form, rows)
    assert torch.equal(reference(other, written), reference(form, rows))


@pytest.mark.parametrize(("widest", "form"), crossed([256, 16, 8, 4], FORMATS))
def test_products_are_exact_to_float32_and_of_each_row_alone(widest: int, form: str) -> None:
    library = limited(widest)
    rows = random_blocks(form, OUTPUTS, INPUTS)
    packed, weight = pack_blocks(rows, form, INPUTS), reference(form, rows).double()
    bias = torch.randn(OUTPUTS, generator=torch.Generator().manual_seed(1))
    whole = torch.randn(max(ROWS), INPUTS, generator=torch.Generator().manual_seed(2))
    whole[:, 3] *= 100  # as the few large numbers of real models
    whole[1, 64:96] = 0
    matrix = blocks_matrix(packed, form, INPUTS, OUTPUTS, address(bias, torch.float32))
    alone = None
    for count in ROWS:
        x, out, scratch = whole[:count].clone(), torch.zeros(count, OUTPUTS), torch.zeros(count * INPUTS * 3 // 2)
        library.layer_product(matrix, x.data_ptr(), count, 1, 0, scratch.data_ptr(), out.data_ptr())
        exact = x.double() @ weight.T + bias.double()
        assert (out - exact).abs().max() < 3e-6 * (x.double().abs() @ weight.abs().T).max()
        alone = out[0] if alone is None else alone
        assert torch.equal(out[0], alone)


def written(tmp_path: Path, demo: Any, kind: str, **settings: Any) -> tuple[Any, Any]:
    """A tiny llama's file as we load it, and as transformers does."""
    model = construct(MEMBERS["llama"], vocab_size=len(demo.tokenizer), **SETTINGS | settings)
    write_gguf(tmp_path / "tiny.gguf", model, demo.tokenizer, kind)
    loaded = load_gguf(tmp_path / "tiny.gguf")
    assert loaded is not None
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    return loaded[0], theirs


@pytest.mark.parametrize(("kind", "tied"), crossed([*FORMATS, *OTHERS], [False, True]))
def test_the_text_is_that_of_hugging_face(kind: str, tied: bool, demo: Any, tmp_path: Path) -> None:
    ours, theirs = written(tmp_path, demo, kind, tie_word_embeddings=tied)
    theirs.config.quantization_config = None
    assert ours.config.to_dict() | {"quantization_config": None} == theirs.config.to_dict() | {"_name_or_path": ""}
    assert isinstance(ours.lm_head, PackedLinear)
    assert isinstance(ours.get_input_embeddings(), PackedEmbedding)
    assert parameter_count(ours) == sum(p.numel() for p in theirs.parameters())
    assert model_hash(ours) == model_hash(theirs), "a drafter trained for one fits the other"
    state = theirs.state_dict()
    assert state.keys() - ours.state_dict().keys() == ({"lm_head.weight"} if tied else set())
    assert all(torch.equal(tensor, state[name]) for name, tensor in ours.state_dict().items())
    assert open_runner(ours, "auto").name == "cpu"
    assert open_runner(ours, "auto").copied_bytes == 0
    ids = torch.randint(3, 4000, (3, 17), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    expected = theirs.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    same(ours.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False), expected)
    for runner in ("cpu", "hooked", "in_place"):
        for drafter in (None, draftree.Lookahead()):
            out = draftree.generate(ours, ids, mask, drafter=drafter, runner=runner, max_new_tokens=24)
            same(out.sequences, expected, f"{kind} on {runner}")
    sampled = {"do_sample": True, "temperature": 0.8, "seed": 3, "max_new_tokens": 24}
    plain = draftree.generate(theirs, ids, mask, **sampled).sequences
    same(draftree.generate(ours, ids, mask, drafter=draftree.Lookahead(), **sampled).sequences, plain)


def test_a_layer_of_several_formats(demo: Any, tmp_path: Path) -> None:
    """As in files of mixed kinds: queries of 4 bits beside values of 6."""
    ours, _ = written(tmp_path, demo, "Q4_K")
    attention = ours.model.layers[1].self_attn
    rows = random_blocks("Q6_K", attention.v_proj.out_features, 256, 7)
    packed = pack_blocks(rows, "Q6_K", 256)
    attention.v_proj = PackedLinear(packed, len(rows), None, torch.float32, ("Q6_K", 256))
    ids = torch.randint(3, 4000, (2, 9), generator=torch.Generator().manual_seed(4))
    assert inspect_model(ours).alteration is None
    expected = draftree.generate(ours, ids, runner="hooked", max_new_tokens=16).sequences
    same(
        draftree.generate(ours, ids, drafter=draftree.Lookahead(), runner="cpu", max_new_tokens=16).sequences, expected
    )


def test_a_model_in_blocks_is_an_ordinary_model(demo: Any, tmp_path: Path) -> None:
    ours, theirs = written(tmp_path, demo, "Q5_1", tie_word_embeddings=True)
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = theirs.generate(ids, max_new_tokens=12, do_sample=False)
    ours.save_pretrained(tmp_path / "folder")
    assert set(load_file(tmp_path / "folder/model.safetensors")) == {name for name, _ in theirs.named_parameters()}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    same(again.generate(ids, max_new_tokens=12, do_sample=False), expected)
    draftree.unpack_weights(ours)
    assert not any(isinstance(m, PackedLinear | PackedEmbedding) for m in ours.modules())
    assert ours.lm_head.weight is ours.get_input_embeddings().weight
    same(draftree.generate(ours, ids, drafter=draftree.Lookahead(), max_new_tokens=12).sequences, expected)


@pytest.mark.parametrize("cut", few([0.1, 0.3, 0.6, 0.9, 0.999], [0.1, 0.9]))
def test_files_that_end_early_are_refused(cut: float, demo: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "t.gguf", construct(MEMBERS["llama"], vocab_size=len(demo.tokenizer)), demo.tokenizer, "Q8_0")
    data = (tmp_path / "t.gguf").read_bytes()
    (tmp_path / "t.gguf").write_bytes(data[: int(cut * len(data))])
    with pytest.raises(ValueError, match=r"t\.gguf"):
        load_gguf(tmp_path / "t.gguf")


def test_layers_that_the_file_does_not_have_are_not_made(demo: Any, tmp_path: Path) -> None:
    model = construct(MEMBERS["llama"], vocab_size=len(demo.tokenizer))
    model.config.num_hidden_layers = 2**31 - 1
    write_gguf(tmp_path / "t.gguf", model, demo.tokenizer)
    with pytest.raises(ValueError, match=r"block_count is 2147483647, and there are tensors of 4 blocks"):
        load_gguf(tmp_path / "t.gguf")


def test_tensors_of_another_shape_are_refused(demo: Any, tmp_path: Path) -> None:
    model = construct(MEMBERS["llama"], vocab_size=len(demo.tokenizer))
    model.model.layers[2].mlp.up_proj.weight = torch.nn.Parameter(torch.ones(96, 64))
    write_gguf(tmp_path / "t.gguf", model, demo.tokenizer)
    with pytest.raises(ValueError, match=r"'blk\.2\.ffn_up\.weight' has the shape \[96, 64\], and not \[112, 64\]"):
        load_gguf(tmp_path / "t.gguf")


SIZES = {
    **{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "max_position_embeddings": 512},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6},
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
GLOBAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
# transformers' name of an architecture, settings beside SIZES, and metadata that says the same.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("qwen2", {}, {}),
    "qwen2-yarn": (
        "qwen2",
        {"rope_parameters": YARN},
        {
            **{"qwen2__rope__scaling__type": "yarn", "qwen2__rope__scaling__factor": 4.0},
            "qwen2__rope__scaling__original_context_length": 128,
        },
    ),
    "qwen3": ("qwen3", {}, {}),
    "llama3": ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192}}, {}),
    "phi3": ("phi3", {"pad_token_id": 0, "sliding_window": 40}, {}),
    "phi3-longrope": (
        "phi3",
        {
            **{"pad_token_id": 0, "original_max_position_embeddings": 128},
            "rope_parameters": LONG
            | {"partial_rotary_factor": 0.5, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16},
        },
        {},
    ),
    "gemma2": ("gemma2", {"sliding_window": 40, "tie_word_embeddings": True}, {}),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 40, "rope_parameters": GLOBAL, "tie_word_embeddings": True},
        {"gemma3__rope__scaling__type": "linear", "gemma3__rope__scaling__factor": 8.0},
    ),
}


def exact(name: str, settings: dict[str, Any], form: str, vocabulary: int) -> Any:
    """A random model whose matrices hold numbers that the format has."""
    config = AutoConfig.for_model(name, vocab_size=vocabulary, **SIZES | settings)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    kind = gguf.GGMLQuantizationType[form]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.08)
            if parameter.dim() == 2:
                parameter.copy_(torch.from_numpy(dequantize(quantize(parameter.numpy(), kind), kind)))
            elif "gemma" not in name:
                parameter.add_(1)
    return model


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_architectures_say_what_the_model_says_that_was_written(case: str, demo: Any, tmp_path: Path) -> None:
    """transformers' own loader leaves scaled positions out, so the model before it was written is the reference."""
    name, settings, extra = ARCHITECTURES[case]
    model = exact(name, settings, "Q8_0", len(demo.tokenizer))
    write_gguf(tmp_path / "tiny.gguf", model, demo.tokenizer, "Q8_0", **extra)
    loaded = load_gguf(tmp_path / "tiny.gguf")
    assert loaded is not None
    ours, tokenizer = loaded
    assert open_runner(ours, "auto").name == "cpu"
    state = model.state_dict()
    assert all(torch.allclose(tensor, state[key], atol=1e-6) for key, tensor in ours.state_dict().items())
    assert tokenizer.decode(tokenizer("one two").input_ids, skip_special_tokens=True).strip() == "one two"
    for length in (9, 150):  # within a window, and beyond one and the context before scaling
        ids = torch.randint(3, 4000, (2, length), generator=torch.Generator().manual_seed(4))
        options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        for drafter in (None, draftree.Lookahead()):
            same(draftree.generate(ours, ids, drafter=drafter, **options).sequences, expected, case)
    draftree.unpack_weights(ours)
    same(ours.generate(ids, **options), expected)


def test_the_tokens_that_end_a_turn_end_an_answer(demo: Any, tmp_path: Path) -> None:
    """Files of Gemma and Phi-3 name the end of a text as EOS, and chats end with another token."""
    model = construct(MEMBERS["llama"], vocab_size=len(demo.tokenizer), **SETTINGS)
    end = demo.tokenizer.eos_token_id
    write_gguf(tmp_path / "tiny.gguf", model, demo.tokenizer, tokenizer__ggml__eot_token_id=77)
    ours, _ = load_gguf(tmp_path / "tiny.gguf") or (None, None)
    assert ours.generation_config.eos_token_id == sorted({end, 77})
    metadata = {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.tokens": ["a", "<eos>", "<end_of_turn>", "<|end|>"]}
    assert stop_tokens(metadata | {"tokenizer.ggml.token_type": [1, 3, 3, 1]}) == [1, 2]
