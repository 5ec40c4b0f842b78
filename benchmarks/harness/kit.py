"""The methods of `draftree bench compare` and `gpu` by name: Hugging Face's ways of decoding, ours, merged drafters.

If a method cannot be measured, such as a small model's without a small model, the reason stands in its place.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transformers import CompileConfig

from benchmarks.harness.inputs import Settings, Subject, Texts
from benchmarks.harness.parts import make_parts
from draftree.bench.measure import Row, Sample, find_differences, measure, ready, summarise
from draftree.bench.methods import Draftree, HuggingFace, Method
from draftree.bench.quick import remarks, warmed
from draftree.bench.report import Table, now
from draftree.drafting import Drafter, DraftModel, Lookahead
from draftree.drafting.folder import demo_drafter, load_drafter
from draftree.errors import did_you_mean
from draftree.prompts import Watcher
from draftree.registry import TRAINED, names_in
from draftree.shaping import DynamicTree

REFERENCE, COMPILED, PROMPT_LOOKUP, ASSISTED = "hf-generate", "hf-compiled", "hf-prompt-lookup", "hf-assisted"
HOOKED, PLAIN, EAGER, GRAPHS = "draftree-hooked", "draftree", "draftree-eager", "draftree-cuda-graphs"
RUNNERS = {HOOKED: "hooked", PLAIN: "auto", EAGER: "eager", GRAPHS: "cuda_graphs"}  # plain decoding on each
COLD, WARM, REFUSED, LIMITED = "lookahead-cold", "lookahead-warm", "lookahead-rejected", "lookahead-16"
NODES = 16  # most rows of the trees whose overhead is shown: the root, and draft tokens
SMALL = "draft-model"
LABELS = {
    REFERENCE: "HF generate",
    COMPILED: "HF static + compile",
    PROMPT_LOOKUP: "HF prompt lookup, 10",
    ASSISTED: "HF assisted",
    HOOKED: "plain, hooked runner",
    PLAIN: "plain, fastest runner",
    "prompt-lookup": "PromptLookup",
    SMALL: "DraftModel",
    "medusa": "Medusa",
    "hidden-transfer": "HiddenTransfer",
    "bita": "BiTA",
    COLD: "Lookahead, cold trie",
    WARM: "Lookahead, warm trie",
    REFUSED: "Lookahead, all refused",
    LIMITED: f"Lookahead, warm trie, up to {NODES - 1} draft tokens",
    EAGER: "plain, eager runner",
    GRAPHS: "plain, CUDA graphs",
}
HUGGING_FACE = tuple(name for name in LABELS if name.startswith("hf-"))
METHODS = (*(name for name in LABELS if name not in (LIMITED, EAGER, GRAPHS)), f"{WARM}+hidden-transfer")
NO_DRAFTERS = (*HUGGING_FACE, *RUNNERS, REFUSED, LIMITED)  # names that cannot be merged
OVER = {"over plain": PLAIN, "over HF generate": REFERENCE}
COLUMNS = ("method", "tokens/s", *OVER, "acceptance length", "differing")
EMBEDDED_ALONE = "the package has one for the embedded model alone"


def label_of(name: str) -> str:
    """Return the name of a method in tables."""
    return " + ".join(LABELS.get(part, Path(part).name) for part in names_in(name))


def check_name(name: str) -> None:
    """Raise a ValueError for an unknown method, and for a merge with something that is no drafter."""
    if Path(name).is_dir():
        return
    for part in name.split("+"):
        if part not in LABELS and not Path(part).is_dir():
            raise ValueError(
                f"There is no method {part!r}: choose {', '.join(LABELS)}, drafters joined by +, or the folder of a "
                f"trained drafter.{did_you_mean(part, LABELS)}"
            )
        if "+" in name and part in NO_DRAFTERS:
            raise ValueError(f"{part!r} is no drafter that can be merged: leave it out of {name!r}.")


class LeftOutError(ValueError):
    """A method that cannot be measured here; the message says why."""


class CompiledHuggingFace(HuggingFace):
    """Hugging Face's `generate` with its static cache and its own torch.compile of the decoding step.

    Compiling takes place in `ready`; its time stands in `note` and not in the speed.
    """

    def __init__(self, name: str, model: Any, max_new_tokens: int, temperature: float = 0.0) -> None:
        config = CompileConfig()
        config._compile_all_devices = True  # type: ignore[assignment]  # Else Hugging Face does not compile on a CPU.
        options: dict[str, Any] = {"cache_implementation": "static", "compile_config": config}
        super().__init__(name, model, max_new_tokens, temperature, **options)
        self.optional = True

    def ready(self, groups: Sequence[Sequence[Sequence[int]]]) -> None:
        # The longest prompts come first: the cache keeps their length, and another length would compile again.
        begin = time.perf_counter()
        super().ready(sorted(groups, key=lambda group: max(map(len, group)), reverse=True))
        self.note = f"compiling took {time.perf_counter() - begin:.0f} s, not counted"


@dataclass(frozen=True, slots=True)
class Kit:
    """What methods are made of."""

    subject: Subject
    settings: Settings
    warm: Draftree | None = None  # a warmed trie, see `warmed`; None without prompts to warm it with
    assistant: Any = None  # a small Hugging Face model of the same vocabulary; None for the embedded model's own

    @property
    def model(self) -> Any:
        """Return the model that is measured."""
        return self.subject.model

    def methods(self, chosen: Sequence[str]) -> tuple[list[Method], dict[str, str]]:
        """Return the methods of these names that can be made, and by name the reason of each other one."""
        made, left_out = [], {}
        for name in chosen:
            try:
                made.append(self.method(name))
            except LeftOutError as why:
                left_out[name] = str(why)
        return made, left_out

    def method(self, name: str) -> Method:
        """Return the method called `name`; names joined by + are merged drafters, a folder is a trained drafter.

        Raises:
            LeftOutError: it cannot be measured with this model or these options.
        """
        if name in HUGGING_FACE:
            return self._hugging_face(name)
        if name in RUNNERS:
            plain = self._draftree(name, runner=RUNNERS[name])
            plain.optional = name == PLAIN  # Not every model qualifies.
            return plain
        if name == LIMITED:
            return self._draftree(name, self.maker(WARM), lambda: DynamicTree(NODES - 1))
        if name in (WARM, REFUSED):
            make, warm = self.maker(WARM), self.warm
            assert warm is not None
            return self._draftree(name, make, lambda: copy.deepcopy(warm.shape), reject_drafts=name == REFUSED)
        drafted = self._draftree(name, self.maker(name))
        drafted.optional = SMALL in names_in(name)  # Its vocabulary may be another one.
        return drafted

    def maker(self, name: str) -> Callable[[], Drafter]:
        """Return what makes the drafter called `name`, anew for each round; a LeftOutError if that is impossible."""
        own: dict[str, Callable[[], Drafter]] = {COLD: Lookahead}
        for part in names_in(name):
            if part == WARM:
                if self.warm is None or self.warm.drafter is None:
                    raise LeftOutError("no prompts to warm the trie with")
                own[part] = partial(copy.deepcopy, self.warm.drafter)
            elif part == SMALL:
                own[part] = partial(DraftModel, self.draft_model())
            elif part in TRAINED:
                self._trained(part)  # This fails before anything runs.
            elif Path(part).is_dir():
                own[part] = partial(self._trained, part)
        return partial(make_parts, name, own, self._trained)

    def draft_model(self) -> Any:
        """Return the small model, the given one or the embedded model's own; a LeftOutError if there is none."""
        if self.assistant is not None:
            return self.assistant
        try:
            return demo_drafter("draft-model", self.subject.trained_for).model
        except ValueError:
            raise LeftOutError(f"{EMBEDDED_ALONE}: name one with --assistant") from None

    def _trained(self, name: str) -> Drafter:
        if name not in TRAINED:
            folder: Drafter = load_drafter(Path(name), self.model)
            return folder
        try:
            held = demo_drafter(name, self.subject.trained_for)
        except ValueError:
            raise LeftOutError(EMBEDDED_ALONE) from None
        return self.subject.fitted(held)

    def _hugging_face(self, name: str) -> Method:
        given = (name, self.model, self.settings.max_new_tokens, self.settings.temperature)
        if name == COMPILED:
            if not self.settings.compiled:
                raise LeftOutError("--no-compile")
            return CompiledHuggingFace(*given)
        drafting: dict[str, Any] = {PROMPT_LOOKUP: {"prompt_lookup_num_tokens": 10}}.get(name, {})
        drafting |= {"assistant_model": self.draft_model()} if name == ASSISTED else {}
        return HuggingFace(*given, **drafting)

    def _draftree(self, name: str, *making: Callable[[], Any], **options: Any) -> Draftree:
        settings = self.settings
        return Draftree(name, self.model, settings.max_new_tokens, *making, temperature=settings.temperature, **options)


