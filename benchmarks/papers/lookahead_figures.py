"""The figures of Lookahead (Zhao et al., KDD '24), as the paper prints them."""

from __future__ import annotations

from benchmarks.harness import Claim

ANT, A100 = "AntGLM-10B, data set AntRAG", "one A100-80G"
SPEED = "tokens a second"

METHODS = Claim(
    "models as in the rows",
    "devices as in the rows",
    "tokens a second (times Hugging Face's generate)",
    ("model, data set, device", "transformers", "vLLM", "LLMA", "LookaheadDecoding", "Lookahead"),
    (
        ("AntGLM-10B, AntRAG, A100", "52.4", "52.06 (0.99)", "165.4 (3.16)", "-", "280.9 (5.36)"),
        ("AntGLM-10B, AntRAG, A10", "20.3", "20.29 (1.00)", "59.5 (2.93)", "-", "105.1 (5.18)"),
        ("AntGLM-10B, AntRAG, V100", "27.3", "27.28 (1.00)", "64.3 (2.36)", "-", "118.9 (4.36)"),
        ("Llama-7B, Dolly, A100", "50.4", "91.04 (1.81)", "60.7 (1.20)", "66.7 (1.32)", "106.8 (2.12)"),
        ("Llama-7B, Dolly, A10", "31.4", "32.58 (1.04)", "35.8 (1.14)", "38.2 (1.22)", "55.7 (1.77)"),
        ("Llama-7B, GSM8k, A100", "41.4", "92.09 (2.22)", "69.0 (1.67)", "94.3 (2.28)", "111.3 (2.69)"),
        ("Llama-7B, GSM8k, A10", "31.4", "32.73 (1.04)", "41.1 (1.31)", "48.9 (1.56)", "68.1 (2.17)"),
        ("Llama-7B, HumanEval-x, A100", "51.1", "90.47 (1.77)", "66.5 (1.30)", "88.3 (1.73)", "161.5 (3.16)"),
        ("Llama-7B, HumanEval-x, A10", "30.9", "32.46 (1.05)", "42.1 (1.36)", "46.0 (1.49)", "89.6 (2.90)"),
        ("Llama-13B, Dolly, A100", "39.9", "51.67 (1.29)", "59.0 (1.48)", "45.2 (1.13)", "84.6 (2.12)"),
        ("Llama-13B, Dolly, V100", "20.5", "22.07 (1.08)", "23.9 (1.17)", "23.2 (1.13)", "35.2 (1.72)"),
        ("Llama-13B, GSM8k, A100", "42.9", "52.06 (1.21)", "51.8 (1.21)", "64.8 (1.51)", "103.4 (2.41)"),
        ("Llama-13B, GSM8k, V100", "22.0", "22.43 (1.02)", "25.8 (1.17)", "27.8 (1.26)", "45.6 (2.07)"),
        ("Llama-13B, HumanEval-x, A100", "35.0", "51.49 (1.47)", "57.7 (1.65)", "66.1 (1.89)", "137.3 (3.92)"),
        ("Llama-13B, HumanEval-x, V100", "21.5", "22.33 (1.04)", "28.8 (1.34)", "27.5 (1.28)", "57.0 (2.65)"),
    ),
)
PROCEDURES = Claim(
    ANT,
    A100,
    SPEED,
    ("condition", "tokens/s"),
    (
        ("without prompt", "234.5"),
        ("without output", "202.0"),
        ("without pruning", "221.4"),
        ("without eliminating", "234.2"),
        ("Lookahead", "280.9"),
    ),
)
CAPACITY = Claim(
    ANT,
    A100,
    "by the trie's capacity in decoding lengths",
    ("capacity", "tokens/s", "retrieve, ms", "update, ms"),
    (
        ("1*DL", "254.5", "0.81", "0.10"),
        ("2*DL", "258.7", "1.35", "0.12"),
        ("4*DL", "268.8", "1.22", "0.11"),
        ("8*DL", "273.3", "1.46", "0.11"),
        ("16*DL", "280.7", "1.02", "0.12"),
        ("32*DL", "280.8", "1.29", "0.12"),
        ("64*DL", "279.5", "1.75", "0.15"),
        ("128*DL", "278.3", "2.38", "0.16"),
    ),
)
MEMORY = Claim(
    ANT,
    A100,
    "peak memory in GiB by decoding length; 1 is decoding without Lookahead",
    ("decoding length", "GiB"),
    tuple(
        (length, gib)
        for length, gib in zip(
            ("1", "2", "4", "8", "16", "32", "64", "128"),
            ("20.25", "20.27", "20.27", "20.27", "20.27", "20.29", "20.38", "20.39"),
            strict=True,
        )
    ),
)
BATCH = Claim(
    ANT,
    "a GPU of those above (the paper does not name it for this table)",
    "tokens a second (times the baseline of the same batch)",
    ("method", "batch 2", "batch 4"),
    (
        ("baseline", "68.0 (1.00)", "88.2 (1.00)"),
        ("LLMA", "185.2 (2.72)", "214.0 (2.43)"),
        ("Lookahead", "285.5 (4.20)", "299.5 (3.40)"),
    ),
)
LENGTHS = Claim(
    ANT,
    A100,
    "speed (Figure 4) and effective decoding length (Figure 5) by decoding and branch length",
    words="Curves without printed numbers. The text: speed rises with both lengths; LLMA gains nothing beyond a branch "
    "length of 25; hierarchical drafts accept more than parallel ones at equal lengths; a decoding length beyond the "
    "critical one accepts more and is not faster.",
)
WARM_UP = Claim(
    ANT,
    A100,
    "speed by the number of warm-up samples (Figure 7)",
    words="A curve without printed numbers. The text: speed rises with the number of samples.",
)
WORST = Claim(
    "models as in the rows",
    "GPUs that the text does not name",
    "share of the plain speed that is left where no draft is ever accepted (section 5.2)",
    ("model", "of plain speed"),
    (("AntGLM-10B", "87.5 %"), ("Llama-13B", "91.9 %")),
)
