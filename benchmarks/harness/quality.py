"""How good texts are against references: BLEU by sacrebleu, ROUGE-L by rouge-score (BiLD, sections 4.1 and 7.1.1).

Both packages are the usual ones and come with the extra `bench`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from draftree.errors import install

METRICS = {"bleu": ("BLEU", "sacrebleu", "sacrebleu"), "rouge-l": ("ROUGE-L", "rouge_score", "rouge-score")}
NGRAMS = 4  # words of the longest n-gram of BLEU


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
    """Return points, 0 to 100: corpus BLEU, or the mean F1 of ROUGE-L with stemming."""
    return points(metric, row_statistics(metric, texts, references).sum(0))


def row_statistics(metric: str, texts: Sequence[str], references: Sequence[str]) -> NDArray[np.float64]:
    """Return what each answer adds to the metric, [rows, numbers]; `points` of their sum are those of the whole.

    Of BLEU these are matched and all n-grams of 1 to 4 words and both lengths; of ROUGE-L its F1 and a 1.
    """
    check_metric(metric)
    pairs = list(zip(texts, references, strict=True))
    if metric == "bleu":
        from sacrebleu.metrics import BLEU

        scores = [BLEU(effective_order=True).sentence_score(text, [known]) for text, known in pairs]
        rows = [[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores]
        return np.array(rows, float).reshape(len(rows), 2 * NGRAMS + 2)
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    found = [[scorer.score(known, text)["rougeL"].fmeasure, 1.0] for text, known in pairs]
    return np.array(found, float).reshape(len(found), 2)


def points(metric: str, sums: NDArray[np.float64]) -> float:
    """Return points, 0 to 100, of summed `row_statistics` [numbers]; 0 of no rows."""
    if metric == "bleu":
        from sacrebleu.metrics import BLEU

        whole = [round(number) for number in sums.tolist()]
        matched, total, (said, known) = whole[:NGRAMS], whole[NGRAMS:-2], whole[-2:]
        return float(BLEU.compute_bleu(matched, total, said, known, smooth_method="exp").score)
    return 100 * float(sums[0]) / max(float(sums[1]), 1.0)
