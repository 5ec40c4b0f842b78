"""A pair for BiLD, built on demand by this checkout's recipes: large, unaligned small, aligned small.

The unaligned small model learns references, the aligned one then all that the large one says to the same inputs (BiLD,
section 3.5). Rows with `de` and `en` make a translation pair: `recipes/translation_pair.py` trains a large and a small
T5. Where the options `field` and `reference` name a question and its answer, the large model is the embedded one, and
`recipes/small_causal.py` trains the small one. What is complete is kept in the result folder and not made again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Setup, on_demand
from benchmarks.harness.quality import check_metric
from draftree.drafting import DraftModel
from draftree.models import load_model
from draftree.prompts import Watcher
from draftree.training.align import align_on_inputs
from draftree.training.answers import AnswerOptions, fingerprint, make_data
from draftree.training.options import RECIPE, Inputs, TrainOptions, read_questions, template_of

RECIPES = Path(__file__).parents[2] / "recipes"
OPTIONS: dict[str, Any] = {"pair_data": "", "pair_dev": "", "pair_minutes": 60.0, "pair_align_rows": 0}  # 0: all rows
SIDES = ("de", "en")
LARGE, SMALL = "large", "small"
SHARE = 0.2  # of the large model's time, for the small one
ROUNDS = ((4.0, 1e-3), (2.0, 2e-4))  # epochs and learning rate of each round of alignment
LONGEST = 80  # tokens of a sentence


def built(setup: Setup) -> Setup:
    """Return the setup with the pair that its options ask for: models, rows of the dev file, references.

    Raises:
        ValueError: a model or rows that are named beside it, no dev file, rows without what was named, no minutes,
            a translation pair that is to be inflated, or a metric whose package is missing.
        RuntimeError: the recipe has failed.
    """
    data, dev, minutes = Path(setup["pair_data"]), Path(setup["pair_dev"]), setup["pair_minutes"]
    if setup.name is not None:
        raise ValueError("A pair is built, and a model is named as well: leave --model or --set pair_data= out.")
    if not setup["pair_dev"]:
        raise ValueError("A pair is built on pair_data and measured on other rows: name them by --set pair_dev=.")
    if not minutes > 0:
        raise ValueError(f"pair_minutes is {minutes}: give more than 0.")
    if doubled := [name for name in ("small", "aligned", "data") if setup[name]]:
        raise ValueError(f"A pair is built and measured on pair_dev: leave {' and '.join(doubled)} out.")
    translates = not setup["reference"]
    if translates and setup.params is not None:
        raise ValueError("A translation pair is built, which cannot be inflated: leave --params out.")
    check_metric(setup["metric"] or "bleu")
    field, reference = SIDES if translates else (setup["field"] or None, setup["reference"])
    for path in (data, dev):
        read_questions([path], field=field, reference=reference)
    about = [data.read_bytes().hex(), minutes] if translates else [data.read_bytes().hex(), minutes, field, reference]
    place = on_demand.place_of(setup) / f"pair-{fingerprint(about)[:12]}"
    setup.watcher.stage(f"training of the pair, {minutes:g} processor minutes for the longest part", None)
    named = _translation(setup, place, data, dev, minutes) if translates else _causal(setup, place, data, minutes)
    named |= {"data": str(dev), "field": field or "", "reference": reference, "pair_data": ""}
    return replace(setup, name=str(place / LARGE) if translates else None, options={**setup.options, **named})


def about(setup: Setup) -> dict[str, Any]:
    """Return the name of a translation pair that was built, for a result file; {} for other models."""
    if setup.name is None or not Path(setup.name).parent.name.startswith("pair-"):
        return {}
    sizes = [round(model_size / 1e6, 1) for model_size in map(_size, (setup.name, setup["small"]))]
    return {"model": f"T5 pair of recipes/translation_pair.py, {sizes[0]:g}M and {sizes[1]:g}M"}


def _size(folder: str) -> int:
    return int(json.loads((Path(folder) / RECIPE).read_text("utf-8"))["parameters"])


def _translation(setup: Setup, place: Path, data: Path, dev: Path, minutes: float) -> dict[str, str]:
    """Return both small models of a German-English pair, after the large one."""
    for size, own in ((LARGE, minutes), (SMALL, minutes * SHARE)):
        given = {"--size": size, "--data": data, "--dev": dev, "--out": place, "--minutes": own}
        _run("translation_pair.py", place / size, given, setup.watcher)
    answers, aligned, rows = AnswerOptions(LONGEST, slots=32), place / SMALL, setup["pair_align_rows"] or None
    name = f"aligned-{rows}" if rows else "aligned"
    for number, (epochs, rate) in enumerate(ROUNDS):
        options = TrainOptions(epochs=epochs, learning_rate=rate, batch=64, evaluations=1)
        inputs = Inputs(data, field=SIDES[0], limit=rows) if number == 0 else Inputs(place / f"{name}-1" / "answers")
        large, tokenizer = load_model(str(place / LARGE))
        out = place / f"{name}-{number + 1}"
        aligned = _align(large, tokenizer, aligned, inputs, out, answers, options, setup.watcher)
    return {"small": str(place / SMALL), "aligned": str(aligned)}


def _causal(setup: Setup, place: Path, data: Path, minutes: float) -> dict[str, str]:
    """Return both small models of the embedded one."""
    field, learned = setup["field"] or None, place / "references"
    questions = read_questions([data], field=field, reference=setup["reference"])
    template = template_of(setup.tokenizer, setup["template"] or None)
    answers = AnswerOptions(on_demand.ANSWER)
    about: dict[str, Any] = {"template": template, "options": answers}
    make_data(setup.small, setup.tokenizer, on_demand.answered(questions), learned, **about)
    given = {"--data": learned, "--out": place / SMALL, "--minutes": minutes, "--hard": 1, "--prompt-weight": 0}
    _run("small_causal.py", place / SMALL, given, setup.watcher, "--unaligned")
    options = TrainOptions(epochs=4.0, learning_rate=2e-3, batch=32, evaluations=1)
    inputs = Inputs(data, field=field, template=setup["template"] or None)
    out = place / "aligned"
    aligned = _align(setup.small, setup.tokenizer, place / SMALL, inputs, out, answers, options, setup.watcher)
    return {"small": str(place / SMALL), "aligned": str(aligned)}


def _align(
    large: Any,
    tokenizer: Any,
    start: Path,
    inputs: Inputs,
    out: Path,
    answers: AnswerOptions,
    options: TrainOptions,
    watcher: Watcher,
) -> Path:
    """Return the folder of the small model in `start` after it has learned what the large one says to the inputs."""
    if not (out / RECIPE).is_file():
        shutil.rmtree(out, ignore_errors=True)  # what a run that was killed has left is begun anew
        small = DraftModel.from_pretrained(str(start), tokenizer, dtype=large.dtype).model
        align_on_inputs(large, tokenizer, small, inputs, out, answers=answers, options=options, report=watcher.say)
    return out


def _run(script: str, out: Path, given: dict[str, Any], watcher: Watcher, *flags: str) -> None:
    """Run a recipe and show its lines, unless what it writes is there already."""
    if (out / RECIPE).is_file():
        return
    words = [*(str(word) for pair in given.items() for word in pair), *flags]
    command, last = [sys.executable, str(RECIPES / script), *words], "no message"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as recipe:
        for line in recipe.stdout or ():
            last = line.strip() or last
            watcher.say(last)
    if recipe.returncode:
        raise RuntimeError(f"recipes/{script} has failed: {last}")
