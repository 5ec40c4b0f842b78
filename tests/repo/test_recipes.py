"""Recipes run from end to end on a few rows: what they write is a model that drafts."""

from __future__ import annotations

import json
import runpy
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig, LlamaForCausalLM

from draftree.drafting import DraftModel
from draftree.engine import generate
from draftree.models import encode_prompt
from draftree.shaping import Fixed

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [["--minutes", "0.05"], ["--steps", "20", "--unaligned"]], ids=["aligned", "unaligned"]
)
def test_a_small_causal_model(demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]) -> None:
    lines = (Path(__file__).parents[2] / "src/draftree/data/prompts.jsonl").read_text().splitlines()[:41]
    with (tmp_path / "rows.jsonl").open("w") as file:
        for line in lines:
            ids = encode_prompt(demo.tokenizer, json.loads(line)["prompt"])
            answer = generate(demo.model, torch.tensor([ids]), max_new_tokens=12).sequences[0, len(ids) :].tolist()
            file.write(json.dumps({"prompt_ids": ids, "answer_ids": answer}) + "\n")
    out = tmp_path / "small"
    options = ["--data", str(tmp_path), "--out", str(out), *given, "--tokens", "1024", "--hidden", "32"]
    monkeypatch.setattr(sys, "argv", ["small_causal.py", *options, "--mlp", "48"])
    recipe = runpy.run_path(str(RECIPES / "small_causal.py"))["main"]
    if "--unaligned" in given:
        del recipe.__globals__["ask"]  # it must do without the large model's probabilities
    recipe()
    report = json.loads((out / "recipe.json").read_text())
    assert (report["texts"], report["held_out"]["texts"]) == (40, 1)
    assert report["options"]["unaligned"] == ("--unaligned" in given)
    assert report["steps"] == (report["options"]["steps"] or report["steps"]) > 0
    assert report["held_out"]["perplexity"] > 1
    small = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert sum(p.numel() for p in small.parameters()) == report["parameters"] < 200_000
    prompt = torch.tensor([ids])
    drafted = generate(demo.model, prompt, drafter=DraftModel(small), shape=Fixed(4), max_new_tokens=12)
    assert drafted.sequences[0, len(ids) :].tolist() == answer
    assert drafted.stats.total.drafted > 0


def test_unaligned_learns_by_plain_cross_entropy() -> None:
    recipe = runpy.run_path(str(RECIPES / "small_causal.py"))
    torch.manual_seed(0)
    small = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=24,
            pad_token_id=0,
        )
    )
    rows = [(torch.randint(40, (9,)), 4), (torch.randint(40, (6,)), 2)]
    prompts, answers = [], []
    for ids, answer in rows:
        each = torch.nn.functional.cross_entropy(small(ids[None]).logits[0, :-1], ids[1:], reduction="none")
        prompts.append(each[: answer - 1])
        answers.append(each[answer - 1 :])
    options = Namespace(hard=0.3, prompt_weight=0.25)
    loss = recipe["loss_of"](small, recipe["unasked"](rows), options)
    torch.testing.assert_close(loss, torch.cat(answers).mean() + 0.25 * torch.cat(prompts).mean())


@pytest.mark.parametrize("fast", [False, True])
def test_a_pair_learns_in_16_bits_only_where_they_are_fast(fast: bool) -> None:
    """Without instructions for them a step takes ten times as long."""
    recipe = runpy.run_path(str(RECIPES / "translation_pair.py"))
    vocabulary = type("Tokenizer", (), {"pad_token_id": 0, "eos_token_id": 1, "__len__": lambda self: 50})()
    model = recipe["untrained"]("small", 0.0, vocabulary)
    seen: list[torch.dtype] = []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    recipe["loss_of"].__globals__["bfloat16_is_fast"] = lambda: fast
    recipe["loss_of"](model, [([5, 6, 1], [7, 8, 1])], 0.0)
    assert seen == [torch.bfloat16 if fast else torch.float32]


@pytest.mark.parametrize("fast", [False, True])
def test_a_deeper_base_learns_in_16_bits_only_where_they_are_fast(demo: Any, fast: bool) -> None:
    loss_of = runpy.run_path(str(RECIPES / "deeper_base.py"))["loss_of"]
    seen: list[torch.dtype] = []
    hook = demo.model.model.layers[0].mlp.down_proj.register_forward_hook(
        lambda module, args, out: seen.append(out.dtype)
    )
    loss_of.__globals__["bfloat16_is_fast"] = lambda: fast
    loss = loss_of(demo.model, torch.tensor([[5, 6, 7, 8]]))
    hook.remove()
    assert seen == [torch.bfloat16 if fast else torch.float32]
    assert loss.dtype == torch.float32


