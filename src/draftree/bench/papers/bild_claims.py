"""The figures of BiLD (Kim et al., 2023), as the paper prints them."""

from __future__ import annotations

from draftree.bench.papers.claims import Claim

PAIRS, T4 = "mT5-large with mT5-small (translation), T5-large with T5-small (summaries)", "one T4, batch 1"
OVER = "speed over the large model alone"

BEST = Claim(
    PAIRS,
    T4,
    f"BLEU or ROUGE-L, and {OVER}",
    ("way", "IWSLT", "speed", "WMT", "speed ", "XSUM", "speed  ", "CNN/DailyMail", "speed   "),
    (
        ("large alone", "40.32", "-", "31.38", "-", "35.08", "-", "41.54", "-"),
        ("unaligned, no loss", "40.33", "1.43", "31.28", "1.34", "35.12", "1.48", "41.44", "1.71"),
        ("unaligned, 1 point", "39.44", "1.58", "30.47", "1.43", "34.02", "1.72", "40.57", "2.05"),
        ("aligned, no loss", "40.24", "1.62", "31.26", "1.47", "35.05", "1.50", "41.52", "1.85"),
        ("aligned, 1 point", "39.13", "1.78", "30.33", "1.70", "33.95", "1.80", "40.96", "2.12"),
    ),
)
CURVES = Claim(
    PAIRS,
    T4,
    "quality against latency over both thresholds",
    words="Curves without printed numbers. The text: alignment moves the curve up everywhere; speculative sampling "
    "with windows of 3 to 10 is at 1.28 (IWSLT, BLEU 39.93) and 1.25 (XSUM, ROUGE-L 35.00).",
)
ABLATIONS = Claim(
    PAIRS,
    T4,
    "quality against latency without rollback, and without fallback",
    words="Curves without printed numbers. The text: without either policy quality falls, most where it is high.",
)
EARLY_EXIT = Claim(
    "mT5-small with its first layer (of 8) as the small model, trained to be read there",
    T4,
    f"{OVER}, within less than one point of BLEU",
    ("", "IWSLT", "WMT"),
    (("BiLD, early exit, up to", "1.60", "1.74"),),
    "Curves of BLEU against latency otherwise, without printed numbers.",
)
OPERATIONS = Claim(
    "T5-large with T5-small, CNN/DailyMail",
    T4,
    "operations of the aligned pair at the large model's quality, the large model alone = 1",
    ("", "of the large model alone"),
    (
        ("FLOPs", "slightly more"),
        ("memory operations", "about 1/5"),
        ("arithmetic intensity", "about 5"),
        ("speed", "1.85"),
    ),
)
LEVELS = Claim(
    "T5-large with aligned T5-small, XSUM and CNN/DailyMail",
    T4,
    "ROUGE-L against latency, a curve for each rollback threshold",
    words="Curves without printed numbers. Smaller rollback thresholds roll back more; each curve runs over fallback "
    "thresholds.",
)
