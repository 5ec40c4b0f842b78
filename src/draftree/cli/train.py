"""`draftree train`: data made by the model itself, and the trainers of what drafts inside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftree.cli import train_align, train_early_exit, train_methods, train_skip_set

app = typer.Typer(name="train", help="Make training data and train drafters inside the model.", no_args_is_help=True)
app.command("bita")(train_methods.bita)
app.command("hidden-transfer")(train_methods.hidden_transfer)
app.command("medusa")(train_methods.medusa)
app.command("early-head")(train_methods.early_head)
app.command("align")(train_align.align)
app.command("early-exit")(train_early_exit.early_exit)
app.command("skip-set")(train_skip_set.skip_set)

REFRESH = 15.0  # seconds between lines of progress where output is piped


@app.command("data")
def data(
    questions: Annotated[list[Path], typer.Argument(help="JSON lines with questions, or folders of them.")],
    out: Annotated[Path, typer.Option(help="Folder for the data set; an unfinished one is finished.")],
    model: Annotated[
        str | None, typer.Option(help="Model folder or hub name.", show_default="the embedded model")
    ] = None,
    template: Annotated[str, typer.Option(help="full, short, or a text with {question} in it.")] = "short",
    system: Annotated[
        str | None, typer.Option(help="System message of the full template.", show_default="a plain one")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    limit: Annotated[int | None, typer.Option(min=1, help="Most questions, taken evenly from the files.")] = None,
    per_set: Annotated[int | None, typer.Option(min=1, help="Most questions of a file.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Questions answered together.")] = 8,
    workers: Annotated[int, typer.Option(min=1, help="Processes, by Ray Data; 1 does without Ray.")] = 1,
    file_format: Annotated[str, typer.Option("--format", help="jsonl or arrow.")] = "jsonl",
    skip_long: Annotated[bool, typer.Option("--skip-long", help="Leave out questions beyond the context.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="torch's choice")] = None,
) -> None:
    """Let the model answer QUESTIONS greedily; the answers are what its drafters train on."""
    import torch
    from rich.console import Console

    from draftree.bench.models import load_model
    from draftree.training.answers import AnswerOptions, make_data
    from draftree.training.questions import SYSTEM, Template, read_questions

    if system is not None and template != "full":
        raise ValueError("--system belongs to the template 'full': add --template full, or leave --system out.")
    asked = read_questions(questions, limit, per_set)
    if threads is not None:
        torch.set_num_threads(threads)
    target, tokenizer = load_model(model)
    how = Template(template, tokenizer, system or SYSTEM)
    options = AnswerOptions(max_new_tokens=max_new_tokens, slots=batch, skip_long=skip_long)
    answer = None
    if workers > 1:
        from draftree.training.ray_answers import RayAnswers

        answer = RayAnswers(model, how, options, workers, threads)
    console = Console(highlight=False)
    with DataBar(console) as bar:
        about = make_data(
            target,
            tokenizer,
            asked,
            out,
            template=how,
            options=options,
            file_format=file_format,
            progress=bar,
            answer=answer,
        )
    skipped = f", {about['skipped']} questions left out as too long" if about["skipped"] else ""
    console.print(f"{about['rows']} rows, {about['answer_tokens']} answer tokens in {out}{skipped}", markup=False)


class DataBar:
    """How far the answers are: a bar with the time left on a terminal, a line now and then in a pipe."""

    def __init__(self, console: object) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = console
        self._bar = Progress(
            TextColumn("answering"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]} tokens/s,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,  # type: ignore[arg-type]
            disable=not console.is_terminal,  # type: ignore[attr-defined]
        )

    def __enter__(self) -> DataBar:
        import time

        self._begin = self._told = time.monotonic()
        self._first: int | None = None
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int, tokens: int) -> None:
        """See `draftree.training.answers.Progress`."""
        import time

        now = time.monotonic()
        seconds = max(now - self._begin, 1e-9)
        if self._first is None:
            self._first = done - 1
            self._task = self._bar.add_task("", total=total, completed=self._first, speed=0)
        self._bar.update(self._task, completed=done, speed=round(tokens / seconds))
        if not self._console.is_terminal and now - self._told > REFRESH:  # type: ignore[attr-defined]
            self._told = now
            left = (total - done) * seconds / (done - self._first)
            print(f"{done} of {total} answered, {tokens / seconds:.0f} tokens/s, {left:.0f} s left", flush=True)