@pytest.mark.slow
def test_a_translation_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sizes, the second with the first one's tokenizer; a run that is called again goes on from its checkpoint."""
    pairs = [{"de": f"Ein Hund und {i} Katzen.", "en": f"A dog and {i} cats."} for i in range(40)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    out = tmp_path / "pair"
    recipe = runpy.run_path(str(RECIPES / "translation_pair.py"))
    recipe["main"].__globals__["CHECKPOINT_EVERY"] = 0.0

    def run(size: str, minutes: str) -> dict[str, Any]:
        options = ["--size", size, "--data", str(data), "--dev", str(data), "--out", str(out), "--minutes", minutes]
        monkeypatch.setattr(sys, "argv", ["translation_pair.py", *options, "--vocabulary", "120", "--tokens", "64"])
        recipe["main"]()
        report: dict[str, Any] = json.loads((out / size / "recipe.json").read_text())
        return report

    small = run("small", "0.02")
    again = run("small", "0.04")
    assert again["steps"] > small["steps"] > 0
    large = run("large", "0.05")
    assert large["parameters"] > 10 * small["parameters"]
    assert large["tokens"] == small["tokens"]
    models = {size: AutoModelForSeq2SeqLM.from_pretrained(out / size) for size in ("large", "small")}
    source = torch.tensor([[5, 6, 7, 1]])
    expected = models["large"].generate(source, max_new_tokens=8, do_sample=False)
    drafted = generate(models["large"], source, drafter=DraftModel(models["small"]), max_new_tokens=8)
    assert drafted.sequences.tolist() == expected.tolist()
    assert len(models["large"].decoder.block) == 10


def test_a_deeper_base_begins_as_the_embedded_model(demo: Any) -> None:
    """It says the same, but every layer, unit and head that is new can learn: those that write are zero, not idle."""
    deeper = runpy.run_path(str(RECIPES / "deeper_base.py"))["start"](demo.model)
    assert deeper.config.num_hidden_layers == 2 * demo.model.config.num_hidden_layers
    assert not hasattr(deeper.config, "inflated_from")
    ids = torch.tensor([encode_prompt(demo.tokenizer, "Where is the nearest coffee shop?")])
    logits = deeper(ids).logits
    torch.testing.assert_close(logits, demo.model(ids).logits, atol=1e-3, rtol=1e-3)
    logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None]).sum().backward()
    learning = {name: bool(p.grad.abs().sum() > 0) for name, p in deeper.named_parameters() if p.grad is not None}
    assert all(learning[f"model.layers.{i}.mlp.down_proj.weight"] for i in range(16))
    assert all(learning[f"model.layers.{i}.self_attn.o_proj.weight"] for i in range(16))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"question": "Where?"}', "line 1 of"),
        ('{"prompt": 1, "response": "It is."}', "line 1 of"),
        ('{"text": 1}', "line 1 of"),
        ("Where?", "line 1 of"),
        ('{"text": "A short one."}', "fewer than 258 tokens"),
        (None, "there are no sets of texts"),
    ],
)
def test_a_deeper_base_refuses_texts_it_cannot_train_on(
    line: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if line is not None:
        (tmp_path / "one.jsonl").write_text(f"{line}\n")
    folders = ["--data", str(tmp_path), "--dev", str(tmp_path), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["deeper_base.py", *folders])
    with pytest.raises(SystemExit):
        runpy.run_path(str(RECIPES / "deeper_base.py"))["main"]()
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_deeper_base(demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is called again goes on from its checkpoint; losses of both models on answers stand beside it."""
    data = tmp_path / "data"
    data.mkdir()
    rows = [{"prompt": f"Add {i} and 2.", "response": f"It is {i + 2}. " * 8} for i in range(40)]
    (data / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = runpy.run_path(str(RECIPES / "deeper_base.py"))
    recipe["main"].__globals__["BLOCK"] = 24

    def run(minutes: str, **folders: Path) -> dict[str, Any]:
        given = {"data": data, "dev": data, "out": tmp_path / "out"} | folders
        options = [word for name, folder in given.items() for word in (f"--{name}", str(folder))]
        more = ["--minutes", minutes, "--batch", "1", "--threads", "1", "--rate", "1e-3"]
        monkeypatch.setattr(sys, "argv", ["deeper_base.py", *options, *more])
        recipe["main"]()
        report: dict[str, Any] = json.loads((tmp_path / "out" / "recipe.json").read_text())
        return report

    first = run("0.05")
    again = run("0.2")
    assert again["steps"] > first["steps"] > 0
    assert again["dev_loss"]["all"] < again["dev_loss_of_embedded"]["all"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert sum(p.numel() for p in model.parameters()) == again["parameters"]
    with pytest.raises(SystemExit):
        run("0.1", data=tmp_path / "nothing")
