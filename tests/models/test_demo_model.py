"""The embedded model loads from the package alone, says the same thing every time, and needs no network."""

import json
import os
import re
import subprocess
import sys
from importlib.resources import files

import torch

import draftree
from draftree.drafting.folder import model_hash


def test_model_is_fp32_in_eval_mode_on_cpu(demo):
    assert {p.dtype for p in demo.model.parameters()} == {torch.float32}
    assert {p.device.type for p in demo.model.parameters()} == {"cpu"}
    assert not demo.model.training
    assert sum(p.numel() for p in demo.model.parameters()) == 4_033_728


def test_each_call_returns_its_own_model(demo):
    model, _ = draftree.demo_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert demo.model.lm_head.weight.abs().sum() > 0


def test_token_zero_is_live_and_special_tokens_are_known(demo):
    tokenizer = demo.tokenizer
    assert tokenizer.decode([0]) not in ("", tokenizer.pad_token)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (4090, 4091, 4095)
    assert demo.model.config.vocab_size == len(tokenizer) == 4096


def test_it_answers_in_its_domain(demo):
    messages = [{"role": "user", "content": "Natalia has 3 apples and buys 4 more. How many has she?"}]
    prompt = demo.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt.endswith("<|assistant|>\n")
    inputs = demo.tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    out = demo.model.generate(**inputs, max_new_tokens=48, do_sample=False)
    answer = demo.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert len(answer.split()) >= 5
    assert any(c.isdigit() for c in answer)


def test_readme_stands_beside_the_weights():
    folder = files("draftree") / "data" / "chat_4m"
    assert "CC BY-SA" in (folder / "README.md").read_text(encoding="utf-8")
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= {
        entry.name for entry in folder.iterdir()
    }


def test_the_hybrid_is_small_and_told_of(demo, hybrid):
    folder = files("draftree") / "data" / "chat_hybrid"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 10_000_000
    recipe = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    assert recipe["base_model"]["hash"] == model_hash(demo.model)
    assert recipe["parameters"] == sum(p.numel() for p in hybrid.model.parameters())
    credited = (files("draftree") / "data" / "chat_4m" / "README.md").read_text(encoding="utf-8")
    assert all(re.search(rf"^\| {name}\b.*\|$", credited, re.MULTILINE) for name in recipe["sets"])
    assert "linear_attention" in hybrid.model.config.layer_types
    assert {p.dtype for p in hybrid.model.parameters()} == {torch.float32}
    assert hybrid.tokenizer.get_vocab() == demo.tokenizer.get_vocab()


def test_loads_online_settings_without_any_network(tmp_path):
    """With offline mode unset and every connection refused, nothing is asked for and nothing is printed."""
    script = """
import socket, sys

def refuse(*args, **kwargs):
    print("asked the network for", args, file=sys.stderr)
    raise OSError("no network")

socket.socket.connect = socket.getaddrinfo = refuse
import draftree
assert "torch" not in sys.modules, "import draftree pulled in torch"
model, tokenizer = draftree.demo_model()
assert tokenizer.decode(tokenizer("a b", add_special_tokens=False)["input_ids"]) == "a b"
"""
    env = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    env["HF_HOME"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
