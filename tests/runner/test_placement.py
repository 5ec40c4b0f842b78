"""Where a model goes, and in which type: as stored, as asked, and in one sentence where that cannot be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import draftree
from draftree import checkpoints
from draftree.checkpoints import Placement
from draftree.cli import app
from draftree.drafting import Medusa
from draftree.drafting.folder import base_of, load_drafter, model_hash
from draftree.models import load_model


@pytest.fixture(scope="module")
def stored(demo: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded model in bfloat16, in a folder."""
    folder = tmp_path_factory.mktemp("stored")
    model, tokenizer = draftree.demo_model()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def loaded(name: str | None, *arguments: Any) -> tuple[Any, list[str]]:
    lines: list[str] = []
    model, _ = load_model(name, Placement(*arguments), lines.append)
    return model, lines


def test_small_models_of_16_bits_are_computed_in_float32(stored: str) -> None:
    model, lines = loaded(stored)
    assert model.dtype is torch.float32
    assert len(lines) == 1
    assert lines[0].startswith("The weights are stored in bfloat16 and are computed in float32")
    exact, silent = loaded(stored, "cpu", "bfloat16")
    assert exact.dtype is torch.bfloat16
    assert not silent
    assert all(torch.equal(a, b.float()) for a, b in zip(model.parameters(), exact.parameters(), strict=True))
    assert loaded(stored, "auto", "float16")[0].dtype is torch.float16
    assert loaded(None)[1] == []


