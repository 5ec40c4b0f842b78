"""MTP heads in the target's checkpoint: recorded logits, the rows of a request, and texts that do not change."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from few import crossed
from generate_driver import SAMPLED, hf, left_pad, same
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
)
from zoo import MEMBERS, build, construct, draw_weights
from zoo_members import _MLA, LLAMA_LIKE

import draftree
from draftree.by_name import make_drafter
from draftree.drafting.published import recursion
from draftree.drafting.published.layers import Span, States, causal
from draftree.drafting.published.mtp import MTP, read_head
from draftree.engine import generate
from draftree.runner import inspect_model
from draftree.shaping import Fixed

DATA = Path(__file__).parents[1] / "data" / "drafters"
TARGETS = ("qwen3_5_mtp", "qwen3_next_mtp", "glm4_moe_mtp", "deepseek_v3_mtp")


@functools.cache
def load(name: str | Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(DATA / name, dtype=torch.float32).eval()


def texts(lengths: tuple[int, ...] = (11, 5, 8), seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 64, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def read(drafter: MTP, model: Any, tokens: Tensor, hidden: Tensor, states: States, start: int) -> Tensor:
    """Return the head's outputs behind its norm, of rows from `start` on."""
    span = Span(states, start, len(tokens), causal(start, len(tokens), tokens.device))
    positions = torch.arange(start, start + len(tokens))
    return drafter.head.fed_back(drafter.head(model.get_input_embeddings()(tokens), hidden, positions, [span]))


@pytest.mark.parametrize("name", [*TARGETS, "speculators_mtp"])
def test_logits_are_those_of_the_reference(name: str) -> None:
    """Drafts are equal row by row, and in three recursions from each row."""
    own = name in TARGETS
    model = load(name if own else "qwen3_5_mtp")
    drafter = MTP.load(DATA / name, inspect_model(model))
    told = load_file(DATA / name / "recorded.safetensors")
    if not own:  # It records fewer rows, and recursions as training has them.
        told = load_file(DATA / "qwen3_5_mtp" / "recorded.safetensors") | {"logits.0": told["logits.0"]}
    ids, hidden = told["input_ids"], told["hidden.final"]
    for row in range(len(told["logits.2"])):
        states = States()
        out = read(drafter, model, ids[1 : row + 2], hidden[: row + 1], states, 0)[-1:]
        for step in range(3):
            if step:
                out = read(drafter, model, ids[row + step + 1][None], out, states, row + step)
            theirs = told[f"logits.{step}"][row : row + 1]
            assert torch.allclose(model.lm_head(out)[: len(theirs)], theirs, atol=1e-5), (row, step)


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    """Hugging Face's own MTP model finds the head behind layer 60, and nowhere else."""
    torch.manual_seed(0)
    sizes = LLAMA_LIKE | _MLA | {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 62}
    whole = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes))
    draw_weights(whole)
    whole.save_pretrained(tmp_path)
    tensors, config = load_file(tmp_path / "model.safetensors"), tmp_path / "config.json"
    last = "model.layers.61."
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{last}{norm}.weight"] = torch.rand(32) + 0.5
    tensors[f"{last}eh_proj.weight"] = torch.randn(32, 64) / 8
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config.write_text(config.read_text().replace('"num_hidden_layers": 62', '"num_hidden_layers": 61'))
    model = load(tmp_path)
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    ids = torch.tensor(texts()[0])
    with torch.no_grad():
        hidden = model(ids[None], output_hidden_states=True).hidden_states[-1][:, :-1]
        theirs = MtpModel.from_pretrained(model)
        cache = MtpCache(config=model.config.get_mtp_config())
        out = theirs.forward_layer(0, hidden, torch.arange(1, len(ids))[None], cache, input_ids=ids[None, 1:])
    drafter = MTP.load(tmp_path, inspect_model(model))
    ours = read(drafter, model, ids[1:], hidden[0], States(), 0)
    assert torch.allclose(model.lm_head(ours), model.lm_head(out[0]), atol=1e-5)


