"""Lookahead's Table 6: answers in 16 bits with and without drafts.

Products of 16-bit types depend on how many rows a pass has, so that answers with drafts may part from plain decoding's
where two tokens are nearly level; `strict=True` rules that out. Each answer is held against plain decoding's of the
same type, and its words against those of float32. The paper measures accuracies on public tests: of rows with right
answers (`--data FILE --set reference=FIELD`) the share that is right is taken as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.harness import PLAIN, Experiment, Setup, Share, Task, Way, bars, measure, table_of
from benchmarks.harness.comparisons import CLAIMED, rows_of
from benchmarks.harness.measure import differing
from benchmarks.harness.quality import quality
from benchmarks.papers.ways import QUICK
from draftree.checkpoints import Placement
from draftree.prompts import Prompt
from draftree.shaping import DynamicTree
from draftree.training.options import read_questions

TYPES = ("bfloat16", "float16")
DRAFTED, STRICT = "Lookahead", "Lookahead, strict"


def precision(setup: Setup) -> Iterator[pd.DataFrame]:
    """Answers in 16 bits with and without Lookahead: how many are equal, and how near their words are to float32's."""
    kinds = setup["types"]
    if wrong := [kind for kind in kinds if kind not in TYPES]:
        raise ValueError(f"There is no 16-bit type {wrong[0]!r}: choose {' or '.join(TYPES)}.")
    if setup.model.dtype != torch.float32:
        raise ValueError(
            f"Answers are held against float32's, and the model is {setup.model.dtype}: leave --dtype out."
        )
    tasks, references = _rows(setup)
    whole = measure(setup, [Way(PLAIN)], tasks)
    truth = _texts(setup, whole, PLAIN)
    rows, claimed = list[dict[str, Any]](), list[tuple[str, str, str, str, Share]]()
    for kind in kinds:
        half = replace(setup, placement=replace(setup.placement or Placement(), dtype=kind))
        ways = [Way(PLAIN), Way(DRAFTED, setup.trie(), DynamicTree())]
        ways.append(Way(STRICT, setup.trie(), DynamicTree(), {"strict": True}))
        runs = measure(half, ways, tasks)
        for way in ways:
            answers = len(runs[runs["way"] == way.name])
            rows.append(
                {"type": kind, "way": way.name, "answers": answers}
                | {"equal_to_plain": answers - differing(runs, way.name)}
                | {"equal_to_float32": answers - differing(runs, way.name, whole)}
                | {"rouge_l_to_float32": quality("rouge-l", _texts(setup, runs, way.name), truth)}
                | ({"accuracy": _right(setup, runs, way.name, references).value} if references else {})
            )
        strict = sum(row["answers"] - row["equal_to_plain"] for row in rows if row["way"] == STRICT)
        remarks = ["Only strict answers are promised to be equal in 16 bits."]
        plainly, drafted = (_near(setup, runs, way, truth) for way in (PLAIN, DRAFTED))
        claimed.append(("lookahead-low-precision", DRAFTED, PLAIN, f"ROUGE-L to float32, {kind}", drafted / plainly))
        if references:
            own, theirs = (_right(setup, runs, way, references) for way in (DRAFTED, PLAIN))
            claimed.append(("lookahead-low-precision", DRAFTED, PLAIN, f"accuracy, {kind}", own / theirs))
        about = {"prompts": len(tasks), "sets": list(dict.fromkeys(task.prompt.set for task in tasks))}
        yield table_of(rows, differing=strict, remarks=remarks, tables={CLAIMED: rows_of(claimed)}, about=about)


def _rows(setup: Setup) -> tuple[list[Task], list[str]]:
    """What is answered, and the right answers where there are any.

    Raises:
        ValueError: rows without a field of references, or such a field without rows; or a score that there is not.
    """
    if setup["score"] not in SCORES:
        raise ValueError(f"There is no score {setup['score']!r}: choose {' or '.join(SCORES)}.")
    if bool(setup["data"]) != bool(setup["reference"]):
        raise ValueError("Accuracies need rows and their right answers: give both --data and --set reference=FIELD.")
    if not setup["data"]:
        return setup.tasks, []
    rows = read_questions([Path(setup["data"])], setup["limit"], reference=setup["reference"])
    tasks = [Task(Prompt(row.id, row.set, row.turns[0]), setup.encode(row.turns[0])) for row in rows]
    return tasks, [str(row.reference) for row in rows]


def _right(setup: Setup, runs: pd.DataFrame, way: str, references: list[str]) -> Share:
    """Return share of a way's answers that are right, answer by answer."""
    score = SCORES[setup["score"]]
    pairs = zip(_texts(setup, runs, way), references, strict=True)
    return Share([float(score(text) == score(known)) for text, known in pairs], [1.0] * len(references))


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _number(text: str) -> str:
    found = re.findall(r"-?\d[\d,]*\.?\d*", text)
    return found[-1].replace(",", "").rstrip(".") if found else text


SCORES: dict[str, Callable[[str], str]] = {"exact": _words, "number": _number}


def _near(setup: Setup, runs: pd.DataFrame, way: str, truth: list[str]) -> Share:
    """ROUGE-L of a way's answers against the true ones, answer by answer."""
    pairs = zip(_texts(setup, runs, way), truth, strict=True)
    return Share([quality("rouge-l", [text], [true]) for text, true in pairs], [1.0] * len(truth))


def _texts(setup: Setup, runs: pd.DataFrame, way: str) -> list[str]:
    own = runs[runs["way"] == way].sort_values("group")
    return setup.tokenizer.batch_decode([ids[0] for ids in own["ids"]], skip_special_tokens=True)


EXPERIMENT = Experiment(
    precision,
    ("type", "way", "answers", "equal_to_plain", "equal_to_float32", "rouge_l_to_float32", "accuracy"),
    bars("rouge_l_to_float32", label=("type", "way"), mark=None),
    {name: value for name, value in QUICK.items() if name not in ("nodes", "batch")}
    | {"types": ("bfloat16",), "data": "", "reference": "", "limit": 200, "score": "exact"},
).of_paper("Lookahead", "Table 6")
