"""Alignment of a small model with a large one: it learns to write what the large one writes (BiLD, section 3.5).

The labels are the large model's own greedy outputs on training inputs, as `make_data` writes them; the small model is
fine-tuned on them at a constant learning rate. It then disagrees less often, so a large model that reviews it has
less to correct, and as a drafter it is accepted more often. The result is a stock Hugging Face folder.

`align` takes such outputs; `align_on_inputs` has the large model write them first, into a folder of their own below
the result and with a journal. So a run that was killed while answering goes on where it stopped, and one that was
killed while training goes on from its last checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from draftree.drafting.folder import base_of
from draftree.drafting.second_model import check_pair, warn_of_size
from draftree.errors import install
from draftree.runner.target import inspect_model
from draftree.training.answers import AnswerOptions, Progress, answer_all, check_lengths, make_data
from draftree.training.journal import META
from draftree.training.options import Inputs, TrainOptions
from draftree.training.questions import PLACE, Question, Template, read_questions
from draftree.training.rows import kept_out, read_data
from draftree.training.session import Session
from draftree.training.trainer import Report
from draftree.training.whole_model import AlignObjective, check_trainable, in_float32, save_model

OPTIMIZERS = {"adafactor": ("adafactor", 1e-3), "adamw": ("adamw_torch", 3e-4)}  # Hugging Face's name, learning rate
ANSWERS = "answers"  # the folder of the large model's answers, below the result


@dataclass(frozen=True, slots=True)
class Exam:
    """Questions with references, by which BLEU is found."""

    questions: Sequence[Question]  # each with a reference
    template: Template  # how they become prompts
    options: AnswerOptions  # how they are answered

    def bleu(self, model: Any) -> float:
        """BLEU of a model's greedy answers, 0 to 100."""
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        answers = answer_all(model, self.template.tokenizer, self.template, self.questions, self.options)
        texts = {number: rows[0]["answer"] for number, rows in answers}
        for module, mode in modes:
            module.training = mode
        own = [texts[q.number] for q in self.questions]
        return round(bleu(own, [str(q.reference) for q in self.questions]), 2)


def check_run(large: Any, small: Any, optimizer: str) -> None:
    """Refuse, before any work, what `align` cannot do; warn where the small model is no smaller.

    Raises:
        ValueError: no such optimizer, several processes, two vocabularies, an encoder on one side only, or a small
            model that cannot be trained.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"The optimizer is {optimizer!r}: choose {' or '.join(OPTIMIZERS)}.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("A small model is aligned in one process: run this without accelerate launch.")
    theirs, ours = inspect_model(large), inspect_model(small)
    check_trainable(small)
    check_pair(ours, theirs)
    warn_of_size(ours, theirs)


def align(
    large: Any,
    small: Any,
    data: Path,
    out: Path,
    *,
    tokenizer: Any = None,
    optimizer: str = "adafactor",
    options: TrainOptions | None = None,
    exam: Exam | None = None,
    report: Report = print,
) -> dict[str, Any]:
    """Fine-tune `small` on what `large` wrote, and save it into `out`; returns the recipe.

    `out` gets the model as Hugging Face's `save_pretrained` writes it, recipe.json (everything that made it, and the
    figures before and after), curve.json and curve.png, and the checkpoints. `small` itself is trained: its weights
    change. Figures: the dev rows' loss, the share of their tokens that the small model finds likeliest (agreement) and,
    with an exam, BLEU of both models.

    Args:
        large: who made the data; it is not changed.
        small: a stock causal language model or encoder-decoder, as `large`, with the same vocabulary.
        data: a data set of `make_data`, made by `large`.
        out: folder to write.
        tokenizer: saved with the model; None for none.
        optimizer: "adafactor" or "adamw"; the learning rate stays as it is from the first step to the last.
        options: of the run.
        exam: questions with references; None for no BLEU.
        report: gets lines of progress.

    Raises:
        ValueError: a pair that does not fit or cannot be trained, bad data or options, or a loss that is no number any
            more.
    """
    options = options or TrainOptions()
    check_run(large, small, optimizer)
    torch.manual_seed(options.seed)
    rows = read_data(data, inspect_model(large), options.max_length)
    _check_room(small, [*rows.train, *rows.dev])
    name, rate = OPTIMIZERS[optimizer]
    base, start = base_of(large), {"small_model": asdict(base_of(small))}
    constant = {"optim": name, "lr_scheduler_type": "constant"}
    session = Session(out, "align", rows, options, large.device, rate, **constant)
    scores: dict[str, float] = {}
    if exam is not None:
        scores = {"large": exam.bleu(large), "before": exam.bleu(small)}
        found = f"large model {scores['large']}, small one {scores['before']}"
        report(f"BLEU on {len(exam.questions)} questions: {found}")
    with in_float32(small):
        scored = session.fit(AlignObjective(small.train()), None, report)
    small.eval()
    if exam is not None:
        scores["after"] = exam.bleu(small)
    both = {"before": scored[0], "after": scored[-1]}
    recipe = {
        "method": "align",
        "base_model": asdict(base),
        **start,
        "optimizer": optimizer,
        "parameters": sum(p.numel() for p in small.parameters()),
        "loss": {when: entry["eval_loss"] for when, entry in both.items()},
        "agreement": {when: entry["eval_accuracy"][0][0] for when, entry in both.items()},
        "cases": scored[-1]["eval_cases"][0],
        "bleu": scores or None,
        "bleu_questions": len(exam.questions) if exam is not None else 0,
    }
    title = f"a small model aligned with {base.name}"
    return session.finish(recipe, title, lambda _: save_model(small, tokenizer, out))


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


def _check_room(small: Any, rows: Iterable[Any]) -> None:
    limit = inspect_model(small).max_positions
    longest = max(max(len(row), len(row.source)) for row in rows)
    if limit is not None and longest > limit:
        raise ValueError(
            f"The data has rows of {longest} tokens and the small model's context is {limit}: leave the long ones out "
            f"with --max-length {limit}."
        )


def check_bleu() -> None:
    """Raise a ValueError where sacrebleu is missing."""
    if find_spec("sacrebleu") is None:
        raise ValueError(f"BLEU needs sacrebleu: {install('bench')}.")


def bleu(texts: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU, 0 to 100, of one text or more, each with one reference; a ValueError as of `check_bleu`."""
    check_bleu()
    from sacrebleu.metrics import BLEU

    return float(BLEU(force=True).corpus_score(texts, [references]).score)  # silent about texts cut into words