@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
def test_a_loaded_model_is_hugging_face_s(stored: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers as well: rotary frequencies stay in float32 where the weights are of 16 bits."""
    monkeypatch.setattr(checkpoints, "SMALL", 0)
    theirs = AutoModelForCausalLM.from_pretrained(stored, dtype=dtype)
    ours = loaded(stored, "auto", dtype)[0]
    for (name, a), (_, b) in zip(theirs.named_buffers(), ours.named_buffers(), strict=True):
        assert a.dtype is b.dtype, name
        assert torch.equal(a, b), name
    ids = torch.arange(5, 400)[None]
    assert torch.equal(theirs(ids).logits, ours(ids).logits)
    cast = loaded(None, "auto", "bfloat16")[0]
    assert cast.dtype is torch.bfloat16
    assert all(buffer.dtype is torch.float32 for buffer in cast.buffers() if buffer.is_floating_point())


def test_large_models_and_full_memories_stay_as_stored(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "free_bytes", lambda _: 20_000_000)
    assert loaded(stored)[0].dtype is torch.bfloat16
    monkeypatch.setattr(checkpoints, "free_bytes", lambda _: None)
    monkeypatch.setattr("draftree.checkpoints.SMALL", 1_000_000)
    assert loaded(stored)[0].dtype is torch.bfloat16


def test_a_spread_model(stored: str) -> None:
    model, lines = loaded(stored, "auto", "auto", "auto")
    assert (model.dtype, lines) == (torch.bfloat16, [])


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (Placement(device="gpu"), "There is no device 'gpu' here: give cpu, or auto for the best"),
        (Placement(dtype="int8"), "dtype is 'int8': choose auto, float32, bfloat16, float16"),
        (Placement(dtype="fp16"), r"choose auto, float32, bfloat16, float16\. Did you mean 'float16'\?"),
        (Placement(device="cpu", device_map="auto"), "give one of them"),
        (Placement(quantize="int4"), "quantize is 'int4': give q4_0, q8_0, int8, or leave it out"),
        pytest.param(
            Placement(device="cuda:7"),
            "There is no device 'cuda:7' here",
            marks=pytest.mark.skipif(torch.cuda.device_count() > 7, reason="it is there"),
        ),
    ],
)
def test_what_cannot_be(placement: Placement, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model("./nowhere", placement)


def test_a_drafter_belongs_to_a_model_in_either_type(stored: str, tmp_path: Path) -> None:
    half, whole = loaded(stored, "cpu", "bfloat16")[0], loaded(stored)[0]
    assert model_hash(half) == model_hash(whole)
    fresh = Medusa.fresh(whole)
    fresh.base = base_of(whole)
    fresh.save_pretrained(tmp_path)
    ids = torch.tensor([[5, 9, 20]])
    for model in (half, whole):
        drafter = load_drafter(tmp_path, model)
        drafted = draftree.generate(model, ids, drafter=drafter, max_new_tokens=8, strict=True).sequences
        assert torch.equal(drafted, draftree.generate(model, ids, max_new_tokens=8, strict=True).sequences)


@pytest.mark.parametrize("name", [None, "stored"])
def test_weights_of_8_bits(name: str | None, stored: str) -> None:
    """A model of its own: its text is Hugging Face's of that model, with draft tokens and without.

    In bfloat16 so where the model's own `forward` runs; compiled layers may decide a tie otherwise, and always alike.
    """
    pytest.importorskip("torchao")
    model, lines = loaded(name and stored, "auto", "auto", None, "int8")
    whole = loaded(name and stored)[0]
    assert model.dtype is (torch.float32 if name is None else torch.bfloat16)
    assert not lines
    linear = model.model.layers[0].mlp.down_proj.weight
    assert type(linear).__name__ == "Int8Tensor"
    assert not torch.equal(linear.dequantize().float(), whole.model.layers[0].mlp.down_proj.weight)
    assert type(model.lm_head.weight) is torch.nn.Parameter
    ids = torch.tensor([[5, 9, 20, 9, 20]])
    stock = model.generate(ids, max_new_tokens=12, do_sample=False)
    strict = name is not None
    for runner in ("auto", "hooked"):
        plain = draftree.generate(model, ids, max_new_tokens=12, strict=strict, runner=runner).sequences
        expected = plain if strict and runner == "auto" else stock
        for drafter in (None, draftree.Lookahead()):
            found = draftree.generate(model, ids, drafter=drafter, max_new_tokens=12, strict=strict, runner=runner)
            assert torch.equal(found.sequences, expected)


def test_8_bits_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"need torchao and accelerate: pip install -e '.\[quantize\]'"):
        load_model(None, Placement(quantize="int8"))


def test_an_adapter_without_peft(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"holds an adapter \(LoRA\): pip install peft"):
        load_model(str(tmp_path))


def test_the_command_line_loads_by_them(stored: str) -> None:
    arguments = ["generate", "--model", stored, "--json", "--max-new-tokens", "4", "Hi"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["token_ids"]
    assert "are computed in float32" in done.stderr
    silent = CliRunner().invoke(app, [*arguments, "--dtype", "bfloat16", "--device", "cpu", "--threads", "1"])
    assert silent.exit_code == 0
    assert "float32" not in silent.stderr


# ---------------------------------------------------------------- names that are no folder


class Hub:
    """Answers in place of the Hugging Face hub, and counts the questions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
        self.answers, self.asked = list(answers), 0
        checkpoints._on_hub.cache_clear()
        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", self.ask)

    def ask(self, url: str) -> Any:
        assert url.endswith("/config.json")
        self.asked += 1
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def refused(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    response = MagicMock(status_code=status, headers={})  # of the library that huggingface_hub uses
    return kind("no", response=response)


def test_a_mistyped_name_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch, refused(RepositoryNotFoundError, 404))
    with pytest.raises(ValueError, match=r"no folder 'no-such-modell', and no such model on the Hugging Face hub"):
        load_model("no-such-modell")
    with pytest.raises(ValueError, match="no such model on the Hugging Face hub"):
        load_model("no such model")


def test_without_a_network_one_question_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    hub = Hub(monkeypatch, OSError("Name or service not known"))
    with pytest.raises(ValueError, match=r"hub is not reached \(Name or service not known\): give a folder, or check"):
        load_model("some/model")
    assert hub.asked == 1
    Hub(monkeypatch, OfflineModeIsEnabled("HF_HUB_OFFLINE is set"))
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        load_model("some/model")


@pytest.mark.parametrize("stored_as", ["config.json", "adapter_config.json"])
def test_without_a_network_the_cache_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stored: str, stored_as: str
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--some--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("1234")
    if stored_as == "config.json":
        shutil.copytree(stored, kept / "snapshots" / "1234")
    else:
        (kept / "snapshots" / "1234").mkdir(parents=True)
        (kept / "snapshots" / "1234" / stored_as).write_text("{}")
    Hub(monkeypatch, OSError("no network"))
    assert checkpoints.known_folder("some/model") == str(kept / "snapshots" / "1234")
    if stored_as == "config.json":
        Hub(monkeypatch, OSError("no network"))
        assert load_model("some/model")[0].num_parameters() > 4_000_000


@pytest.mark.parametrize(
    "answers",
    [
        [None],
        [refused(RemoteEntryNotFoundError, 404)],
        [refused(GatedRepoError, 403)],
    ],
    ids=["there", "an adapter", "gated"],
)
def test_what_the_hub_may_have_is_loaded_by_hugging_face(monkeypatch: pytest.MonkeyPatch, answers: list[Any]) -> None:
    hub = Hub(monkeypatch, *answers)
    assert checkpoints.known_folder("some/model") == "some/model"
    assert hub.asked == len(answers)


def test_free_memory_ends_where_the_containers_does(monkeypatch, tmp_path):
    if checkpoints.free_bytes(torch.device("cpu")) is None:
        pytest.skip("this system does not tell")
    files = {"memory.max": 900, "memory.current": 500, "memory.stat": "anon 300\ninactive_file 150"}
    for name, content in files.items():
        (tmp_path / name).write_text(f"{content}\n")
    monkeypatch.setattr(checkpoints, "CONTROL_GROUP", tmp_path)
    assert checkpoints.free_bytes(torch.device("cpu")) == 900 - 500 + 150
    (tmp_path / "memory.max").write_text("max\n")
    assert checkpoints.free_bytes(torch.device("cpu")) > 2**20
