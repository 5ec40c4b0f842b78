"""`draftree bench quick`: the first question about a machine, answered in a few minutes.

How fast are Hugging Face's ways of decoding and ours, on the same model, prompts, dtype and threads, and are all
outputs equal? Lookahead is measured with an empty trie, with one that has answered other prompts of the same sets,
and with all its guesses refused.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftree.bench.harness import Sample, Task, Watcher, measure, ready
from draftree.bench.machine import describe, now
from draftree.bench.memory import compare_memory
from draftree.bench.methods import CompiledHuggingFace, Draftree, HuggingFace, Method
from draftree.bench.models import encode_prompt
from draftree.bench.prompts import Prompt, take_per_set
from draftree.bench.summary import Row, count_disturbed, find_differences, summarise
from draftree.drafting import DraftModel, Jacobi, Lookahead, PromptLookup
from draftree.drafting.folder import demo_drafter
from draftree.engine.limits import check_prompt
from draftree.host import inspect_model
from draftree.shaping import Shape

REFERENCE = "hf_generate"
PLAIN = "draftree_loop"
WARM = "lookahead_warm"
SMALL = "draft_model"
LABELS = {
    REFERENCE: "HF generate",
    "hf_compiled": "HF static + compile",
    "hf_prompt_lookup": "HF prompt lookup, 10",
    "draftree_hooked": "plain, hooked host",
    PLAIN: "plain, loop host",
    "prompt_lookup": "PromptLookup",
    "jacobi": "Jacobi",
    SMALL: "DraftModel, 0.6M",
    "lookahead_cold": "Lookahead, cold trie",
    WARM: "Lookahead, warm trie",
    "lookahead_rejected": "Lookahead, all refused",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure.

    Attributes:
        per_set: test prompts of every set.
        max_new_tokens: most tokens of an answer.
        rounds: how often every prompt is answered.
        warm_per_set: prompts of every set that warm the trie.
        compiled: whether to measure torch.compile.
    """

    per_set: int = 4
    max_new_tokens: int = 96
    rounds: int = 2
    warm_per_set: int = 23
    compiled: bool = True


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run.

    Attributes:
        about: commit, device, dtype, threads, command, versions, times, settings.
        rows: by method, its figures.
        unmeasured: by method, why there are none.
        notes: by method, what else to know.
        plain: the method that speed-ups of drafting are given over.
        memory: of `compare_memory`.
        disturbed: of `count_disturbed`.
        samples: every answer's length, time and counts.
    """

    about: dict[str, Any]
    rows: dict[str, Row]
    unmeasured: dict[str, str]
    notes: dict[str, str]
    plain: str
    memory: dict[str, Any]
    disturbed: tuple[int, int]
    samples: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; every row says where it was made."""
        made = {key: self.about[key] for key in ("commit", "device", "dtype", "threads", "command")}
        rows = []
        for name, label in LABELS.items():
            entry: dict[str, Any] = {"method": name, "label": label}
            if name in self.rows:
                entry |= self.rows[name].as_dict(self.plain)
            else:
                entry["not_measured"] = self.unmeasured.get(name, "")
            rows.append(entry | {"note": self.notes.get(name, "")} | made)
        disturbed = {"slow": self.disturbed[0], "compared": self.disturbed[1]}
        return {
            "about": self.about,
            "disturbed": disturbed,
            "plain": self.plain,
            "rows": rows,
            "memory": self.memory,
            "samples": self.samples,
        }