def make_kit(
    subject: Subject, lessons: Sequence[Sequence[int]], settings: Settings, watcher: Watcher, assistant: Any = None
) -> Kit:
    """Return a kit whose trie has answered `lessons`, with the uninflated model if there is one: answers are equal."""
    warm = warmed(subject.trained_for, lessons, settings.max_new_tokens, watcher) if lessons else None
    return Kit(subject, settings, warm, assistant)


@dataclass(frozen=True, slots=True)
class Case:
    """The measured methods of one model, batch size and sampling."""

    about: dict[str, Any]  # commit, device, dtype, threads, command, versions, times, settings
    rows: dict[str, Row]  # by method
    unmeasured: dict[str, str]  # by method, why there is no row
    notes: dict[str, str] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    def entries(self) -> list[dict[str, Any]]:
        """Return a row of plain values for each method."""
        named = [(row.method, row.values(OVER)) for row in self.rows.values()]
        return [row | {"method": label_of(name), "name": name} for name, row in named]

    def table(self) -> Table:
        """Return the table of the methods."""
        return Table(f"{self.about['model']}, {self.about['dtype']}; {self.about['case']}", self.entries(), COLUMNS)

    def remarks(self) -> list[str]:
        """Return lines about methods without a row, notes and differing answers."""
        lines = [f"{label_of(name)} was not measured: {why.rstrip('.')}." for name, why in self.unmeasured.items()]
        lines += [f"{label_of(name)}: {note}." for name, note in self.notes.items()]
        return [*lines, *remarks(self.rows, self.samples)]


