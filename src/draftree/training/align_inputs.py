"""From training inputs to an aligned model: the large model answers them, then the small one learns the answers.

Answers go into a folder of their own below the result, made by `make_data` with its journal, so a run that was killed
while answering goes on where it stopped; one that was killed while training goes on from its last checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftree.runner.target import inspect_model
from draftree.training.align import Exam, align, check_run
from draftree.training.answers import AnswerOptions, Progress, check_lengths, make_data
from draftree.training.bleu import check_bleu
from draftree.training.journal import META
from draftree.training.options import Inputs, TrainOptions
from draftree.training.questions import PLACE, Question, Template, read_questions
from draftree.training.rows import kept_out
from draftree.training.trainer import Report

ANSWERS = "answers"


def align_on_inputs(
    large: Any,
    tokenizer: Any,
    small: Any,
    inputs: Inputs,
    out: Path,
    *,
    answers: AnswerOptions | None = None,
    optimizer: str = "adafactor",
    options: TrainOptions | None = None,
    progress: Progress | None = None,
    report: Report = print,
) -> dict[str, Any]:
    """Let `large` answer the inputs, fine-tune `small` on that, and save it into `out`; see `align`.

    Args:
        large, small: the pair.
        tokenizer: of both.
        inputs: what is answered.
        out: folder to write.
        answers: how the large model answers, and both for BLEU.
        progress: called after every answer.
        optimizer, options, report: as of `align`.

    Raises:
        ValueError: anything of these that cannot be used.
    """
    check_run(large, small, optimizer)
    answers = answers or AnswerOptions()
    template = template_of(tokenizer, inputs.template)
    data, questions = inputs.data, []
    if (data / META).is_file():
        inputs.refuse_for_answers()
    else:
        reference = inputs.reference if inputs.dev is None else None
        questions = read_questions([data], inputs.limit, field=inputs.field, reference=reference)
    exam = _exam(inputs, questions, template, answers, (large, small))
    if questions:
        data = out / ANSWERS
        how: dict[str, Any] = {"template": template, "replace": options is not None and options.force}
        make_data(large, tokenizer, questions, data, options=answers, progress=progress, **how)
    run: dict[str, Any] = {"optimizer": optimizer, "options": options, "report": report}
    return align(large, small, data, out, tokenizer=tokenizer, exam=exam, **run)


def _exam(
    inputs: Inputs, questions: list[Question], template: Template, answers: AnswerOptions, models: tuple[Any, Any]
) -> Exam | None:
    """The rows with references that both models can read; None where there are none."""
    if inputs.reference is None:
        if inputs.dev is not None:
            raise ValueError(
                "--dev is for BLEU, which needs references: name their field with --reference, or leave it out."
            )
        return None
    check_bleu()
    if inputs.dev is not None:
        questions = read_questions([inputs.dev], field=inputs.field, reference=inputs.reference)
    elif not questions:
        raise ValueError(f"{str(inputs.data)!r} holds answers and no references: name rows that have them with --dev.")
    else:
        questions = [q for q in questions if kept_out(q.set, q.id)]
    for model in models if questions else ():
        questions = check_lengths(inspect_model(model), template, questions, answers)
    return Exam(questions, template, answers) if questions else None


def template_of(tokenizer: Any, template: str | None) -> Template:
    """The template that is given; without one the chat template, or the bare input where the tokenizer has none."""
    chat = getattr(tokenizer, "chat_template", None)
    return Template(template or ("short" if chat else PLACE), tokenizer)
