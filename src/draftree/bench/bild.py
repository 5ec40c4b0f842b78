"""`draftree bench bild`: quality against latency of two models that write one text (BiLD, section 4).

After figures 4, 5, 8 and 9 and table 1: a grid of both thresholds, with a small model as it was trained and with an
aligned one; both models alone, the paper's baselines and ablations, Hugging Face's generate and assisted generation.
Quality is taken on all rows, latency on some of them, every way answering a prompt before the next one comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftree.bench.analysis_setup import Sampled
from draftree.bench.bild_cost import Operations, operations_of
from draftree.bench.bild_texts import Texts
from draftree.bench.bild_ways import BILD, GROUPS, PLAIN, THEIRS, Way, ways_of
from draftree.bench.harness import Sample, Task, measure, ready
from draftree.bench.machine import describe, now
from draftree.bench.summary import Estimate
from draftree.drafting.folder import model_hash
from draftree.engine import RequestStats
from draftree.progress import Watcher
from draftree.prompts import Prompt
from draftree.training.journal import fingerprint
from draftree.training.quality import METRICS, check_metric, quality
from draftree.training.questions import Question, Template

NO_LOSS, ONE_POINT = 0.1, 1.0  # points of BLEU or ROUGE-L that the two rows of table 1 may lose
COUNTED = 8  # prompts whose operations are counted


@dataclass(frozen=True, slots=True)
class BildSettings:
    """How much to measure.

    Attributes:
        thresholds: (alpha_FB, alpha_RB) of every point of the grid.
        windows: of speculative decoding with a fixed number of guesses.
        metric: "bleu" or "rouge-l".
        timed: rows whose answers are timed, one by one.
        rounds: how often.
        max_new_tokens: most tokens of an answer.
        batch: rows answered together where no time is taken.
        ablations: whether to leave out rollback, and fallback, as well.
        examples: rows that the page shows.
    """

    thresholds: tuple[tuple[float, float], ...] = tuple(
        (fallback, rollback) for fallback in (0.3, 0.45, 0.6, 0.75, 0.9) for rollback in (1.0, 2.0, 3.0, 5.0, 8.0)
    )
    windows: tuple[int, ...] = (3, 4, 5, 6, 7, 8, 9, 10)
    metric: str = "bleu"
    timed: int = 40
    rounds: int = 1
    max_new_tokens: int = 80
    batch: int = 32
    ablations: bool = True
    examples: int = 6

    def __post_init__(self) -> None:
        for name in ("timed", "rounds", "max_new_tokens", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give 1 or more.")
        if not self.thresholds:
            raise ValueError("There are no thresholds: give at least one pair, as 0.6:5.")
        for fallback, rollback in self.thresholds:
            if not 0 <= fallback <= 1:
                raise ValueError(f"The fallback threshold is {fallback}: give a probability from 0 (never) to 1.")
            if not rollback >= 0:
                raise ValueError(f"The rollback threshold is {rollback}: give 0 or more.")
        if any(window < 1 for window in self.windows):
            raise ValueError(f"windows is {list(self.windows)}: give numbers of 1 or more.")


@dataclass(slots=True)
class Point:
    """What was measured of one way.

    Attributes:
        way: which.
        quality: BLEU or ROUGE-L over all rows; None where the texts were not held to those of the large model.
        speed: time of the plain large model over its own, on the timed rows; None where it was not timed.
        over_theirs: the same against HF generate.
        seconds: of an answer, on average.
        tokens: of all timed answers.
        stats: the engine's counts on the timed rows; None for what is not ours.
        differing: timed answers that are not the texts whose quality was taken.
        operations: of the counted rows, where they were counted.
    """

    way: Way
    quality: float | None = None
    speed: Estimate | None = None
    over_theirs: Estimate | None = None
    seconds: float | None = None
    tokens: int = 0
    stats: RequestStats | None = None
    differing: int = 0
    operations: Operations | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        drafts = self.stats is not None and self.stats.drafted > 0
        return {
            "way": self.way.name,
            **asdict(self.way),
            "quality": self.quality,
            "speed_over_plain": self.speed.as_dict() if self.speed else None,
            "speed_over_hf": self.over_theirs.as_dict() if self.over_theirs else None,
            "seconds_an_answer": self.seconds,
            "tokens": self.tokens,
            "large_calls_per_token": self.stats.calls_per_token if drafts and self.stats else None,
            "engagement": self.stats.engagement if drafts and self.stats else None,
            "rollback_ratio": self.stats.rollback_ratio if drafts and self.stats else None,
            "differing": self.differing,
            "operations": asdict(self.operations) | {"intensity": self.operations.intensity}
            if self.operations
            else None,
        }


@dataclass(slots=True)
class BildResult:
    """All points of a run, and what its examples need.

    Attributes:
        about: where and how it was made.
        points: by name of the way, in the order of `ways_of`.
        rows: all rows, the timed ones first.
        texts: by name of a way, what it said to all rows, as text.
        best: (pair, points that may be lost) -> the fastest point of the grid within them, or None.
        sources: for each example, by name of a way, tokens and whether the large model said them.
        refused: by name, why a way could not be measured.
    """

    about: dict[str, Any]
    points: dict[str, Point]
    rows: list[Question]
    texts: dict[str, list[str]]
    best: dict[tuple[str, float], Point | None]
    sources: list[list[tuple[int, bool]]]
    refused: dict[str, str]


def check_references(rows: Sequence[Question], metric: str) -> None:
    """Refuse BLEU without references, and a metric whose package is missing.

    Raises:
        ValueError: either of them.
    """
    check_metric(metric)
    if metric == "bleu" and any(row.reference is None for row in rows):
        raise ValueError(
            "BLEU needs references: name their field with --reference, or take --metric rouge-l, which without "
            "references is measured against the plain large model's own texts."
        )


def run_bild(
    large: Any,
    tokenizer: Any,
    smalls: dict[str, Any],
    rows: Sequence[Question],
    template: Template,
    settings: BildSettings,
    out: Path,
    *,
    name: str | None = None,
    watcher: Watcher | None = None,
) -> BildResult:
    """Measure all ways; texts are kept in `out` and taken from there.

    Args:
        large: the large model.
        tokenizer: of all models.
        smalls: small models by the name that tables give them, the aligned one last.
        rows: what is answered, with references or without.
        template: how rows become prompts.
        settings: how much.
        out: folder of the kept texts.
        name: of the large model; None for the embedded one.
        watcher: hears of progress.

    Raises:
        ValueError: no references for BLEU, or a pair that does not fit, before any work.
    """
    check_references(rows, settings.metric)
    watcher = watcher or Watcher()
    rows = list(rows)
    prompts = [template.encode(row.turns[:1]) for row in rows]
    about = describe(large, name) | {"started": now()}
    ways = ways_of(list(smalls), settings.thresholds, settings.windows, ablations=settings.ablations)
    depends = {
        "large": model_hash(large),
        "prompts": fingerprint(prompts),
        "max_new_tokens": settings.max_new_tokens,
    }
    texts = Texts(out, depends, {pair: model_hash(small) for pair, small in smalls.items()})
    methods = {way: way.method(large, smalls, settings.max_new_tokens) for way in ways}

    asked = [way for way in ways if not way.exact or way.group == PLAIN]
    watcher.stage("texts of all rows", len(asked) * len(rows))
    ids = {way: texts.of(way, methods[way], prompts, settings.batch, watcher) for way in asked}
    plain = ways[0]
    said = {way.name: tokenizer.batch_decode(of, skip_special_tokens=True) for way, of in ids.items()}
    known = [str(row.reference) for row in rows]
    if any(row.reference is None for row in rows):
        known = said[plain.name]
    points = {way.name: Point(way) for way in ways}
    for way in asked:
        points[way.name].quality = quality(settings.metric, said[way.name], known)

    timed = min(settings.timed, len(rows))
    tasks = [Task(Prompt(row.id, row.set, row.turns[0]), prompts[i]) for i, row in enumerate(rows[:timed])]
    watcher.stage("first calls", None)
    usable, refused = ready(list(methods.values()), tasks)
    watcher.stage("timed answers", len(usable) * timed * settings.rounds)
    samples = measure(usable, tasks, settings.rounds, watcher)
    _times(points, samples, timed, settings.rounds, {way.name: ids.get(way, ids[plain]) for way in ways})
    for way in ways:
        point = points[way.name]
        if way.exact and way is not plain and not point.differing and point.seconds is not None:
            point.quality = points[plain.name].quality
    best = {(pair, loss): _best(points, plain, pair, loss) for pair in smalls for loss in (NO_LOSS, ONE_POINT)}
    last = [p for p in points.values() if p.way.group == BILD and p.way.pair == list(smalls)[-1]]
    shown = best[list(smalls)[-1], NO_LOSS] or max(last, key=lambda p: p.quality or 0.0)
    _count(points, [plain, *(p.way for p in best.values() if p)], methods, large, smalls, prompts, watcher)
    watcher.stage("examples", settings.examples)
    sources = [_sources(methods[shown.way], ids_, watcher) for ids_ in prompts[: settings.examples]]
    about |= {
        "finished": now(),
        "settings": asdict(settings),
        "smalls": {pair: model_hash(small) for pair, small in smalls.items()},
        "parameters": {
            pair: sum(p.numel() for p in model.parameters()) for pair, model in [("large", large), *smalls.items()]
        },
        "rows": len(rows),
        "prompts": timed,
        "sets": list(dict.fromkeys(row.set for row in rows[:timed])),
        "metric": METRICS[settings.metric][0],
        "against": "references" if known is not said[plain.name] else "the plain large model's texts",
        "shown": label(shown.way),
    }
    return BildResult(about, points, rows, said, best, sources, refused)


def _times(
    points: dict[str, Point], samples: Sequence[Sample], timed: int, rounds: int, ids: dict[str, list[list[int]]]
) -> None:
    """Fill in what the timed answers tell."""
    seconds: dict[str, np.ndarray] = {}
    for sample in samples:
        point = points[sample.method]
        seconds.setdefault(sample.method, np.zeros(timed))[sample.task] += sample.answer.seconds
        point.tokens += len(sample.answer.ids)
        point.differing += sample.answer.ids != ids[sample.method][sample.task]
        if sample.answer.stats is not None:
            point.stats = point.stats or RequestStats()
            point.stats.add(sample.answer.stats)
    for name, spent in seconds.items():
        points[name].seconds = float(spent.sum()) / timed / rounds
        points[name].speed = Sampled.share(seconds[PLAIN], spent).estimate
        if THEIRS in seconds:
            points[name].over_theirs = Sampled.share(seconds[THEIRS], spent).estimate


def _best(points: dict[str, Point], plain: Way, pair: str, loss: float) -> Point | None:
    """The fastest point of a pair's grid that loses no more than `loss` points against the plain large model."""
    floor = (points[plain.name].quality or 0.0) - loss
    fit = [p for p in points.values() if p.way.group == BILD and p.way.pair == pair and p.speed is not None]
    return max(
        (p for p in fit if p.quality is not None and p.quality >= floor),
        key=lambda p: p.speed.value if p.speed else 0.0,
        default=None,
    )


def _count(
    points: dict[str, Point],
    ways: Sequence[Way],
    methods: dict[Way, Any],
    large: Any,
    smalls: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    watcher: Watcher,
) -> None:
    ways = list(dict.fromkeys(ways))
    watcher.stage("operations", len(ways))
    for way in ways:
        models = [large, *([smalls[way.pair]] if way.pair else [])]
        points[way.name].operations = operations_of(methods[way], models, prompts[:COUNTED])
        watcher.step()


def _sources(method: Any, ids: Sequence[int], watcher: Watcher) -> list[tuple[int, bool]]:
    """Tokens of an answer, and whether the large model said each."""
    emitted: dict[int, list[tuple[int, bool]]] = {}

    def note(request: Any) -> None:
        emitted[0] = [(e.token, e.source is None) for e in request.output]

    method.answer(ids, after_step=note)
    watcher.step()
    return emitted[0]


def label(way: Way) -> str:
    """What tables call a way."""
    numbers = [("FB", way.fallback), ("RB", way.rollback), ("window", way.window)]
    told = [f"{name} {value:g}" for name, value in numbers if value is not None]
    return ", ".join([GROUPS[way.group], *filter(None, [way.pair, " ".join(told)])])
