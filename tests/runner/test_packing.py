"""Models whose weights are packed: one copy, the same text, the same files, and back again."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from few import crossed
from generate_driver import hf, prompts
from zoo import MEMBERS, build, construct

import draftree
from benchmarks.inflate.model import inflate
from benchmarks.inflate.sizes import Size
from draftree import runner as runners
from draftree.drafting.folder import model_hash
from draftree.engine.generate import generate
from draftree.native import load_library
from draftree.runner import open_runner, pack_weights, unpack_weights
from draftree.runner.cpu import runner as packing
from draftree.runner.eager import parts
from draftree.runner.weights.packed import PackedLinear, is_packed, parameter_count

FAMILIES = ("llama", "llama-tied", "mistral", "qwen2", "qwen3", "phi3", "glm", "olmo2", "gemma3")
pytestmark = pytest.mark.skipif(load_library() is None, reason="not built: python hatch_build.py")


def packed_copy(name):
    model = copy.deepcopy(build(name))
    pack_weights(model)
    return model


def linears_of(model, kind):
    return [m for m in model.modules() if type(m) is kind]


@pytest.mark.parametrize(("name", "runner"), crossed(FAMILIES, ["cpu", "hooked"]))
def test_a_packed_model_says_the_same(name, runner):
    model = packed_copy(name)
    tied = [model.get_output_embeddings()] if name == "llama-tied" else []
    assert linears_of(model, torch.nn.Linear) == tied
    ids = torch.tensor(prompts((9,)))
    wanted = hf(build(name), ids)
    assert torch.equal(hf(model, ids), wanted)
    assert torch.equal(generate(model, ids, runner=runner, max_new_tokens=wanted.shape[1] - 9).sequences, wanted)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, build(name)(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_cpu_runner_has_no_copy_of_its_own(name):
    model = packed_copy(name)
    runner = open_runner(model, "cpu")
    assert runner.form.startswith("cpu")
    own = {m.packed.untyped_storage().data_ptr() for m in linears_of(model, PackedLinear)}
    read = [p._held.untyped_storage().data_ptr() for layer in runner._layers for p in layer._packed]
    assert set(read) <= own
    tied = name == "llama-tied"
    assert (runner._head._packed._held.untyped_storage().data_ptr() in own) != tied


def test_one_copy_of_the_weights_is_alive(demo):
    model = inflate(demo.model, shape=Size(208, 16, 8, 8, 64, 1024, 4096))
    stock = [weakref.ref(p) for p in model.parameters() if p.dim() == 2]
    weights = sum(p.nbytes for p in model.parameters())
    pack_weights(model)
    held = [*model.parameters(), *(m.packed for m in model.modules() if isinstance(m, PackedLinear))]
    kept = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
    assert weights / 2 < kept < 0.6 * weights, "its linears are held in 16 bits, but for queries that were scaled"
    assert [p() is not None for p in stock] == [True] + [False] * (len(stock) - 1), "the embedding alone stays"


def test_unpacked_it_is_as_it_was():
    for name in FAMILIES:
        model = packed_copy(name)
        unpack_weights(model)
        before, after = build(name).state_dict(), model.state_dict()
        assert list(before) == list(after)
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert [type(m) for m in model.modules()] == [type(m) for m in build(name).modules()]
        assert all(p.requires_grad for p in model.parameters())
        assert open_runner(model, "cpu").form.startswith("cpu")


def test_it_saves_stock_files_and_loads_none(tmp_path):
    model = packed_copy("qwen2")
    model.save_pretrained(tmp_path)
    stock, expected = type(model).from_pretrained(tmp_path), build("qwen2").state_dict()
    assert {k: v.tolist() for k, v in stock.state_dict().items()} == {k: v.tolist() for k, v in expected.items()}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*lm_head\.weight"):
        model.load_state_dict(expected)


def test_drafters_still_know_their_model(demo):
    model = copy.deepcopy(demo.model)
    pack_weights(model)
    assert model_hash(model) == model_hash(demo.model)
    drafter = draftree.demo_drafter("hidden-transfer", model)
    ids = torch.tensor(prompts((9,)))
    out = draftree.generate(model, ids, drafter=drafter, max_new_tokens=12)
    assert torch.equal(out.sequences, draftree.generate(demo.model, ids, max_new_tokens=12).sequences)


def test_gradients_of_inputs_pass_through():
    model = packed_copy("llama")
    embeddings = torch.randn(1, 5, 64, requires_grad=True)
    model(inputs_embeds=embeddings).logits.sum().backward()
    expected = embeddings.detach().clone().requires_grad_()
    copy.deepcopy(build("llama"))(inputs_embeds=expected).logits.sum().backward()  # the shared one is to stay without
    torch.testing.assert_close(embeddings.grad, expected.grad, rtol=1e-4, atol=1e-4)


def test_heads_that_end_within_a_group_are_packed_apart():
    model = construct(MEMBERS["llama"], hidden_size=60, num_attention_heads=5, num_key_value_heads=5)  # 60 outputs each
    stock = copy.deepcopy(model)
    pack_weights(model)
    ids = torch.tensor(prompts((9,)))
    assert torch.equal(
        generate(model, ids, runner="cpu", max_new_tokens=12).sequences, hf(stock, ids, max_new_tokens=12)
    )


def test_in_bfloat16_it_computes_saves_and_goes_back_too():
    stock = copy.deepcopy(build("qwen2")).to(torch.bfloat16)  # biases
    model, ids = copy.deepcopy(stock), torch.tensor(prompts((9,)))
    copied = open_runner(stock, "cpu")
    expected = generate(stock, ids, runner=copied, max_new_tokens=12).sequences
    pack_weights(model)
    runner = open_runner(model)
    assert runner.form.startswith("cpu")
    assert runner.copied_bytes < copied.copied_bytes / 4, "packed weights are read where they are"
    assert torch.equal(generate(model, ids, runner=runner, max_new_tokens=12).sequences, expected)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=0.05, atol=0.05)
        assert model(ids).logits.dtype == torch.bfloat16
    for name, tensor in stock.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    unpack_weights(model)
    assert open_runner(model, "hooked").target.alteration is None
    with torch.no_grad():
        assert torch.equal(model(ids).logits, stock(ids).logits)


@pytest.mark.parametrize(("free", "form"), [(10**6, "eager"), (None, "eager"), (10**12, "cpu")])
def test_large_models_are_copied_where_memory_is_plenty(free, form, monkeypatch):
    monkeypatch.setattr(parts, "COPY_LIMIT", 1000)
    monkeypatch.setattr(parts, "free_bytes", lambda _: free)
    model = copy.deepcopy(build("llama"))
    assert open_runner(model, "auto").name == form
    pack_weights(model)
    assert open_runner(model, "cpu").form.startswith("cpu"), "a packed model needs no copy"


def test_the_eager_runner_reads_packed_weights_as_they_lie():
    model = packed_copy("llama")
    runner = open_runner(model, "eager")
    assert runner.copied_bytes == 0
    assert type(runner._layers[0]._qkv) is parts.StockProduct, "which unpacks nothing"


def test_what_cannot_be_packed_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="'gpt2' model does not qualify"):
        pack_weights(build("gpt2"))
    with pytest.raises(ValueError, match=r"float32 or bfloat16 on the CPU, and these are torch\.float16"):
        pack_weights(copy.deepcopy(build("llama")).to(torch.float16))
    monkeypatch.setattr("draftree.runner.cpu.runner.load_library", lambda: None)
    with pytest.raises(ValueError, match=r"missing or stale: install a C compiler .* run python hatch_build\.py"):
        pack_weights(copy.deepcopy(build("llama")))


@pytest.mark.parametrize(
    ("name", "choice"), [("llama", "cpu"), ("llama-tied", "cpu"), ("t5", "cpu"), ("llama", "eager")]
)
def test_copies_of_weights_are_logged_in_one_line(name, choice, monkeypatch, caplog):
    model = copy.deepcopy(build(name))
    assert open_runner(copy.deepcopy(model), choice).copied_bytes > 50_000
    assert not caplog.messages  # too few bytes to report
    monkeypatch.setattr(runners, "WORTH_A_WORD", 50_000)
    runner = open_runner(model, choice)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"The {choice} runner keeps a copy of 0.")
    assert 'runner="in_place" (--no-pack) does without' in caplog.messages[0]
    assert ("draftree.pack_weights(model)" in caplog.messages[0]) == (name != "t5" and choice == "cpu")
    # The keys and values of a source are the stock modules' work.
    stock = [
        m for n, m in runner.target.decoder.named_modules() if n.endswith(("EncDecAttention.k", "EncDecAttention.v"))
    ]
    linears = set(linears_of(runner.target.decoder, torch.nn.Linear)) - (set(stock) if choice == "cpu" else set())
    copied = sum(m.weight.nbytes for m in linears)
    assert runner.copied_bytes == copied + model.get_output_embeddings().weight.nbytes


@pytest.mark.parametrize(("name", "kind"), [("llama", "in_place"), ("gpt2", "hooked"), ("t5", "hooked")])
def test_a_runner_in_place_copies_no_weight(name, kind):
    model = copy.deepcopy(build(name))
    runner = open_runner(model, "in_place")
    assert (runner.name, runner.copied_bytes) == (kind, 0)
    ids = torch.tensor(prompts((9,)))
    wanted = hf(model, ids)
    out = generate(model, ids, runner="in_place", drafter=draftree.Lookahead(), max_new_tokens=wanted.shape[1] - 9)
    if name != "t5":
        assert torch.equal(out.sequences, wanted)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(-1)
    assert runner.outdated == (kind == "in_place")  # whose norms may be copies
    if name != "t5":
        turned = hf(model, ids)
        assert not torch.equal(turned, wanted)
        out = generate(model, ids, runner="in_place", max_new_tokens=turned.shape[1] - 9)
        assert torch.equal(out.sequences, turned)


def test_a_model_of_our_own_is_packed_where_a_runner_would_copy_much(monkeypatch):
    monkeypatch.setattr(packing, "MUCH", 50_000)
    for choice, name, wanted in (
        ("auto", "llama", True), ("cpu", "llama", True), ("in_place", "llama", False), ("hooked", "llama", False),
        ("auto", "gpt2", False), ("auto", "t5", False),
    ):  # fmt: skip
        model = copy.deepcopy(build(name))
        packing.pack_own(model, choice)
        assert is_packed(model) == wanted, (choice, name)
    monkeypatch.setattr(packing, "MUCH", 10**9)
    model = copy.deepcopy(build("llama"))
    packing.pack_own(model, "auto")
    assert not is_packed(model)


def test_parameters_count_as_before_they_were_packed_or_quantised():
    """A small model would be called no smaller than a large one whose packed weights are left out."""

    class InFewBits(torch.nn.Module):  # as of gptqmodel, eight weights in a number of a buffer
        def __init__(self, linear):
            super().__init__()
            self.in_features, self.out_features = linear.in_features, linear.out_features
            self.register_buffer("qweight", torch.zeros(self.in_features // 8, self.out_features, dtype=torch.int32))

    for name in ("llama", "llama-tied"):
        model = copy.deepcopy(build(name))
        count = sum(p.numel() for p in model.parameters())
        assert parameter_count(model) == count
        for layer in model.model.layers:
            layer.mlp.up_proj = InFewBits(layer.mlp.up_proj)
        assert parameter_count(model) == count
        model = copy.deepcopy(build(name))
        pack_weights(model)
        assert parameter_count(model) == count
