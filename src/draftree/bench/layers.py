"""`draftree bench layers`: what leaving out layers is worth, lossless as drafts and lossy as early exits.

One interleaved run: plain decoding, SelfSpeculative with a skip set and with early exits, as bare chains of fixed
length and as it comes, and CALM over its thresholds. Speeds are of whole answers over plain decoding's of the same
prompts. CALM changes texts, so what is left of them is told: the share of plain's answer before the first difference.
Of an inflated model CALM is left out: the layers that inflation adds change no state, so every token would leave there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from rich.table import Table

from draftree.bench.analysis_setup import Findings, plain_axis
from draftree.bench.harness import Sample, Task, measure, ready
from draftree.bench.inflate.drafter import inflate_drafter
from draftree.bench.inflate.model import inflate
from draftree.bench.machine import describe, now
from draftree.bench.methods import Draftree, Method
from draftree.bench.summary import Row, summarise
from draftree.drafting import SelfSpeculative
from draftree.engine.limits import check_prompt
from draftree.host import Target, inspect_model
from draftree.models import encode_prompt
from draftree.progress import Watcher
from draftree.prompts import Prompt, take_per_set
from draftree.pruning import LossyCALM
from draftree.shaping import Fixed

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class LayersSettings:
    """How much to measure.

    Attributes:
        per_set: prompts of every set.
        max_new_tokens: most tokens of an answer.
        rounds: how often every prompt is answered.
        chains: lengths of bare chains that never stop early.
        exits: exit layers to draft from.
        thresholds: of CALM.
    """

    per_set: int = 2
    max_new_tokens: int = 96
    rounds: int = 2
    chains: tuple[int, ...] = (1, 2, 4)
    exits: tuple[int, ...] = ()
    thresholds: tuple[float, ...] = (0.9, 0.95, 0.98, 1.0)


@dataclass(slots=True)
class _Way:
    """A method, and what to call it."""

    method: Draftree
    kind: str
    rule: LossyCALM | None = None


def run_layers(
    small: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    settings: LayersSettings,
    *,
    skip_set: SelfSpeculative | None = None,
    params: str | None = None,
    name: str | None = None,
    watcher: Watcher | None = None,
) -> tuple[Findings, dict[str, Any]]:
    """Measure; also what the result file says about it.

    Args:
        small: the model, or the one to inflate.
        tokenizer: its tokenizer.
        prompts: to measure on.
        settings: see there.
        skip_set: a searched one of `small`; None leaves it out.
        params: inflate `small` to about so many parameters, without CALM; None for itself.
        name: of the model, None for the embedded one.
        watcher: hears how far it is.

    Raises:
        ValueError: an exit or prompt that does not fit, before any work.
    """
    watcher = watcher or Watcher()
    target = inspect_model(small)
    for exit_layer in settings.exits:
        SelfSpeculative(exit_layer=exit_layer).skip_of(target)
    chosen = take_per_set([prompt for prompt in prompts if not prompt.warm], settings.per_set)
    tasks = [Task(prompt, encode_prompt(tokenizer, prompt.text)) for prompt in chosen]
    for task in tasks:
        check_prompt(task.ids, settings.max_new_tokens, target.vocab_size, target.max_positions)
    model = small if params is None else inflate(small, params)
    about = describe(model, name) | {"started": now()}
    if params is not None:
        about["model"] += f" inflated to {params}"
    ways = _ways(small, model, settings, skip_set)
    watcher.stage("first calls", None)
    methods: list[Method] = [way.method for way in ways.values()]
    ready(methods, tasks)
    for way in ways.values():
        if way.rule is not None:
            way.rule.layers_run.clear()
    watcher.stage("measuring", len(methods) * len(tasks) * settings.rounds)
    samples = measure(methods, tasks, settings.rounds, watcher)
    findings = _findings(ways, summarise(samples, tasks, (PLAIN,)), samples, inspect_model(model))
    about |= {
        "finished": now(),
        "settings": asdict(settings),
        "prompts": len(tasks),
        "sets": list(dict.fromkeys(prompt.set for prompt in chosen)),
    }
    return findings, about


def _ways(small: Any, model: Any, settings: LayersSettings, skip_set: SelfSpeculative | None) -> dict[str, _Way]:
    def drafts(label: str, kind: str, own: dict[str, Any], chain: int | None = None) -> _Way:
        options = {name: own[name] for name in ("exit_layer", "skip_attention", "skip_mlp")}
        if chain is not None:
            options |= {"num_draft_tokens": chain, "branching": 1, "confidence": 0.0}
        drafter = SelfSpeculative.fresh(small, **options)
        made = drafter if model is small else inflate_drafter(drafter, model)

        def make() -> SelfSpeculative:
            return SelfSpeculative(**made.settings)

        shape = (lambda: None) if chain is None else (lambda: Fixed(chain))
        return _Way(Draftree(label, label, model, settings.max_new_tokens, make, shape), kind)

    new = settings.max_new_tokens
    ways = {PLAIN: _Way(Draftree(PLAIN, PLAIN, model, new), PLAIN)}
    sources = {} if skip_set is None else {"skip set": skip_set.settings}
    sources |= {f"exit {n}": SelfSpeculative(exit_layer=n).settings for n in settings.exits}
    for source, own in sources.items():
        for chain in settings.chains:
            label = f"{source}, chain of {chain}"
            ways[label] = drafts(label, "chain", own, chain)
        ways[source] = drafts(source, "as it comes", own)
    for threshold in settings.thresholds if model is small else ():
        rule, label = LossyCALM(threshold), f"CALM {threshold:g} (lossy)"
        ways[label] = _Way(Draftree(label, label, model, new, early_exit=rule), "CALM", rule)
    return ways


def _findings(ways: dict[str, _Way], summary: dict[str, Row], samples: Sequence[Sample], target: Target) -> Findings:
    plain = {(s.task, s.round): s.answer.ids for s in samples if s.method == PLAIN}
    table = Table(
        "way", "over plain", "", "tokens a step", "guesses a step", "layers a token", "left of the text",
        title="Layers left out, plain decoding = 1", title_justify="left",
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    for name, way in ways.items():
        own, stats = summary[name], summary[name].stats
        assert stats is not None
        kept = [_kept(s.answer.ids, plain[s.task, s.round]) for s in samples if s.method == name]
        left = sum(same for same, _ in kept) / max(sum(length for _, length in kept), 1)
        layers = None if way.rule is None else way.rule.mean_layers
        over = own.over[PLAIN]
        rows.append(
            {
                "way": name,
                "kind": way.kind,
                "speed": over.as_dict(),
                "tokens_a_step": stats.acceptance_length,
                "guesses_a_step": stats.drafted / max(stats.steps, 1),
                "layers_a_token": layers,
                "left_of_the_text": left,
                "seconds": own.seconds,
                "stage_seconds": dict(stats.seconds),
            }
        )
        interval = "" if over.low is None else f"[{over.low:.2f}, {over.high:.2f}]"
        table.add_row(
            name, f"{over.value:.2f}", interval, f"{rows[-1]['tokens_a_step']:.2f}",
            f"{rows[-1]['guesses_a_step']:.2f}", "" if layers is None else f"{layers:.2f} of {len(target.layers)}",
            f"{left:.1%}",
        )  # fmt: skip

    def draw(figure: Any) -> None:
        axis = figure.add_subplot()
        for place, row in enumerate(rows):
            value, low, high = (row["speed"][part] for part in ("value", "low", "high"))
            spread = None if low is None else [[value - low], [high - value]]
            colour = {"CALM": "C3", PLAIN: "0.4", "chain": "C0"}.get(row["kind"], "C2")
            axis.errorbar(value, place, xerr=spread, fmt="o", color=colour)
        axis.axvline(1.0, color="0.6", linewidth=0.8)
        axis.set_yticks(range(len(rows)), [row["way"] for row in rows])
        axis.invert_yaxis()
        plain_axis(axis, "Layers left out", "speed over plain decoding", "")

    wrong = [row["way"] for row in rows if row["kind"] != "CALM" and row["left_of_the_text"] < 1]
    remarks = [f"Lossless ways whose answers differ from plain decoding's: {', '.join(wrong) or 'none'}."]
    return Findings(rows, [table], draw, (7, 1.4 + 0.32 * len(rows)), {"differing": wrong}, remarks)


def _kept(ids: Sequence[int], wanted: Sequence[int]) -> tuple[int, int]:
    """How many tokens of `wanted` come before the first difference, and how many it has."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, wanted, strict=False)))
    return same, len(wanted)
