"""Answers about images: JSON of forms, one form after another, with a trie that learns from the answers before.

A tiny model learns to read the forms first (`forms`) and may then be inflated (`--params`). Every way answers the same
forms in turns; the time of a whole answer counts, the reading of the image included. A second table compares the peak
memory of a prompt with all forms, in processes of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration

import draftree
from benchmarks.harness import PLAIN, Experiment, Setup, Share, bars, table_of
from benchmarks.harness.measure import all_differing, length, of
from benchmarks.inflate import inflate, places_of
from benchmarks.machine.forms import SCHEMA, form, pixels_of, prompt_of, tiny_model, train
from benchmarks.peers.worker import peak_bytes
from draftree.bench.report import describe
from draftree.engine import Engine, SamplingParams
from draftree.grammar import Grammar
from draftree.runner.weights.packed import parameter_count

HF, TRIE = "HF generate", "lookahead"
BY_SCHEMA = ", schema"  # behind the name of a way whose answers follow the schema
Inputs = dict[str, Tensor]
Ask = Callable[[Inputs], dict[str, Any]]


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Tokens a second of JSON about images of forms, plainly and drafted by a trie, and the memory of such prompts."""
    setup.watcher.stage("training the reader of forms", setup["train_steps"])
    tokenizer = setup.tokenizer
    model = tiny_model(len(tokenizer), tokenizer.eos_token_id)
    train(model, tokenizer, setup["train_steps"], setup["train_batch"], lambda *losses: setup.watcher.step())
    if setup.params is not None:
        model = inflated(model, setup.params)
    forms = [form(seed) for seed in range(setup["forms"])]
    prompt = prompt_of(tokenizer, model.config.image_token_id)
    asked = [{"input_ids": prompt, "pixel_values": pixels_of([image])} for image, _, _ in forms]
    grammar = Grammar.json_schema(SCHEMA).compile(tokenizer, model.config.text_config.vocab_size, (ends_of(model),))
    setup.watcher.stage("measuring", len(forms) * setup["rounds"])
    rows: list[dict[str, Any]] = []
    for turn in range(setup["rounds"]):
        ways: list[tuple[str, Ask]] = [(HF, partial(by_hugging_face, model))]
        for name, make in ((PLAIN, lambda: None), (TRIE, draftree.Lookahead)):
            for more, held in (("", None), (BY_SCHEMA, grammar)):
                params = SamplingParams(128, (ends_of(model),), grammar=held)
                ways.append((name + more, by_engine(Engine(model, drafter=make(), slots=1), params)))
        for number, inputs in enumerate(asked):
            first = (turn * len(asked) + number) % len(ways)
            for way, ask in [*ways[first:], *ways[:first]]:
                rows.append({"way": way, "round": turn, "group": number, "set": "forms"} | ask(inputs))
            setup.watcher.step()
    answers = [tokenizer.decode(row["ids"][0], skip_special_tokens=True) for row in rows if row["way"] == PLAIN]
    made = table(pd.DataFrame(rows), right(answers, [text for _, _, text in forms]), memory(model, tokenizer, forms))
    made.attrs["about"] = describe(model, f"reader of forms, {parameter_count(model) / 1e6:.0f}M parameters")
    yield made


