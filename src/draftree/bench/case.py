"""One case of a comparison: methods on one model, with one batch size and one way of choosing tokens.

`bench quick` is such a case; `bench compare` is several of them; docs/developer/experiments.md describes how they are
measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from draftree.bench.kit import COMPILED, HOOKED, PLAIN, REFERENCE, Kit, WarmTrie, label_of
from draftree.bench.machine import describe, now
from draftree.bench.measure import Log, Sample, Talk, Task, groups_of, measure, ready
from draftree.bench.methods import Sampling
from draftree.bench.summary import Row, count_disturbed, find_differences, summarise
from draftree.engine.limits import check_prompt
from draftree.models import encode_prompt
from draftree.progress import Watcher
from draftree.prompts import Prompt, split_prompts
from draftree.runner import inspect_model

TURN_ROOM = 32  # tokens that a chat template may put around a turn


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure.

    Attributes:
        per_set: test prompts of every set.
        max_new_tokens: most tokens of an answer.
        rounds: how often every prompt is answered.
        warm_per_set: prompts of every set that warm the trie.
        compiled: whether to measure torch.compile.
        batch: prompts answered together.
        sampling: how tokens are sampled; None decodes greedily.
    """

    per_set: int = 4
    max_new_tokens: int = 96
    rounds: int = 2
    warm_per_set: int = 23
    compiled: bool = True
    batch: int = 1
    sampling: Sampling | None = None

    @property
    def title(self) -> str:
        """Batch and sampling in a few words."""
        drawn = self.sampling
        if drawn is None:
            return f"batch {self.batch}, greedy"
        cuts = "".join(f", top-{k} {v}" for k, v in (("k", drawn.top_k), ("p", drawn.top_p)) if v is not None)
        return f"batch {self.batch}, sampled at temperature {drawn.temperature:g}{cuts}, seed {drawn.seed}"


