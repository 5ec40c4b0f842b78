"""From training inputs to an aligned model: the large model answers them, then the small one learns the answers.

Answers go into a folder of their own below the result, made by `make_data` with its journal, so a run that was killed
while answering goes on where it stopped; one that was killed while training goes on from its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftree.training.align import Exam, align, check_models
from draftree.training.answers import AnswerOptions, Progress, make_data
from draftree.training.journal import META
from draftree.training.options import TrainOptions
from draftree.training.quality import check_metric
from draftree.training.questions import PLACE, Question, Template, read_questions
from draftree.training.rows import kept_out
from draftree.training.trainer import Tell

ANSWERS = "answers"


def align_on_inputs(
    large: Any,
    tokenizer: Any,
    small: Any,
    data: Path,
    out: Path,
    *,
    field: str | None = None,
    dev: Path | None = None,
    reference: str | None = None,
    template: str | None = None,
    limit: int | None = None,
    answers: AnswerOptions | None = None,
    optimizer: str = "adafactor",
    options: TrainOptions | None = None,
    progress: Progress | None = None,
    tell: Tell = print,
) -> dict[str, Any]:
    """Let `large` answer the inputs in `data`, fine-tune `small` on that, and save it into `out`; see `align`.

    Args:
        large, small: the pair.
        tokenizer: of both.
        data: JSON lines with inputs, a folder of them, or a finished data set of `make_data`.
        out: folder to write.
        field: where a row has its input; None for `turns`, `prompt` or `question`.
        dev: rows for BLEU before and after; None for those of `data` that are kept out of training.
        reference: where a row has its reference; None for no BLEU.
        template: as of `Template`; None for "short", or the bare input where the tokenizer has no chat template.
        limit: most inputs.
        answers: how the large model answers, and both in the exam.
        optimizer, options, tell: as of `align`.
        progress: called after every answer.

    Raises:
        ValueError: anything of these that cannot be used.
    """
    check_models(large, small)
    if reference is None and dev is not None:
        raise ValueError(
            "--dev is for BLEU, which needs references: name their field with --reference, or leave it out."
        )
    if reference is not None:
        check_metric("bleu")
    how = template_of(tokenizer, template)
    answers = answers or AnswerOptions()
    made = (data / META).is_file()
    inputs: list[Question] = []
    if not made:
        inputs = read_questions([data], limit, field=field, reference=None if dev is not None else reference)
    elif reference is not None and dev is None:
        raise ValueError(f"{str(data)!r} holds answers and no references: name rows that have them with --dev.")
    exam_questions: Sequence[Question] = [] if reference is None else [q for q in inputs if kept_out(q.set, q.id)]
    if dev is not None:
        exam_questions = read_questions([dev], field=field, reference=reference)
    exam = Exam(exam_questions, how, answers) if exam_questions else None
    if not made:
        make_data(large, tokenizer, inputs, out / ANSWERS, template=how, options=answers, progress=progress)
    return align(
        large,
        small,
        data if made else out / ANSWERS,
        out,
        tokenizer=tokenizer,
        optimizer=optimizer,
        options=options,
        exam=exam,
        tell=tell,
    )


def template_of(tokenizer: Any, template: str | None) -> Template:
    """The template that is given; without one the chat template, or the bare input where the tokenizer has none."""
    chat = getattr(tokenizer, "chat_template", None)
    return Template(template or ("short" if chat else PLACE), tokenizer)