class WarmTrie:
    """A Lookahead that has answered other prompts, kept so that every round starts from the same state.

    A round's copy goes on learning, as in production; without a copy the second round would draft from its own
    answers to the very same prompts.
    """

    def __init__(self, model: Any, tokenizer: Any, max_new_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._teacher = Draftree("teacher", "teacher", model, max_new_tokens, Lookahead)
        self._folder = tempfile.TemporaryDirectory(prefix="draftree-bench-")
        self._file = Path(self._folder.name) / "warm.trie"
        self.answered = 0

    def learn(self, ids: Sequence[int]) -> None:
        """Answer one more prompt."""
        self._teacher.answer(ids)
        self.answered += 1

    def keep(self) -> None:
        """Write the trie down: what `drafter` copies."""
        self._drafter.save(self._file, self._tokenizer)

    def drafter(self) -> Lookahead:
        """A copy of trie and shape."""
        taught = Lookahead.load(self._file, self._tokenizer)
        taught.shape = copy.deepcopy(self._drafter.shape)
        return taught

    @property
    def _drafter(self) -> Lookahead:
        drafter = self._teacher.drafter
        assert isinstance(drafter, Lookahead)
        return drafter


def split_prompts(prompts: Sequence[Prompt], settings: Settings) -> tuple[list[Prompt], list[Prompt]]:
    """(measured, warming) prompts: as their rows say, else the first ones of each set and those behind them."""
    tests = [prompt for prompt in prompts if not prompt.warm]
    measured = take_per_set(tests, settings.per_set)
    warm = [prompt for prompt in prompts if prompt.warm]
    if not warm:
        taken = {id(prompt) for prompt in measured}
        texts = {prompt.text for prompt in measured}
        warm = [p for p in tests if id(p) not in taken and p.text not in texts]
    if not measured:
        raise ValueError("All prompts are marked 'warm': leave 'split' out of the rows to measure on.")
    return measured, take_per_set(warm, settings.warm_per_set)


def methods(model: Any, settings: Settings, warm: WarmTrie | None) -> list[Method]:
    """The methods of this benchmark; one more is one more object."""
    new = settings.max_new_tokens

    def ours(name: str, make_drafter: Any = lambda: None, **options: Any) -> Draftree:
        make_shape: Callable[[], Shape | None] = lambda: None  # noqa: E731
        return Draftree(name, LABELS[name], model, new, make_drafter, make_shape, **options)

    chosen: list[Method] = [HuggingFace(REFERENCE, LABELS[REFERENCE], model, new)]
    if settings.compiled:
        chosen.append(CompiledHuggingFace("hf_compiled", LABELS["hf_compiled"], model, new))
    lookup = HuggingFace("hf_prompt_lookup", LABELS["hf_prompt_lookup"], model, new, prompt_lookup_num_tokens=10)
    loop = ours(PLAIN, host="loop")
    loop.optional = True  # not every model qualifies
    chosen += [lookup, ours("draftree_hooked", host="hooked"), loop]
    chosen += [ours("prompt_lookup", PromptLookup), ours("jacobi", Jacobi), ours("lookahead_cold", Lookahead)]
    with suppress(ValueError):  # the package has a small model for the embedded one alone
        small = demo_drafter("draft-model", model).model
        chosen.append(ours(SMALL, lambda: DraftModel(small)))
    if warm is not None:
        chosen += [ours(WARM, warm.drafter), ours("lookahead_rejected", warm.drafter, reject_drafts=True)]
    return chosen


def run_quick(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    name: str | None = None,
    watcher: Watcher | None = None,
) -> Result:
    """Measure everything; figures come from the samples of one process and one run.

    Args:
        model, tokenizer: a decoder-only model and its tokenizer.
        prompts: to measure on and to warm with.
        settings: how much.
        name: the model's folder or hub name, None for the embedded one.
        watcher: hears of progress.

    Raises:
        ValueError: a model or prompt that cannot be measured, before any work.
    """
    watcher = watcher or Watcher()
    target = inspect_model(model)
    if target.encoder_decoder:
        raise ValueError("bench quick measures decoder-only models: this one has an encoder.")
    measured, warming = split_prompts(prompts, settings)
    tasks = [Task(prompt, encode_prompt(tokenizer, prompt.text)) for prompt in measured]
    lessons = [encode_prompt(tokenizer, prompt.text) for prompt in warming]
    for prompt, ids in [*zip(measured, (t.ids for t in tasks), strict=True), *zip(warming, lessons, strict=True)]:
        try:
            check_prompt(ids, settings.max_new_tokens, target.vocab_size, target.max_positions)
        except ValueError as error:
            raise ValueError(f"Prompt {prompt.id!r}: {error}") from None
    about = describe(model, name) | {"started": now()}
    warm = None
    if lessons:
        watcher.stage("warming the trie", len(lessons))
        warm = WarmTrie(model, tokenizer, settings.max_new_tokens)
        for ids in lessons:
            warm.learn(ids)
            watcher.step()
        warm.keep()
    watcher.stage("first calls" + (", torch.compile" if settings.compiled else ""), None)
    usable, unmeasured = ready(methods(model, settings, warm), tasks)
    if not settings.compiled:
        unmeasured["hf_compiled"] = "--no-compile"
    if SMALL not in {method.name for method in usable}:
        unmeasured[SMALL] = "the package has a small model for the embedded one alone"
    if warm is None:
        unmeasured[WARM] = unmeasured["lookahead_rejected"] = "no prompts to warm the trie with"
    watcher.stage("measuring", len(usable) * len(tasks) * settings.rounds)
    samples = measure(usable, tasks, settings.rounds, watcher)
    watcher.stage("memory", None)
    memory = compare_memory([task.ids for task in tasks], settings.max_new_tokens, about["threads"], name)
    plain = PLAIN if PLAIN not in unmeasured else "draftree_hooked"
    rows = summarise(samples, tasks, (REFERENCE, plain))
    find_differences(rows, samples, tasks, REFERENCE, model)
    about |= {
        "finished": now(),
        "settings": asdict(settings),
        "prompts": len(tasks),
        "sets": list(dict.fromkeys(prompt.set for prompt in measured)),
        "warm_prompts": warm.answered if warm else 0,
    }
    notes = {method.name: method.note for method in usable if method.note}
    return Result(
        about, rows, unmeasured, notes, plain, memory, count_disturbed(samples), [_flat(s, tasks) for s in samples]
    )


def _flat(sample: Sample, tasks: Sequence[Task]) -> dict[str, Any]:
    stats = sample.answer.stats
    entry = {
        "method": sample.method,
        "prompt": tasks[sample.task].prompt.id,
        "round": sample.round,
        "tokens": len(sample.answer.ids),
        "seconds": sample.answer.seconds,
    }
    if stats is not None:
        entry |= {"steps": stats.steps, "drafted": stats.drafted, "accepted": stats.accepted}
    return entry