def table(runs: pd.DataFrame, share: float, used: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each way; `share` of the values are right."""
    rows = []
    plain, theirs = of(runs, PLAIN), of(runs, HF)
    for way in runs["way"].unique():
        own = of(runs, way)
        speed = Share(own["seconds"], own["tokens"])
        rows.append(
            {"way": way, "tokens/s": 1 / speed.value}
            | (Share(plain["seconds"], plain["tokens"]) / speed).columns("over plain")
            | (Share(theirs["seconds"], theirs["tokens"]) / speed).columns("over HF")
            | {"acceptance length": None if way == HF else length(own).value}
            | {"CPU ms a token": 1000 * own["cpu"].sum() / own["tokens"].sum()}
        )
    ratio = used["MB"].iloc[1] / used["MB"].iloc[0]
    remarks = [f"The model reads {share:.0%} of the forms' values right."]
    remarks.append(f"A prompt with all forms takes {ratio:.2f} times the memory that it takes Hugging Face.")
    by_schema = runs["way"].str.endswith(BY_SCHEMA)
    differing = all_differing(runs[~by_schema], reference=HF)
    differing += all_differing(runs[by_schema], reference=PLAIN + BY_SCHEMA)
    tables = {"Peak memory of a prompt with all forms": used}
    return table_of(rows, differing=differing, tables=tables, remarks=remarks)


def ends_of(model: Any) -> int:
    """Return the EOS token."""
    return int(model.config.text_config.eos_token_id)


def by_hugging_face(model: Any, inputs: Inputs) -> dict[str, Any]:
    """Return one answer by Hugging Face's `generate`."""
    began, cpu = time.perf_counter(), time.process_time()
    ids = model.generate(**inputs, max_new_tokens=128, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    row: dict[str, Any] = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
    return row | {"tokens": len(ids), "ids": [ids], "steps": len(ids), "accepted": 0}


def by_engine(engine: Engine, params: SamplingParams) -> Ask:
    """Return a function that answers by an engine that lives on."""

    def ask(inputs: Inputs) -> dict[str, Any]:
        began, cpu = time.perf_counter(), time.process_time()
        request = engine.add(inputs["input_ids"][0].tolist(), params, inputs=inputs)
        engine.run()
        row: dict[str, Any] = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
        if request.error is not None:
            raise request.error
        stats = request.stats
        return row | {
            "tokens": stats.emitted,
            "ids": [request.tokens],
            "steps": stats.steps,
            "accepted": stats.accepted,
        }

    return ask


def right(answers: list[str], texts: list[str]) -> float:
    """Return the share of right values."""

    def values(text: str) -> list[Any]:
        try:
            said = json.loads(text)
            return [said["number"], *said["customer"].values(), said["date"], *said["order"].values(), said["paid"]]
        except (ValueError, LookupError, TypeError, AttributeError):
            return []

    pairs = [(values(answer), values(text)) for answer, text in zip(answers, texts, strict=False)]
    return sum(sum(map(bool, map(lambda a, b: a == b, *pair))) for pair in pairs) / sum(len(b) for _, b in pairs)


def inflated(model: Any, params: str) -> Any:
    """Return the model with an inflated text model; it says the same."""
    small = LlamaForCausalLM(model.config.text_config)
    small.model, small.lm_head = model.model.language_model, model.lm_head
    large = inflate(small, params)
    config = LlavaConfig.from_dict(model.config.to_dict() | {"text_config": large.config.to_dict()})
    config.tie_word_embeddings = large.config.tie_word_embeddings
    made = LlavaForConditionalGeneration(config).eval()
    made.model.vision_tower = model.model.vision_tower
    made.model.language_model, made.lm_head = large.model, large.lm_head
    own, wide = model.model.multi_modal_projector, made.model.multi_modal_projector
    with torch.no_grad():
        for name in ("linear_1", "linear_2"):
            for old, new in zip(getattr(own, name).parameters(), getattr(wide, name).parameters(), strict=True):
                new.zero_()[tuple(map(slice, old.shape))] = old
        constant = places_of(large).constant
        if constant is not None:
            wide.linear_2.bias[constant] = large.get_input_embeddings().weight[0, constant]
    return made


# ---------------------------------------------------------------- memory


def memory(model: Any, tokenizer: Any, forms: list[Any]) -> pd.DataFrame:
    """Return the peak memory that a prompt with all forms takes on top of the model and its runner."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        ids = prompt_of(tokenizer, model.config.image_token_id, len(forms))
        torch.save(
            {"input_ids": ids, "pixel_values": pixels_of([image for image, _, _ in forms])}, f"{folder}/inputs.pt"
        )
        found = {}
        for way in (HF, "draftree"):
            command = [sys.executable, "-m", "benchmarks.machine.images", folder, way]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[way] = int(done.stdout)
    return table_of({"way": way, "MB": held / 1e6, "of HF": held / found[HF]} for way, held in found.items())


def peak_of(folder: Path, way: str) -> int:
    """Return the bytes by which a prompt's peak exceeds the memory before it, after a text of one token."""
    torch.set_num_threads(1)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    inputs = torch.load(folder / "inputs.pt")
    answer = model.generate if way == HF else lambda **given: draftree.generate(model, **given)
    answer(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # The peak is what there is now.
    before = peak_bytes()
    answer(**inputs, max_new_tokens=4, do_sample=False)
    return peak_bytes() - before


EXPERIMENT = Experiment(
    run,
    ("way", "tokens/s", "over plain", "over HF", "acceptance length", "CPU ms a token"),
    bars("over plain", label="way"),
    {"forms": 20, "rounds": 1, "train_steps": 1000, "train_batch": 8},
    name="images",
)

if __name__ == "__main__":
    print(peak_of(Path(sys.argv[1]), sys.argv[2]))