@pytest.mark.parametrize(("name", "runner"), crossed(TARGETS, ["auto", "hooked"]))
def test_a_request_reads_the_states_of_its_text(name: str, runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a ragged batch, with long prompts in parts, a draft begins with the best tokens of the whole text's row."""
    monkeypatch.setattr(recursion, "CHUNK", 4)
    model = load(name)
    drafter = draftree.load_drafter("mtp", model)
    plain = MTP.load(DATA / name, inspect_model(model))
    drafted, seen = drafter.draft, []

    def draft(requests: Any, budgets: Any) -> Any:
        trees = drafted(requests, budgets)
        for b, request in enumerate(requests):
            tokens, parents = trees.tokens[b].tolist(), trees.parents[b].tolist()
            seen.append((list(request.tokens), {t for t, p in zip(tokens[1:], parents[1:], strict=True) if p == 0}))
        return trees

    monkeypatch.setattr(drafter, "draft", draft)
    ids, mask = left_pad(texts())
    generate(model, ids, mask, drafter=drafter, shape=Fixed(6), max_new_tokens=12, runner=runner, eos_token_id=None)
    assert any(children for _, children in seen)
    for tokens, children in seen[::2]:
        given = torch.tensor(tokens)
        with torch.no_grad():
            hidden = model(given[None, :-1], output_hidden_states=True).hidden_states[-1][0]
        logits = model.lm_head(read(plain, model, given[1:], hidden, States(), 0)[-1])
        assert children <= set(logits.topk(5).indices.tolist())
        assert not children or int(logits.argmax()) in children


@pytest.mark.parametrize("name", TARGETS)
def test_texts_stay_as_they_are(name: str) -> None:
    """Greedy and sampled, alone and merged, in a batch and in turns; texts end within drafts too."""
    model = load(name)
    ids, mask = left_pad(texts())
    merged = make_drafter("lookahead+mtp", None, model)
    for drafter in (draftree.load_drafter("mtp", model), merged):
        for options in ({"max_new_tokens": 20}, {"max_new_tokens": 20, "eos_token_id": [2, 7, 9, 23]}):
            out = generate(model, ids, mask, drafter=drafter, shape=Fixed(10), **options)
            same(out.sequences, hf(model, ids, mask, **options), name)
            assert sum(out.stats.requests[b].accepted for b in range(3)) > 0
        sampled = [
            generate(model, ids, mask, drafter=one, seed=5, max_new_tokens=20, **SAMPLED).sequences
            for one in (None, drafter)
        ]
        same(sampled[1], sampled[0], name)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "glm4_moe_lite"])
def test_families_without_a_recording(tmp_path: Path, name: str) -> None:
    """A head of the family's own layer is read, also with its experts in one tensor, and the text stays."""
    if name in MEMBERS:
        model = construct(MEMBERS[name])
    else:
        torch.manual_seed(0)
        model = Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**LLAMA_LIKE | _MLA)).eval()
        draw_weights(model)
    model.save_pretrained(tmp_path)
    width, place = 64, "mtp." if "qwen" in name else "model.layers.4."
    tensors = {"eh_proj.weight": torch.randn(width, 2 * width) / 8}
    tensors |= {f"{norm}.weight": torch.rand(width) for norm in ("enorm", "hnorm", "shared_head.norm")}
    tensors |= {key: tensor.clone() for key, tensor in model.model.layers[3].state_dict().items()}
    save_file({f"{place}{key}": tensor for key, tensor in tensors.items()}, tmp_path / "mtp.safetensors")
    loaded = load(tmp_path)
    ids, mask = left_pad(texts())
    out = generate(loaded, ids, mask, drafter=draftree.load_drafter("mtp", loaded), shape=Fixed(8), max_new_tokens=12)
    same(out.sequences, hf(loaded, ids, mask, max_new_tokens=12), name)
    assert out.stats.total.drafted > 0


class Late(MTP):
    """Reads each state one row too late."""

    def features_of(self, taps: Any, runner: Any) -> Tensor:
        new = super().features_of(taps, runner)
        last = self.__dict__.get("last", new[:1])
        self.last = new[-1:]
        return torch.cat([last, new[:-1]])


