"""A translation pair for BiLD, built on demand by this checkout's recipe: large, unaligned small, aligned small.

`recipes/translation_pair.py` trains a large and a small T5 on references; then the small one learns all that the large
one says to the same inputs (BiLD, section 3.5). What is complete is kept in the result folder and not made again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Setup, on_demand
from draftree.drafting import DraftModel
from draftree.models import load_model
from draftree.training.align_inputs import align_on_inputs
from draftree.training.answers import AnswerOptions
from draftree.training.journal import fingerprint
from draftree.training.options import RECIPE, Inputs, TrainOptions
from draftree.training.questions import read_questions

SCRIPT = Path(__file__).parents[2] / "recipes" / "translation_pair.py"
OPTIONS: dict[str, Any] = {"pair_data": "", "pair_dev": "", "pair_minutes": 60.0}
SIDES = ("de", "en")
LARGE, SMALL = "large", "small"
SHARE = 0.2  # of the large model's time, for the small one
ROUNDS = ((4.0, 1e-3), (2.0, 2e-4))  # epochs and learning rate of each round of alignment
LONGEST = 80  # tokens of a sentence


def built(setup: Setup) -> Setup:
    """The setup with the pair that its options ask for: models, rows of the dev file, references.

    Raises:
        ValueError: a named model beside it, no dev file, rows without both languages, or no minutes.
        RuntimeError: the recipe has failed.
    """
    data, dev, minutes = Path(setup["pair_data"]), Path(setup["pair_dev"]), setup["pair_minutes"]
    if setup.name is not None:
        raise ValueError("A pair is built, and a model is named as well: leave --model or --set pair_data= out.")
    if not setup["pair_dev"]:
        raise ValueError("A pair is built on pair_data and measured on other rows: name them by --set pair_dev=.")
    if not minutes > 0:
        raise ValueError(f"pair_minutes is {minutes}: give more than 0.")
    for path in (data, dev):
        read_questions([path], field=SIDES[0], reference=SIDES[1])
    place = on_demand.place_of(setup) / f"pair-{fingerprint([data.read_bytes().hex(), minutes])[:12]}"
    setup.watcher.stage("training of the pair", 2 + len(ROUNDS))
    for name, own in ((LARGE, minutes), (SMALL, minutes * SHARE)):
        if not (place / name / RECIPE).is_file():
            _run(name, data, dev, place, own)
        setup.watcher.step()
    aligned = place / SMALL
    for number, (epochs, rate) in enumerate(ROUNDS):
        out = place / f"aligned-{number + 1}"
        if not (out / RECIPE).is_file():
            shutil.rmtree(out, ignore_errors=True)  # what a run that was killed has left is begun anew
            large, tokenizer = load_model(str(place / LARGE))
            small = DraftModel.from_pretrained(str(aligned), tokenizer, dtype=large.dtype).model
            inputs = Inputs(data if number == 0 else place / "aligned-1" / "answers", field=SIDES[0])
            options = TrainOptions(epochs=epochs, learning_rate=rate, batch=64, evaluations=1)
            answers = AnswerOptions(LONGEST, slots=32)
            align_on_inputs(
                large, tokenizer, small, inputs, out, answers=answers, options=options, tell=on_demand.silent
            )
        aligned = out
        setup.watcher.step()
    named = {"small": str(place / SMALL), "aligned": str(aligned), "data": str(dev)}
    named |= {"field": SIDES[0], "reference": SIDES[1], "pair_data": ""}
    return replace(setup, name=str(place / LARGE), options={**setup.options, **named})


def _run(size: str, data: Path, dev: Path, out: Path, minutes: float) -> None:
    given = {"--size": size, "--data": data, "--dev": dev, "--out": out, "--minutes": minutes}
    words = [str(word) for pair in given.items() for word in pair]
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"recipes/translation_pair.py --size {size} has failed: {last}")
