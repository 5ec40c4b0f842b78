"""Quality by the large model's share of a text (BiLD, Figure 2): the premise, with both models run at every step.

The small model writes. Where the large one finds its token less likely than a threshold, its own best token takes the
place. Hugging Face's `generate` of the large model is the loop, and nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import LogitsProcessor

from benchmarks.drafters import bild, bild_pair
from benchmarks.drafters.bild_claims import quality_ratio
from benchmarks.harness import Experiment, Setup, lines, table_of
from benchmarks.harness.comparisons import CLAIMED, rows_of
from benchmarks.harness.quality import METRICS, points, row_statistics
from draftree.engine.limits import eos_token_ids
from draftree.training.options import template_of

SHARE = 0.2  # of the text, which the paper finds to be enough
ALL = 2.0  # a threshold that no token reaches


class Engagement(LogitsProcessor):
    """Have a small model choose each token that the large one finds likely enough; count the others."""

    def __init__(self, small: Any, threshold: float) -> None:
        self.small, self.threshold = small, threshold
        self.engaged = self.written = 0

    def begin(self, source: dict[str, Tensor], start: int) -> None:
        """Take the inputs of an encoder, {} for none, and the length of what the decoder begins with."""
        self.source, self.start = source, start

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        given = {**self.source, "decoder_input_ids": ids} if self.source else {"input_ids": ids}
        token = self.small(**given).logits[:, -1].argmax(-1, keepdim=True)
        engaged = scores.softmax(-1).gather(1, token) < self.threshold
        ends = torch.tensor(eos_token_ids(self.small), device=ids.device)
        unfinished = ~torch.isin(ids[:, self.start :], ends).any(1, keepdim=True)
        self.engaged += int((engaged & unfinished).sum())
        self.written += int(unfinished.sum())
        return torch.where(engaged, scores, torch.full_like(scores, -torch.inf).scatter(1, token, 0.0))


def run(setup: Setup) -> Iterator[pd.DataFrame]:
    """Quality of the small model's text by the share of it that the large model replaces (LOSSY by choice)."""
    setup = bild_pair.built(setup) if setup["pair_data"] else setup
    rows, metric = bild.open_rows(setup)
    pair = bild.open_pair(setup)
    name, small = next(iter(pair.smalls.items()))
    template = template_of(setup.tokenizer, setup["template"] or None)
    prompts = [template.encode(row.turns[:1]) for row in rows]
    values = sorted({ALL, *setup["likelihoods"]}, reverse=True)  # the large model alone comes first
    setup.watcher.stage("texts", len(values))
    found, scores, references = list[dict[str, Any]](), list[Any](), [row.reference for row in rows]
    for threshold in values:
        choose = Engagement(small, threshold)
        texts = _texts(setup, pair.large, choose, prompts)
        references = [own if known is None else known for known, own in zip(references, texts, strict=True)]
        scores.append(row_statistics(metric, texts, [str(known) for known in references]))
        row = {"threshold": threshold, "engaged": choose.engaged / choose.written}
        row |= {"quality": points(metric, scores[-1].sum(0))}
        found.append(row | quality_ratio(metric, scores[-1:], scores[:1]).columns("over_large"))
        setup.watcher.step()
    at = min(range(1, len(found)), key=lambda i: abs(found[i]["engaged"] - SHARE))
    ratio = quality_ratio(metric, [scores[at]], scores[:1])
    above = f"{name} small model, {found[at]['engaged']:.0%} replaced"
    remark = f"{METRICS[metric][0]} over {len(rows)} rows; the small model is the {name} one."
    claimed = rows_of([("bild-engagement", above, "large alone", METRICS[metric][0], ratio)])
    yield table_of(found, remarks=[remark], tables={CLAIMED: claimed}, about=bild_pair.about(setup))


def _texts(setup: Setup, large: Any, choose: Engagement, prompts: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of all prompts; encoder-decoders take `batch` of them together."""
    encodes = bool(large.config.is_encoder_decoder)
    at_once, texts = setup["batch"] if encodes else 1, list[str]()
    for at in range(0, len(prompts), at_once):
        part = [torch.tensor(ids, device=large.device) for ids in prompts[at : at + at_once]]
        ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=setup.tokenizer.pad_token_id or 0)
        lengths = torch.tensor([len(one) for one in part], device=large.device)
        source = {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}
        start = 1 if encodes else ids.shape[1]
        choose.begin(source if encodes else {}, start)
        out = large.generate(
            **source, max_new_tokens=setup["max_new_tokens"], do_sample=False, logits_processor=[choose]
        )
        texts += setup.tokenizer.batch_decode(out[:, start:], skip_special_tokens=True)
    return texts


NAMES = ("small", "aligned", "data", "field", "reference", "metric", "template")
FIGURE = Experiment(
    run,
    ("threshold", "engaged", "quality", "over_large"),
    lines("engaged", "quality"),
    {**dict.fromkeys(NAMES, ""), "likelihoods": (0.0, 0.01, 0.03, 0.1, 0.2, 0.4, 0.7)}
    | {"limit": 100, "max_new_tokens": 80, "batch": 50, **bild_pair.OPTIONS},
)