def test_a_trained_head_drafts_well_and_a_late_one_does_not() -> None:
    """A target and its head learn texts of which two tokens say the next, up to some noise."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(DATA / "glm4_moe_mtp", dtype=torch.float32).eval()
    target = inspect_model(model)
    head = MTP.load(DATA / "glm4_moe_mtp", target).head.requires_grad_(True)
    rule = torch.randint(3, 11, (64, 64))

    def draw(count: int, length: int) -> Tensor:
        rows = torch.randint(3, 11, (count, 2))
        while rows.shape[1] < length:
            new = torch.where(torch.rand(count) < 0.15, torch.randint(3, 11, (count,)), rule[rows[:, -2], rows[:, -1]])
            rows = torch.cat([rows, new[:, None]], 1)
        return rows

    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=5e-3)
    for _ in range(250):
        ids = draw(16, 24)
        out = model(ids, output_hidden_states=True)
        hidden, embedded = out.hidden_states[-1][:, :-2], model.get_input_embeddings()(ids[:, 1:-1])
        places = torch.arange(22)[None]
        x = head.eh_proj(torch.cat([head.enorm(embedded), head.hnorm(hidden)], -1))
        x = head.layer(x, position_embeddings=head.rope(x, places), attention_mask=None, position_ids=places)
        logits = out.logits[:, 1:-1], model.lm_head(head.norm(x))
        loss = sum(torch.nn.functional.cross_entropy(one.transpose(1, 2), ids[:, 2:]) for one in logits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.requires_grad_(False)
    accepted = {}
    for kind in (MTP, Late):
        ids = [draw(1, 8) for _ in range(6)]
        runs = [
            generate(model, one, drafter=kind(head, target), shape=Fixed(4), max_new_tokens=32, eos_token_id=None)
            for one in ids
        ]
        steps = [run.stats.requests[0] for run in runs]
        accepted[kind] = sum(one.accepted for one in steps) / sum(one.steps for one in steps)
    assert accepted[MTP] > 1.2, accepted
    assert accepted[MTP] > 1.5 * accepted[Late], accepted


def broken(folder: Path, change: Any) -> Path:
    """Return a copy of a target whose tensors were changed."""
    shutil.copytree(DATA / "glm4_moe_mtp", folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop("model.layers.2.hnorm.weight"), "has no tensor for 'hnorm.weight'"),
        (lambda t: t.pop("model.layers.2.mlp.experts.1.up_proj.weight"), "experts"),
        (lambda t: t.update({"model.layers.2.self_attn.sinks": torch.zeros(2)}), "no tensor is expected"),
        (lambda t: t.update({"model.layers.2.eh_proj.weight": torch.zeros(16, 16)}), r"\[16, 16\].*\[16, 32\]"),
        (lambda t: [t.pop(name) for name in [*t] if ".layers.2." in name], "no MTP head.*save_pretrained drops it"),
    ],
)
def test_heads_that_do_not_fit(tmp_path: Path, change: Any, sentence: str) -> None:
    model = load(broken(tmp_path, change))
    with pytest.raises(ValueError, match=sentence):
        draftree.load_drafter("mtp", model)


def test_heads_in_fp8(tmp_path: Path) -> None:
    """Each block of weights has a scale."""
    name, weight = "model.layers.2.mlp.experts.1.up_proj.weight", torch.randn(200, 16)
    scales, stored = torch.tensor([[2.0], [0.5]]), weight.to(torch.float8_e4m3fn)
    shutil.copytree(DATA / "glm4_moe_mtp", tmp_path, dirs_exist_ok=True)
    tensors = {f"{name}_scale_inv": scales, name: stored, "model.layers.2.hnorm.weight": torch.ones(16)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = read_head(tmp_path, 2)
    assert found.keys() == {"layer.mlp.experts.1.up_proj.weight", "hnorm.weight"}
    wanted = stored.float() * torch.tensor([2.0] * 128 + [0.5] * 72)[:, None]
    assert torch.equal(found["layer.mlp.experts.1.up_proj.weight"], wanted)


def test_models_without_a_head(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names no checkpoint folder"):
        draftree.load_drafter("mtp", build("deepseek_v3"))
    build("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no MTP heads of 'llama' models, but those of qwen3_next"):
        draftree.load_drafter("mtp", load(tmp_path))
    drafter = draftree.load_drafter("mtp", load("qwen3_5_mtp"))
    with pytest.raises(ValueError, match="made for a model with hidden_size 16, and this one has 64"):
        generate(build("qwen3_5"), torch.tensor([[5, 6, 7]]), drafter=drafter)
