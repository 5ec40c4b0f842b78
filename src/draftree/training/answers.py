"""Make training data: the target answers questions greedily through the engine.

Answers are yielded as they finish. `make_data` writes each finished answer into a journal, so that a stopped run
continues without lost or repeated rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftree.drafting.folder import base_of
from draftree.drafting.lookahead import Lookahead
from draftree.engine.engine import Engine
from draftree.engine.limits import decoder_start, eos_token_ids
from draftree.engine.request import Request, State
from draftree.engine.sampling import SamplingParams
from draftree.runner.target import Target, inspect_model
from draftree.training.journal import Journal, fingerprint
from draftree.training.questions import Question, Template

QUEUE = 2  # The engine holds this many requests per slot.
Answered = tuple[int, list[dict[str, Any]]]  # a question's number, one row for each of its turns
Progress = Callable[[int, int, int], None]  # questions answered, of how many, tokens made in this run


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Set the limits of answering questions."""

    max_new_tokens: int = 256  # most tokens of an answer; less where the context ends before
    slots: int = 8  # requests decoded together
    skip_long: bool = False  # leave out questions that do not fit into the context, instead of refusing them


def make_data(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    out: Path,
    *,
    template: Template,
    options: AnswerOptions | None = None,
    progress: Progress | None = None,
    answer: Callable[[list[Question]], Iterable[Answered]] | None = None,
    replace: bool = False,
) -> dict[str, Any]:
    """Answer `questions` and write the data set into the folder `out`; return the contents of its meta.json.

    Args:
        model: the target.
        tokenizer: the target's.
        questions: as of `read_questions`.
        out: folder to write; where it holds an unfinished run of the same questions, that one is finished.
        template: how a question becomes a prompt.
        options: how to answer.
        progress: called after every answered question.
        answer: answers the questions that are left, elsewhere than here; by default this process does.
        replace: answer anew where the folder holds data of something else, instead of refusing it.

    Raises:
        ValueError: a folder of other data, a prompt beyond the context.
    """
    options = options or AnswerOptions()
    target = inspect_model(model)
    fitting = check_lengths(target, template, questions, options)
    about = {
        "model": base_of(model),
        "template": template.kind,
        "system": template.system,
        "max_new_tokens": options.max_new_tokens,
        "questions": fingerprint([[q.number, q.id, list(q.turns)] for q in fitting]),
    }
    with Journal(out, about, replace=replace) as journal:
        left = [] if journal.complete else [q for q in fitting if q.number not in journal.done]
        made = 0
        if left:
            source = answer(left) if answer is not None else answer_all(model, tokenizer, template, left, options)
            for number, rows in source:
                journal.add(number, rows)
                made += sum(len(row["answer_ids"]) for row in rows)
                if progress is not None:
                    progress(len(journal.done), len(fitting), made)
        return journal.finish(skipped=len(questions) - len(fitting))


def check_lengths(
    target: Target, template: Template, questions: Sequence[Question], options: AnswerOptions
) -> list[Question]:
    """The questions whose first prompt leaves room for an answer.

    Raises:
        ValueError: one does not, and `skip_long` is off; or none does.
    """
    limit = target.max_positions
    if limit is None:
        return list(questions)
    fitting = []
    for question in questions:
        length = len(template.encode(question.turns[:1]))
        if length < limit:
            fitting.append(question)
        elif not options.skip_long:
            raise ValueError(
                f"Question {question.id!r} has {length} tokens in its template and the model's context is {limit}: "
                "shorten it, or leave such questions out with --skip-long."
            )
    if not fitting:
        raise ValueError(f"No question fits into the model's context of {limit}: give shorter ones.")
    return fitting


def answer_all(
    model: Any, tokenizer: Any, template: Template, questions: Iterable[Question], options: AnswerOptions
) -> Iterator[Answered]:
    """Answer questions greedily, `options.slots` at a time; yields each as soon as its last turn is over."""
    engine = Engine(model, drafter=Lookahead(), slots=options.slots)
    waiting = iter(questions)
    running: list[_Conversation] = []
    while True:
        while len(running) < QUEUE * options.slots and (question := next(waiting, None)) is not None:
            rows: list[dict[str, Any]] = []
            turns = _ask(engine, tokenizer, template, question, options.max_new_tokens, rows)
            running.append(_Conversation(question.number, rows, turns, next(turns)))
        if not running:
            return
        engine.step()
        for one in [c for c in running if c.request.state is State.FINISHED]:
            following = next(one.turns, None)
            if following is None:
                running.remove(one)
                yield one.number, one.rows
            else:
                one.request = following


@dataclass(slots=True, eq=False)
class _Conversation:
    """A question on its way: rows of the turns that are over, what asks the next turns, the present turn's request."""

    number: int
    rows: list[dict[str, Any]]
    turns: Iterator[Request]
    request: Request


def _ask(
    engine: Engine, tokenizer: Any, template: Template, question: Question, most: int, rows: list[dict[str, Any]]
) -> Iterator[Request]:
    """Ask turn after turn: yields the request of each, and adds its row to `rows` when it is over."""
    target, limit = engine.target, engine.target.max_positions
    for turn, text in enumerate(question.turns):
        prompt = template.encode(question.turns[: turn + 1], [row["answer"] for row in rows])
        if turn and limit is not None and len(prompt) >= limit:
            return  # the conversation has outgrown the context; earlier turns stay
        start, source = prompt, None
        if target.encoder_decoder:
            source = torch.tensor(prompt, device=target.device, dtype=torch.long)
            start = [decoder_start(target.model.generation_config)]
        new = most if limit is None else min(most, limit - len(start))
        params = SamplingParams(max_new_tokens=new, eos_token_ids=eos_token_ids(target.model))
        request = engine.add(start, params, encoder_input=source)
        yield request
        if request.error is not None:
            raise request.error
        rows.append(
            {
                "id": question.id,
                "turn": turn,
                "set": question.set,
                "question": text,
                "prompt_ids": prompt,
                "answer_ids": request.tokens,
                "answer": tokenizer.decode(request.tokens, skip_special_tokens=True),
                "finish": request.finish_reason,
            }
        )
