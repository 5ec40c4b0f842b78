"""How good texts are against references: BLEU by sacrebleu, ROUGE-L by rouge-score (BiLD, sections 4.1 and 7.1.1).

Both packages are the usual ones and come with the extra `bench`; nothing else of draftree needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from draftree.errors import install

METRICS = {"bleu": ("BLEU", "sacrebleu", "sacrebleu"), "rouge-l": ("ROUGE-L", "rouge_score", "rouge-score")}


def check_metric(metric: str) -> None:
    """Refuse a metric that is unknown, or whose package is missing.

    Raises:
        ValueError: either of them.
    """
    if metric not in METRICS:
        raise ValueError(f"There is no metric {metric!r}: choose {' or '.join(METRICS)}.")
    shown, module, package = METRICS[metric]
    if find_spec(module) is None:
        raise ValueError(f"{shown} needs {package}: {install('bench')}.")


def quality(metric: str, texts: Sequence[str], references: Sequence[str]) -> float:
    """Points, 0 to 100: corpus BLEU, or the mean F1 of ROUGE-L with stemming.

    Args:
        metric: one of `METRICS`.
        texts: the answers.
        references: one for each.

    Raises:
        ValueError: see `check_metric`.
    """
    check_metric(metric)
    if metric == "bleu":
        from sacrebleu.metrics import BLEU

        return float(BLEU().corpus_score(list(texts), [list(references)]).score)
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    scores = [scorer.score(known, text)["rougeL"].fmeasure for known, text in zip(references, texts, strict=True)]
    return 100 * sum(scores) / max(len(scores), 1)
