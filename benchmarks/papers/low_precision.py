"""Lookahead's Table 6: answers in 16 bits with and without drafts.

Products of 16-bit types depend on how many rows a pass has, so that answers with drafts may part from plain decoding's
where two tokens are nearly level; `strict=True` rules that out. The paper measures accuracies on public tests; here
each answer is held against plain decoding's of the same type, and its words against those of float32.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import torch

from benchmarks.harness import PLAIN, Experiment, Setup, Way, bars, measure, table_of
from benchmarks.harness.measure import differing
from benchmarks.papers.ways import QUICK
from draftree.bench.inputs import Subject
from draftree.shaping import DynamicTree
from draftree.training.quality import quality

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
WHOLE, DRAFTED, STRICT = "float32", "Lookahead", "Lookahead, strict"


def precision(setup: Setup) -> Iterator[pd.DataFrame]:
    """Answers in 16 bits with and without Lookahead: how many are equal, and how near their words are to float32's."""
    kinds = setup["types"]
    if wrong := [kind for kind in kinds if kind not in TYPES]:
        raise ValueError(f"There is no 16-bit type {wrong[0]!r}: choose {' or '.join(TYPES)}.")
    whole = measure(setup, [Way(PLAIN)])
    truth = _texts(setup, whole, PLAIN)
    rows: list[dict[str, Any]] = []
    for kind in kinds:
        model = copy.deepcopy(setup.model).to(TYPES[kind])
        half = _with(setup, model)
        make = partial(setup.trie, None)
        ways = [Way(PLAIN), Way(DRAFTED, make(), DynamicTree())]
        ways.append(Way(STRICT, make(), DynamicTree(), {"strict": True}))
        runs = measure(half, ways)
        for way in ways:
            answers = len(runs[runs["way"] == way.name])
            rows.append(
                {"type": kind, "way": way.name, "answers": answers}
                | {"equal_to_plain": answers - differing(runs, way.name)}
                | {"equal_to_float32": answers - differing(runs, way.name, whole)}
                | {"rouge_l_to_float32": quality("rouge-l", _texts(setup, runs, way.name), truth)}
            )
        strict = sum(row["answers"] - row["equal_to_plain"] for row in rows if row["way"] == STRICT)
        yield table_of(rows, differing=strict, remarks=["Only strict answers are promised to be equal in 16 bits."])


def _with(setup: Setup, model: Any) -> Setup:
    """The same setup on another model of the same tokenizer; prompts and trie texts stay."""
    held = replace(setup)
    vars(held).update({name: value for name, value in vars(setup).items() if name in ("encoded", "texts")})
    held.__dict__["inflated"] = Subject(model, setup.tokenizer, setup.name)
    held.__dict__["subject"] = setup.subject
    return held


def _texts(setup: Setup, runs: pd.DataFrame, way: str) -> list[str]:
    own = runs[runs["way"] == way].sort_values("group")
    texts: list[str] = setup.tokenizer.batch_decode([ids[0] for ids in own["ids"]], skip_special_tokens=True)
    return texts


EXPERIMENT = Experiment(
    "",
    "",
    precision,
    ("type", "way", "answers", "equal_to_plain", "equal_to_float32", "rouge_l_to_float32"),
    bars("rouge_l_to_float32", label=("type", "way"), mark=None),
    {name: value for name, value in QUICK.items() if name != "nodes"} | {"types": ("bfloat16",)},
).of_paper("Lookahead", "Table 6")