def run_case(kit: Kit, texts: Texts, names: Sequence[str], watcher: Watcher, part: str = "") -> Case:
    """Measure methods by the settings of `kit`, in one process and one run; `part` names the case for the watcher.

    Raises:
        ValueError: none of the methods can be measured.
    """
    settings, tasks = kit.settings, texts.tasks
    about = kit.subject.about() | {"started": now(), "case": settings.title}
    methods, unmeasured = kit.methods(names)
    watcher.stage(f"{part}first calls", None)
    usable, refused = ready(methods, tasks, settings.batch)
    unmeasured |= refused
    if not usable:
        reasons = "; ".join(f"{name}: {why}" for name, why in unmeasured.items())
        raise ValueError(f"No method can be measured ({settings.title}; {reasons}): give one that can.")
    watcher.stage(f"{part}measuring", len(usable) * (len(tasks) // settings.batch) * settings.rounds)
    samples = measure(usable, tasks, settings.rounds, watcher, batch=settings.batch)
    rows = summarise(samples, tasks, (PLAIN, REFERENCE), batch=settings.batch)
    # Hugging Face draws a batch from one stream, and its own drafting draws other tokens: greedy answers are compared.
    theirs = [method for method in usable if isinstance(method, HuggingFace) and settings.temperature > 0]
    apart = {method.name for method in theirs if method.drafts or settings.batch > 1}
    compared = [sample for sample in samples if sample.method not in apart]
    known = [method.name for method in usable if method.name not in apart]
    if known:
        reference = next((name for name in (REFERENCE, PLAIN) if name in known), known[0])
        find_differences(rows, compared, tasks, reference, kit.model)
    about |= {"finished": now(), "prompts": len(tasks), "sets": texts.sets}
    notes = {method.name: method.note for method in usable if method.note}
    notes |= dict.fromkeys(apart, "it draws other tokens from the same seed, so its answers are not compared")
    return Case(about, rows, unmeasured, notes, samples)
