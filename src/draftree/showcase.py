"""What `draftree demo` measures: seven kinds of prompt, each answered plainly and with drafting.

The prompts are the first of their sets' test prompts, chosen by nobody. Time counts the engine's own work and never
the display.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from draftree.bench.equality import Difference, difference
from draftree.bench.methods import Draftree, HuggingFace
from draftree.bench.samples import Answer, Sample, Task
from draftree.bench.summary import summarise
from draftree.drafting import Drafter, PromptLookup
from draftree.engine import Request
from draftree.prompts import Prompt, embedded_prompts, take_per_set

KINDS = {
    "e2e": "restaurant",
    "sgd_chat": "dialogue",
    "gsm8k": "maths",
    "wikisql": "SQL",
    "tldr_shell": "shell",
    "leetcode_py": "code",
    "squad": "question",
}
READY_TOKENS = 16
WAYS = ("plain", "drafted", "reference")  # of answering a scene

Encode = Callable[[str], list[int]]
Watch = Callable[[str, Request], None]


@dataclass(frozen=True, slots=True)
class Scene:
    """One prompt, answered three ways."""

    kind: str  # what sort of prompt it is
    prompt: Prompt
    # plain, drafted, reference: answers of the engine without and with a drafter, and of Hugging Face.
    plain: Answer
    drafted: Answer
    reference: Answer
    # By way ("plain", "drafted"), where it leaves the answer it must equal: the drafted that of the plain engine, the
    # plain that of Hugging Face. Empty where all is equal.
    parted: dict[str, Difference]

    @property
    def equal(self) -> bool:
        """Whether all three answers hold the same token ids."""
        return not self.parted

    def as_dict(self, *, quiet: bool) -> dict[str, Any]:
        """Its figures, the prompt and the drafted answer as plain values, for JSON; `quiet` as of `figures`."""
        facts: dict[str, Any] = {"set": self.prompt.set, "id": self.prompt.id, "prompt": self.prompt.text}
        facts |= {"token_ids": self.drafted.ids, "stats": self.drafted.stats and self.drafted.stats.as_dict()}
        differences = {way: where.as_dict() for way, where in self.parted.items()}
        return figures(self.kind, [self], quiet=quiet) | facts | {"differences": differences}


def figures(kind: str, scenes: Sequence[Scene], *, quiet: bool = True) -> dict[str, Any]:
    """Total tokens over total time of these scenes together, in plain numbers, for JSON.

    Ratios of speeds are None where the machine was not `quiet`.
    """
    samples = [Sample(way, at, 0, getattr(scene, way)) for at, scene in enumerate(scenes) for way in WAYS]
    rows = summarise(samples, [Task(scene.prompt, []) for scene in scenes], WAYS)
    plain, drafted, reference = (rows[way] for way in WAYS)
    assert drafted.stats is not None
    return {
        "kind": kind,
        "tokens": drafted.tokens,
        "plain_tokens_per_second": plain.speed.value,
        "drafted_tokens_per_second": drafted.speed.value,
        "hf_generate_tokens_per_second": reference.speed.value,
        "speed_up": drafted.over["plain"].value if quiet else None,
        "speed_up_over_hf_generate": drafted.over["reference"].value if quiet else None,
        "acceptance_length": drafted.stats.acceptance_length,
        "overhead_efficiency": drafted.efficiency("plain") if quiet else None,
        "equal": all(scene.equal for scene in scenes),
    }


class Showcase:
    """Runs the scenes on one model with one drafter.

    Args:
        model: a decoder-only model.
        encode: token ids of a prompt's text.
        drafter: drafts on the drafted side; None decodes plainly there too.
        max_new_tokens: most tokens of an answer.
    """

    def __init__(self, model: Any, encode: Encode, drafter: Drafter | None, max_new_tokens: int) -> None:
        self._model = model
        self._encode = encode
        self._plain = Draftree("plain", model, max_new_tokens)
        self._drafted = Draftree("drafted", model, max_new_tokens, lambda: drafter)
        self._reference = HuggingFace("hf", model, max_new_tokens)

    def warm(self, per_set: int) -> Iterator[int]:
        """Let the drafter answer `per_set` warm prompts of every shown set; yields how many are done."""
        shown = [p for p in embedded_prompts() if p.warm and p.set in KINDS]
        for done, prompt in enumerate(take_per_set(shown, per_set), 1):
            self._drafted.answer(self._encode(prompt.text))
            yield done

    def run(self, watch: Watch | None = None, begin: Callable[[str], None] = lambda kind: None) -> Iterator[Scene]:
        """Answer the prompts, plain first, then drafted, then Hugging Face.

        `watch` sees every step of ours, and `begin` is told the kind of prompt before its scene.
        """
        prompts = embedded_prompts()
        # First calls pay for what later ones find ready; that is neither method's speed. Another drafter stands
        # in for the shown one, which must not learn here.
        ready = self._encode(next(p.text for p in prompts if p.warm))
        stand_in = Draftree("stand-in", self._model, READY_TOKENS, PromptLookup)
        for method in (self._plain, stand_in, self._reference):
            method.answer(ready)
        for name, kind in KINDS.items():
            begin(kind)
            prompt = next(p for p in prompts if p.set == name and not p.warm)
            ids = self._encode(prompt.text)
            plain = self._plain.answer(ids, _watcher(watch, "plain"))
            drafted = self._drafted.answer(ids, _watcher(watch, "drafted"))
            reference = self._reference.answer(ids)
            found = {
                "drafted": difference(self._model, ids, plain.ids, drafted.ids),
                "plain": difference(self._model, ids, reference.ids, plain.ids),
            }
            parted = {way: where for way, where in found.items() if where is not None}
            yield Scene(kind, prompt, plain, drafted, reference, parted)


def _watcher(watch: Watch | None, way: str) -> Callable[[Request], None] | None:
    return None if watch is None else lambda request: watch(way, request)