@dataclass(frozen=True, slots=True)
class Result:
    """A finished case.

    Attributes:
        about: commit, device, dtype, threads, command, versions, times, settings.
        names: the methods, in the order of tables.
        rows: by method, its figures.
        unmeasured: by method, why there are none.
        notes: by method, what else to know.
        reference: the method whose answers all others must equal.
        plain: the method that speed-ups of drafting are given over.
        disturbed: of `count_disturbed`.
        samples: every answer.
        tasks: what was answered.
        uncompared: methods that draw other tokens from the same seed.
        memory: of `compare_memory`; empty where memory was not measured.
    """

    about: dict[str, Any]
    names: tuple[str, ...]
    rows: dict[str, Row]
    unmeasured: dict[str, str]
    notes: dict[str, str]
    reference: str
    plain: str
    disturbed: tuple[int, int]
    samples: list[Sample]
    tasks: list[Task]
    uncompared: frozenset[str] = frozenset()
    memory: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; every row says where it was made."""
        made = {key: self.about[key] for key in ("commit", "device", "dtype", "threads", "command")}
        rows = []
        for name in self.names:
            entry: dict[str, Any] = {"method": name, "label": label_of(name)}
            if name in self.rows:
                entry |= self.rows[name].as_dict(self.plain) | {"compared": name not in self.uncompared}
            else:
                entry["not_measured"] = self.unmeasured.get(name, "")
            rows.append(entry | {"note": self.notes.get(name, "")} | made)
        disturbed = {"slow": self.disturbed[0], "compared": self.disturbed[1]}
        facts = {
            "about": self.about,
            "disturbed": disturbed,
            "reference": self.reference,
            "plain": self.plain,
            "rows": rows,
            "samples": [_flat(sample, self.tasks) for sample in self.samples],
        }
        return facts | ({"memory": self.memory} if self.memory else {})


@dataclass(frozen=True, slots=True)
class Texts:
    """Prompts as token ids.

    Attributes:
        tasks: to measure on.
        lessons: to warm a trie with.
        talk: makes the prompts of later turns; None where there are none.
    """

    tasks: list[Task]
    lessons: list[list[int]]
    talk: Talk | None


def encode_all(model: Any, tokenizer: Any, prompts: Sequence[Prompt], settings: Settings) -> Texts:
    """The prompts that `settings` ask for, as token ids, and checked.

    Raises:
        ValueError: a model or prompt that cannot be measured, before any work.
    """
    target = inspect_model(model)
    if target.encoder_decoder:
        raise ValueError("This benchmark measures decoder-only models: this one has an encoder.")
    measured, warming = split_prompts(prompts, settings.per_set, settings.warm_per_set)
    if len(measured) < settings.batch:
        raise ValueError(
            f"{len(measured)} prompts do not fill a batch of {settings.batch}: give more prompts, or a smaller batch."
        )
    tasks = [Task(prompt, encode_prompt(tokenizer, prompt.text)) for prompt in measured]
    lessons = [encode_prompt(tokenizer, prompt.text) for prompt in warming]
    for prompt, ids in [*zip(measured, (t.ids for t in tasks), strict=True), *zip(warming, lessons, strict=True)]:
        try:
            check_prompt(ids, settings.max_new_tokens, target.vocab_size, target.max_positions)
            most = _longest(tokenizer, prompt, ids, settings.max_new_tokens)
            if prompt.later and target.max_positions is not None and most > target.max_positions:
                raise ValueError(
                    f"its turns may grow to {most} tokens and the model's context is {target.max_positions}: lower "
                    "max_new_tokens, or leave turns out."
                )
        except ValueError as error:
            raise ValueError(f"Prompt {prompt.id!r}: {error}") from None

    def talk(prompt: Prompt, answers: Sequence[Sequence[int]]) -> list[int]:
        given = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
        turns = [prompt.text, *prompt.later]
        return encode_prompt(tokenizer, turns[len(given)], history=list(zip(turns, given, strict=False)))

    return Texts(tasks, lessons, talk if any(prompt.later for prompt in measured) else None)


def _longest(tokenizer: Any, prompt: Prompt, ids: Sequence[int], new: int) -> int:
    """Most tokens that a conversation may have at its end."""
    later = sum(len(tokenizer(text).input_ids) + TURN_ROOM + new for text in prompt.later)
    return len(ids) + new + later


def make_kit(
    small: Any,
    tokenizer: Any,
    texts: Texts,
    settings: Settings,
    watcher: Watcher,
    *,
    large: Any = None,
    size: str = "",
    assistant: Any = None,
) -> Kit:
    """A kit whose trie has answered the lessons, with the small model, which gives the same answers as the large one.

    Args:
        small, tokenizer: the model as it was loaded, and its tokenizer.
        texts: of `encode_all`.
        settings: how much.
        watcher: shows progress.
        large, size: what the small model was inflated to, and the name of that size; None measures the small model.
        assistant: see `Kit`.
    """
    warm = None
    if texts.lessons:
        watcher.stage("warming the trie", len(texts.lessons))
        warm = WarmTrie(small, tokenizer, settings.max_new_tokens)
        for ids in texts.lessons:
            warm.learn(ids)
            watcher.step()
        warm.keep()
    kit = Kit(small, settings.max_new_tokens, settings.sampling, warm, assistant, settings.compiled)
    return kit if large is None else replace(kit, model=large, small=small, size=size)


def run_case(
    kit: Kit,
    tokenizer: Any,
    texts: Texts,
    settings: Settings,
    names: Sequence[str],
    *,
    name: str | None,
    watcher: Watcher,
    log: Log | None = None,
    part: str = "",
) -> Result:
    """Measure methods on one model; figures come from the samples of one process and one run.

    Args:
        kit: makes the methods.
        tokenizer: the model's.
        texts: of `encode_all`.
        settings: how much.
        names: the methods.
        name: the model's folder or hub name, None for the embedded one.
        watcher: shows progress.
        log: keeps samples, so that a stopped run can go on.
        part: which of several cases this is, for the watcher.
    """
    about = describe(kit.model, name) | {"started": now(), "case": settings.title}
    about["model"] += f" inflated to {kit.size}" if kit.size else ""
    tasks = texts.tasks
    methods, unmeasured = kit.methods(names)
    watcher.stage(f"{part}first calls" + (", torch.compile" if settings.compiled else ""), None)
    usable, refused = ready(methods, _with_longest(tokenizer, tasks, settings), settings.batch)
    unmeasured |= refused
    groups = groups_of(tasks, settings.batch)
    watcher.stage(f"{part}measuring", len(usable) * len(groups) * settings.rounds)
    samples = measure(usable, tasks, settings.rounds, watcher, batch=settings.batch, talk=texts.talk, log=log)
    measured = {method.name for method in usable}
    plain = PLAIN if PLAIN in measured else HOOKED
    # Hugging Face draws a batch from one stream of noise, so that only draftree's own answers can be compared.
    one_stream = settings.sampling is not None and settings.batch > 1
    reference = REFERENCE if REFERENCE in measured and not one_stream else plain
    rows = summarise(samples, tasks, (REFERENCE, plain), batch=settings.batch)
    other_draws = {method.name for method in usable if not method.same_draws}
    other_draws |= {REFERENCE, COMPILED} & measured if one_stream else set()
    comparable = [sample for sample in samples if sample.method not in other_draws]
    find_differences(rows, comparable, tasks, reference, kit.model)
    about |= {
        "finished": now(),
        "settings": asdict(settings),
        "prompts": sum(map(len, groups)),
        "sets": list(dict.fromkeys(task.prompt.set for task in tasks)),
        "warm_prompts": kit.warm.answered if kit.warm else 0,
    }
    notes = {method.name: method.note for method in usable if method.note}
    notes |= dict.fromkeys(other_draws, "draws other tokens from the same seed, so that answers are not compared")
    made: dict[str, Any] = {"reference": reference, "plain": plain, "disturbed": count_disturbed(samples)}
    made |= {"samples": samples, "tasks": list(tasks), "uncompared": frozenset(other_draws)}
    return Result(about, tuple(names), rows, unmeasured, notes, **made)


def _with_longest(tokenizer: Any, tasks: Sequence[Task], settings: Settings) -> list[Task]:
    """Tasks with prompts as long as their last turns may be, because compiled methods compile by length."""
    grown = []
    for task in tasks:
        most = _longest(tokenizer, task.prompt, task.ids, settings.max_new_tokens) - settings.max_new_tokens
        grown.append(Task(task.prompt, (task.ids * (most // len(task.ids) + 1))[:most]))
    return grown


def _flat(sample: Sample, tasks: Sequence[Task]) -> dict[str, Any]:
    stats = sample.answer.stats
    entry = {
        "method": sample.method,
        "prompt": tasks[sample.task].prompt.id,
        "round": sample.round,
        "tokens": len(sample.answer.ids),
        "seconds": sample.answer.seconds,
    }
    if sample.turn:
        entry["turn"] = sample.turn
    if stats is not None:
        entry |= {"steps": stats.steps, "drafted": stats.drafted, "accepted": stats.accepted}
    return entry
