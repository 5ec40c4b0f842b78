"""BLEU of texts against references, by sacrebleu, which comes with the extra `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from draftree.errors import install


def check_bleu() -> None:
    """Raise a ValueError where sacrebleu is missing."""
    if find_spec("sacrebleu") is None:
        raise ValueError(f"BLEU needs sacrebleu: {install('bench')}.")


def bleu(texts: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU, 0 to 100, of one text or more, each with one reference; a ValueError as of `check_bleu`."""
    check_bleu()
    from sacrebleu.metrics import BLEU

    return float(BLEU(force=True).corpus_score(texts, [references]).score)  # silent about texts cut into words
