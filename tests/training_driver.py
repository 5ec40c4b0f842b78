"""Training data, runs and weights for tests of training."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from zoo import MEMBERS, construct

from draftree.drafting.folder import base_of
from draftree.engine import Engine, SamplingParams
from draftree.training.answers import META, ROWS
from draftree.training.options import TrainOptions
from draftree.training.rows import Row
from draftree.training.run import train

OPTIONS = TrainOptions(steps=6, batch=4, evaluations=2, checkpoints=2, dev_rows=6)
METHODS = {
    "bita": {"prompts": 4, "masks": 2},
    "hidden-transfer": {"transfer_layers": [1, 2]},
    "medusa": {"heads": 2},
    "early-head": {"layer": 2, "places": 3},
}


def data_for(model, folder, count=60, lengths=7):
    """Write greedy answers of a zoo model to random prompts, as `draftree train data` stores them."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 97, (4 + number % 5,), generator=generator) for number in range(count)]
    start = model.config.decoder_start_token_id if model.config.is_encoder_decoder else None
    with Engine(model, slots=20, runner="hooked") as engine:
        answers = [
            engine.add(prompt, SamplingParams(6 + number % lengths))
            if start is None
            else engine.add([start], SamplingParams(6 + number % lengths), encoder_input=prompt)
            for number, prompt in enumerate(prompts)
        ]
        engine.run()
    folder.mkdir(parents=True)
    about = {"model": asdict(base_of(model)), "template": "none", "complete": True, "rows": count}
    (folder / META).write_text(json.dumps(about))
    rows = [
        {"id": str(number), "set": "s", "prompt_ids": prompt.tolist(), "answer_ids": answer.tokens}
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    (folder / ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def zoo_data(tmp_path_factory):
    """Return a tiny llama and data that it generated."""
    model = construct(MEMBERS["llama"])
    return model, data_for(model, tmp_path_factory.mktemp("data") / "made")


def run(zoo_data, out, method="medusa", **changes):
    model, data = zoo_data
    quiet = changes.pop("report", lambda line: None)
    more = {name: changes.pop(name) for name in ("training", "splits") if name in changes}
    options = replace(OPTIONS, **changes)
    return train(method, model, data, out, settings=METHODS[method], options=options, report=quiet, **more)


def weights_of(folder):
    from safetensors.torch import load_file

    held = load_file(folder / "drafter.safetensors")
    return {name: tensor.clone() for name, tensor in held.items()}  # The file may be written again.


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def randomise(module):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.3)


def rows_for(model, count=2):
    generator = torch.Generator().manual_seed(5)
    sizes = [(9, 14), (5, 11)][:count]
    encoder_decoder = bool(model.config.is_encoder_decoder)
    rows = []
    for prompt, total in sizes:
        tokens = tuple(torch.randint(0, 97, (total,), generator=generator).tolist())
        source = tuple(torch.randint(3, 97, (prompt + 2,), generator=generator).tolist()) if encoder_decoder else ()
        rows.append(Row(tokens, prompt, source))
    return rows
