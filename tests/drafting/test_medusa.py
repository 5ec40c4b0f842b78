"""Medusa: candidates are the heads on what the model's own head reads; heads travel under their public names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from few import crossed
from generate_driver import NEW, left_pad, prompts
from in_model_driver import agree, randomised, read_by_head, recorded
from safetensors.torch import save_file
from zoo import MEMBERS, build, construct

import draftree
from draftree.drafting.medusa import MedusaWeights
from draftree.engine import generate
from draftree.runner import layout_of
from draftree.shaping import Fixed


@pytest.mark.parametrize(
    ("name", "own_head"), crossed(["llama", "gpt2", "opt", "gemma3", "bloom", "llama4", "cohere"], [False, True])
)
def test_candidates_are_heads_on_stock_hidden_states(name: str, own_head: bool) -> None:
    model = build(name)
    drafter = randomised(draftree.Medusa.fresh(model, heads=3, layers=2, own_head=own_head, candidates=24))
    seen = recorded(drafter)
    ids, mask = left_pad(prompts())
    generate(model, ids, mask, drafter=drafter, shape=Fixed(48), max_new_tokens=NEW)
    assert any(s.accepted for s in seen)
    for s in seen[::5]:
        hidden = read_by_head(model, s.tokens[:-1])[-1]
        with torch.no_grad():
            agree(s, drafter.weights(hidden, model.get_output_embeddings()), name)


def test_a_fresh_head_says_what_the_model_says() -> None:
    """Blocks start as the identity, own heads as copies."""
    model = build("llama")
    hidden = read_by_head(model, [5, 6, 7])
    head = model.get_output_embeddings()
    for own_head in (False, True):
        weights = draftree.Medusa.fresh(model, own_head=own_head).weights
        assert torch.allclose(weights(hidden, head)[2], head(hidden), atol=1e-5)


def test_names_of_public_checkpoints() -> None:
    state = MedusaWeights(8, 20, heads=2, layers=1, own_head=True).state_dict()
    assert set(state) == {f"{i}.0.linear.{part}" for i in (0, 1) for part in ("weight", "bias")} | {
        "0.1.weight",
        "1.1.weight",
    }
    assert state["1.1.weight"].shape == (20, 8)
    shared = MedusaWeights(8, 20, heads=2, layers=2, own_head=False).state_dict()
    assert set(shared) == {f"{i}.{j}.linear.{part}" for i in (0, 1) for j in (0, 1) for part in ("weight", "bias")}


@pytest.mark.parametrize("own_head", [True, False])
@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_import_of_public_checkpoints(tmp_path: Path, name: str, own_head: bool) -> None:
    model = build("llama")
    weights = randomised(draftree.Medusa.fresh(model, heads=2, layers=2, own_head=own_head)).weights
    state = {f"medusa_head.{key}": tensor for key, tensor in weights.state_dict().items()}
    file = tmp_path / name
    (save_file if name.endswith("tensors") else torch.save)(state, file)
    drafter = draftree.Medusa.from_public(file, model, tree="chain")
    assert (drafter.steps, drafter.settings["layers"], drafter.settings["own_head"]) == (2, 2, own_head)
    for key, tensor in weights.state_dict().items():
        assert torch.equal(drafter.weights.state_dict()[key], tensor)
    with pytest.raises(ValueError, match="no head of this model"):
        draftree.Medusa.from_public(file, construct(MEMBERS["llama"], hidden_size=32))
    torch.save({"weight": torch.zeros(2)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="no Medusa heads"):
        draftree.Medusa.from_public(tmp_path / "other.pt", model)


def test_the_head_reads_what_the_probe_says() -> None:
    """T5 scales before its tied head, OPT may project, bart has no norm at all: seen, not spelt out."""
    for name, modules, scale in (("t5", 1, 0.125), ("bart", 0, 1.0), ("llama", 1, 1.0), ("gpt2", 1, 1.0)):
        layout = layout_of(build(name))
        assert (len(layout.closing), layout.scale) == (modules, pytest.approx(scale, rel=1e-3)), name
    deepseek = layout_of(build("deepseek_v3"))
    assert (deepseek.kv_heads, deepseek.head_dim, deepseek.value_dim) == (1, 16, 8)  # a latent and a rotary part


def test_16_bit_models_get_heads_of_their_type() -> None:
    model = build("llama")
    half = type(model)(model.config).to(torch.bfloat16).eval()
    half.load_state_dict(model.state_dict())
    for cls in (draftree.Medusa, draftree.BiTA, draftree.HiddenTransfer):
        drafter = randomised(cls.fresh(half))
        ids = torch.tensor(prompts((9,)))
        out = generate(half, ids, drafter=drafter, shape=Fixed(8), max_new_tokens=8, strict=True)
        assert torch.equal(out.sequences, generate(half, ids, max_new_tokens=8, strict=True).sequences)
        assert all(w.dtype == torch.float32 for w in drafter.weights.parameters())


@pytest.mark.parametrize("options", [{"heads": 0}, {"layers": 0}, {"depth": 5}, {"candidates": 0}, {"tree": "star"}])
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        draftree.Medusa.fresh(build("llama"), **options)


def test_weights_are_brought_to_a_model_once_until_they_change() -> None:
    model = build("llama")
    drafter = draftree.Medusa.fresh(model, own_head=True)
    placed = []
    place = drafter.place

    def noted(device: torch.device, dtype: torch.dtype) -> Any:
        placed.append(dtype)
        return place(device, dtype)

    drafter.place = noted  # type: ignore[method-assign]
    ids = torch.tensor(prompts((9,)))

    def drafts() -> list[torch.Tensor]:
        seen = recorded(drafter)
        generate(model, ids, drafter=drafter, shape=Fixed(4), max_new_tokens=4)
        return [s.logp for s in seen]

    before = drafts()
    assert all(torch.equal(a, b) for a, b in zip(before, drafts(), strict=True))
    assert len(placed) == 1
    randomised(drafter)
    assert not torch.allclose(before[0], drafts()[0])
    assert len(placed) == 2
    half = type(model)(model.config).to(torch.bfloat16).eval()
    half.load_state_dict(model.state_dict())
    generate(half, ids, drafter=drafter, shape=Fixed(4), max_new_tokens=2)
    assert placed[2:] == [torch.bfloat16]
    drafts()
    assert len(placed) == 3  # both are kept
