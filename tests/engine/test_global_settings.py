"""Torch's default type and device, set before generating, change no text.

Notebooks set a default type to load a model, scripts a default device, and generate while it is set. Every tensor of
draftree names its type and device. Each case has a fresh copy of its model, so that its runner is built under the
setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from few import crossed
from generate_driver import OF_DEMO, copy_of, left_pad, prompts

import draftree
from draftree.engine import generate
from draftree.tree import structure

NEW = 12
IDS, MASK = left_pad(prompts())  # made before any setting
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
SETTINGS = [*DTYPES, "meta"]
RUNNERS, FAMILIES = ["auto", "hooked"], ["llama", "gemma3", "phi3", "gpt2", "bloom", "t5-gated", "bart"]
DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda model: None,
    **OF_DEMO,
    "draft-model": lambda model: draftree.demo_drafter("draft-model", model),
    "bild": lambda model: draftree.BiLD(draftree.demo_drafter("draft-model", model).model, 0.4, lossless=True),
    "merge": lambda model: draftree.Merge([draftree.Lookahead(), draftree.demo_drafter("medusa", model)]),
}


@contextmanager
def setting(name: str) -> Iterator[None]:
    """Set torch's default type or device, and reset it."""
    dtype = torch.get_default_dtype()
    structure._kept.cache_clear()  # no trees made under other settings
    try:
        if name in DTYPES:
            torch.set_default_dtype(DTYPES[name])
        else:
            torch.set_default_device(name)
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
        structure._kept.cache_clear()


def ask(model: Any, drafter: Any, **options: Any) -> list[list[int]]:
    """Return the token ids of three ragged prompts."""
    settings = {"max_new_tokens": NEW, "eos_token_id": None} | options
    found: list[list[int]] = generate(model, IDS, MASK, drafter=drafter, **settings).sequences.tolist()
    return found


@cache
def expected(family: str, **options: Any) -> list[list[int]]:
    """Return the ids without any setting and without a drafter."""
    return ask(copy_of(family), None, **options)


@pytest.mark.parametrize(
    ("name", "family", "drafter", "choice"),
    [
        *crossed(SETTINGS, ["demo"], DRAFTERS, ["cpu", "hooked"]),
        *crossed(SETTINGS, FAMILIES, ["lookahead"], RUNNERS),
    ],
)
def test_texts_stay_under_every_setting(name: str, family: str, drafter: str, choice: str) -> None:
    wanted, model = expected(family), copy_of(family)
    with setting(name):
        assert ask(model, DRAFTERS[drafter](model), runner=choice) == wanted
        assert torch.get_default_dtype() == DTYPES.get(name, torch.float32)  # The setting was on throughout.
