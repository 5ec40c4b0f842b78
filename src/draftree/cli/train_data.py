"""`draftree train data`: what a model answers, for its drafters to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.options import MaxNewTokens, Model, check_folder, grouped
from draftree.cli.where import Where


@grouped
def data(
    *,
    questions: Annotated[list[Path], typer.Argument(help="JSON lines with questions, or folders of them.")],
    out: Annotated[Path, "Folder for the data set; an unfinished one is finished."],
    model: Model = None,
    where: Where,
    template: Annotated[str, "full, short, or a text with {question} in it."] = "short",
    system: Annotated[
        str | None, typer.Option(help="System message of the full template.", show_default="a plain one")
    ] = None,
    max_new_tokens: MaxNewTokens = 256,
    limit: Annotated[int | None, typer.Option(min=1, help="Most questions, taken evenly from the files.")] = None,
    per_set: Annotated[int | None, typer.Option(min=1, help="Most questions of a file.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Questions answered together.")] = 8,
    workers: Annotated[int, typer.Option(min=1, help="Processes, by Ray Data; 1 does without Ray.")] = 1,
    skip_long: Annotated[bool, "Leave out questions beyond the context."] = False,
) -> None:
    """Let the model answer QUESTIONS greedily; the answers are what its drafters train on."""
    from draftree.training.questions import SYSTEM, Template, read_questions

    if system is not None and template != "full":
        raise ValueError("--system belongs to the template 'full': add --template full, or leave --system out.")
    asked = read_questions(questions, limit, per_set)
    check_folder(out)
    from draftree.cli.screen import DataBar, line_console
    from draftree.training.answers import AnswerOptions, make_data  # torch takes seconds, and a refusal none

    target, tokenizer = where.load(model)
    how = Template(template, tokenizer, SYSTEM if system is None else system)
    options = AnswerOptions(max_new_tokens=max_new_tokens, slots=batch, skip_long=skip_long)
    answer = None
    if workers > 1:
        from draftree.training.ray_answers import RayAnswers

        answer = RayAnswers(model, how, options, workers, where.threads, where.placement)
    console = line_console()
    with DataBar(console, f"the answers so far are kept in {out}, and the same command goes on from there") as bar:
        about = make_data(
            target,
            tokenizer,
            asked,
            out,
            template=how,
            options=options,
            progress=bar,
            answer=answer,
        )
    skipped = f", {about['skipped']} questions left out as too long" if about["skipped"] else ""
    console.print(f"{about['rows']} rows, {about['answer_tokens']} answer tokens in {out}{skipped}")
