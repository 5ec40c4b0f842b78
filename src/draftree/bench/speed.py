"""`draftree bench speed`: how far the engine is from the machine's limits, and from what one would use instead.

Two models, the embedded one and one inflated from it, are measured alike: steps by their rows against the memory's
speed, answers of all methods in one interleaved run, and where a step's time goes. The figures made of that stand
beside the wanted ones (`speed_figures`). The trie is warmed once, by the small model, since both say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from draftree.bench.analysis_setup import Findings
from draftree.bench.compare_case import Result, Settings, Texts, encode_all, run_case, teach
from draftree.bench.compare_methods import COMPILED, Kit, LeftOutError, WarmTrie
from draftree.bench.harness import Task
from draftree.bench.inflate.model import inflate
from draftree.bench.inflate.sizes import Size
from draftree.bench.machine import describe, now
from draftree.bench.speed_figures import METHODS, Figure, SpeedKit, figures_of
from draftree.bench.speed_page import findings_of
from draftree.bench.speed_stages import engine_stages, pass_parts
from draftree.bench.speed_steps import Steps, check_context, time_rows
from draftree.host import open_host
from draftree.progress import Watcher
from draftree.prompts import Prompt

ROWS = (1, 2, 4, 8, 16, 32)
STEPS_OFTEN = 5  # times as many rounds of the small model's steps, which are short
PARTS_ROUNDS = {"embedded": 40, "inflated": 7}  # of the parts of a pass


@dataclass(frozen=True, slots=True)
class SpeedSettings:
    """How much to measure.

    Attributes:
        per_set: prompts of every set that the small model answers.
        answers: how many of them the inflated one answers.
        max_new_tokens: most tokens of an answer.
        rounds: how often a step of each kind is timed.
        context: tokens before its rows.
        warm_per_set: prompts of every set that warm the trie.
        compiled: whether to measure Hugging Face's static cache with torch.compile.
        stages: whether to tell where a step's time goes.
    """

    per_set: int = 1
    answers: int = 4
    max_new_tokens: int = 48
    rounds: int = 3
    context: int = 128
    warm_per_set: int = 23
    compiled: bool = False
    stages: bool = True


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one model.

    Attributes:
        label: its name in tables.
        about: commit, device and so on, its size, the host's form.
        steps: timed steps.
        case: the answers.
        figures: made of both.
        stages: of `engine_stages`; empty where not asked for.
        parts: of `pass_parts`; None where not asked for or not to be had.
    """

    label: str
    about: dict[str, Any]
    steps: Steps
    case: Result
    figures: list[Figure]
    stages: list[dict[str, Any]]
    parts: dict[str, Any] | None


def run_speed(
    small: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    settings: SpeedSettings,
    *,
    params: str | None = "400M",
    name: str | None = None,
    watcher: Watcher | None = None,
) -> tuple[Findings, dict[str, Any]]:
    """Measure; also what the result file says about it.

    Args:
        small: a llama, mistral or qwen2 model on the CPU.
        tokenizer: its tokenizer.
        prompts: to measure on and to warm the trie with.
        settings: see there.
        params: inflate it to about so many parameters; None leaves the inflated model out.
        name: of the small model, None for the embedded one.
        watcher: hears how far it is.

    Raises:
        ValueError: a size that cannot be made, a prompt or context that does not fit, before any work.
    """
    watcher = watcher or Watcher()
    check_context(settings.context, ROWS[-1], getattr(small.config, "max_position_embeddings", None))
    asked = Settings(settings.per_set, settings.max_new_tokens, 1, settings.warm_per_set, settings.compiled)
    texts = encode_all(small, tokenizer, prompts, asked)
    about = describe(small, name) | {"started": now()}
    large = None
    if params is not None:
        watcher.stage("inflating", None)
        large = inflate(small, params)
        about["model"] += f" and inflated to {params}"
    warm = teach(small, tokenizer, texts, asked, watcher)
    bench = _Bench(tokenizer, settings, asked, warm, _assistant(small), name, watcher)
    measured = [bench.measure("embedded" if name is None else "small", "embedded", small, texts)]
    if params is not None and large is not None:
        few = replace(texts, tasks=spread(texts.tasks, settings.answers))
        measured.append(bench.measure(params, "inflated", large, few))
    about |= {
        "finished": now(),
        "settings": asdict(settings),
        "prompts": len(texts.tasks),
        "sets": list(dict.fromkeys(task.prompt.set for task in texts.tasks)),
    }
    return findings_of(measured), about


@dataclass(frozen=True, slots=True)
class _Bench:
    """What the models share."""

    tokenizer: Any
    settings: SpeedSettings
    asked: Settings
    warm: WarmTrie | None
    assistant: Any
    name: str | None
    watcher: Watcher

    def measure(self, label: str, kind: str, model: Any, texts: Texts) -> Measured:
        """All of one model; `kind` says what is wanted of it."""
        settings = self.settings
        host = open_host(model)
        often = settings.rounds * (STEPS_OFTEN if kind == "embedded" else 1)
        steps = time_rows(model, host, ROWS, settings.context, often, self.watcher)
        stages: list[dict[str, Any]] = []
        parts = None
        if settings.stages:
            parts = pass_parts(host, settings.context, PARTS_ROUNDS[kind], self.watcher)
            stages = engine_stages(model, self.warm, texts.tasks, settings.max_new_tokens, self.watcher)
        names = [name for name in METHODS if settings.compiled or name != COMPILED]
        kit = SpeedKit(
            model, self.asked.max_new_tokens, warm=self.warm, assistant=self.assistant, compiled=settings.compiled
        )
        case = run_case(
            kit, self.tokenizer, texts, self.asked, names, name=self.name, watcher=self.watcher, part=f"{label}: "
        )
        figures = figures_of(kind, label, steps.rows, steps.floor, case)
        size = Size.of(model.config)
        about = case.about | {"host": host.form, "size": asdict(size) | {"parameters": size.parameters}}
        return Measured(label, about, steps, case, figures, stages, parts)


def spread(tasks: Sequence[Task], count: int) -> list[Task]:
    """`count` tasks or all, evenly from the whole list, so that they are of as many sets as can be."""
    count = min(count, len(tasks))
    return [tasks[i * len(tasks) // count] for i in range(count)]


def _assistant(small: Any) -> Any:
    """The small model's own small model; None where there is none."""
    try:
        return Kit(small, 1).small()
    except LeftOutError:
        return None
