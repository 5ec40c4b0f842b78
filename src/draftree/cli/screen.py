"""Print to the terminal: consoles, answers coloured by drafter, progress bars and the files that were written."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich import progress
from rich.console import Console
from rich.text import Text

from draftree.detokenizer import Detokenizer
from draftree.pages import COLOURS, colour_of, drafter_of
from draftree.prompts import Watcher

if TYPE_CHECKING:
    from draftree.bench.report import Report

PIPED_WIDTH = 120  # Width of tables in a file or pipe, in characters.
REFRESH = 0.2  # Seconds between redraws of a progress bar.
LINES = 15.0  # Seconds between progress lines in a pipe.
BOLD = ("lookahead/both",)  # Shown in bold, like tokens that several merged drafters drafted.


def wide_console() -> Console:
    """Return a console without highlighting; in a pipe it has a fixed width."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    return console


def line_console() -> Console:
    """Return a console for running text: no wrapping, no markup."""
    return Console(highlight=False, markup=False, soft_wrap=True)


def print_answer(console: Console, piece: str, style: str = "") -> None:
    """Print a piece of an answer, coloured on a terminal.

    A pipe gets the text directly, because rich replaces tabs and drops carriage returns.
    """
    if console.is_terminal:
        console.print(Text(piece, style=style), end="")
    else:
        console.file.write(piece)
        console.file.flush()


def legend(sources: Iterable[str] | None = None) -> Text:
    """Return the legend of the colours: of `sources`, or of all drafters."""
    shown = (*COLOURS, *BOLD, "another drafter") if sources is None else sorted(sources)
    if not shown:
        return Text("Colours: all tokens are the model's own; no draft token was accepted.")
    text = Text("Colours: plain = the model's own token; accepted draft tokens by drafter: ")
    return text.append_text(Text(", ").join(Text(name, style=source_style(name)) for name in shown)).append(".")


def source_style(source: str | None) -> str:
    """Return the colour of a source, in bold if several drafters, or prompt and answers, drafted the token."""
    if source is None:
        return ""
    bold = source in BOLD or drafter_of(source) == "several"
    return f"bold {colour_of(source)}" if bold else colour_of(source)


class ColouredText:
    """A rich Text built token by token; bytes of unfinished characters are held back."""

    def __init__(self, tokenizer: Any) -> None:
        self.text = Text()
        self._detokenizer = Detokenizer(tokenizer)

    def add(self, token: int, source: str | None) -> Text:
        """Append a token in its source's colour, and return the text that became printable."""
        coloured = Text(self._detokenizer.feed(token), style=source_style(source))
        self.text.append_text(coloured)
        return coloured


def show_report(console: Console, report: Report, out: Path) -> None:
    """Print the tables of a measurement and write its files into `out`."""
    for part in report.printed():
        console.print(part)
    report_written(console, report.write(out))


def report_written(console: Console, paths: Sequence[Path]) -> None:
    """Print the names of written files, unwrapped."""
    console.print("Written: " + ", ".join(str(path) for path in paths), markup=False, soft_wrap=True)


def report_stopped(kept: str) -> None:
    """Print on standard error that Ctrl-C ended the command, and the results that remain."""
    print(f"draftree: stopped; {kept}.", file=sys.stderr)


@contextmanager
def resumable(out: Path) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints progress lines; on Ctrl-C print where the checkpoints are."""
    try:
        yield line_console().print
    except KeyboardInterrupt:
        report_stopped(f"its checkpoints so far are kept in {out}, and --resume goes on from the last one")
        raise


class _Bar:
    """A progress bar with `more` columns and `options` of rich; on Ctrl-C it prints `kept`."""

    def __init__(self, console: Console, kept: str, *more: progress.ProgressColumn, **options: Any) -> None:
        self._console, self._kept = console, kept
        options |= {"console": console, "disable": not console.is_terminal}
        done = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn())
        times = (progress.TimeElapsedColumn(), progress.TextColumn("elapsed,"), progress.TimeRemainingColumn())
        self._progress = progress.Progress(*done, *times, progress.TextColumn("left"), *more, **options)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._progress.stop()
        if kind is KeyboardInterrupt:
            report_stopped(self._kept)


class StageBar(_Bar, Watcher):
    """Show the stages of a measurement: a bar on a terminal; in a pipe lines with the time that is left."""

    def __init__(self, console: Console, kept: str = "nothing was written") -> None:
        # step() redraws between measurements, because a drawing thread would disturb them.
        super().__init__(console, kept, transient=True, auto_refresh=False)
        self._task: progress.TaskID | None = None
        self._drawn = 0.0

    def stage(self, name: str, total: int | None) -> None:
        if not self._console.is_terminal:
            self._console.print(f"{name} ..." if total is None else f"{name}: {total} ...")
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=total)
        self._progress.refresh()
        self._begin = self._reported = time.monotonic()

    def step(self) -> None:
        if self._task is None:
            return
        self._progress.advance(self._task)
        now = time.monotonic()
        if now - self._drawn > REFRESH:
            self._progress.refresh()
            self._drawn = now
        task = self._progress.tasks[-1]
        if not self._console.is_terminal and task.total and now - self._reported > LINES:
            self._reported = now
            left = (task.total - task.completed) * (now - self._begin) / task.completed
            self.say(f"{task.completed:.0f} of {task.total:.0f}, {left / 60:.1f} min left")

    def say(self, line: str) -> None:
        self._console.print(f"  {line}", markup=False)


class DataBar(_Bar):
    """Show how many answers are done: a bar on a terminal, a line every `LINES` seconds in a pipe."""

    def __init__(self, console: Console, kept: str) -> None:
        super().__init__(console, kept, progress.TextColumn("{task.fields[speed]} tokens/s"))
        self._begin = self._reported = time.monotonic()
        self._first: int | None = None

    def __call__(self, done: int, total: int, tokens: int) -> None:
        """See `draftree.training.answers.Progress`."""
        now = time.monotonic()
        seconds = max(now - self._begin, 1e-9)
        if self._first is None:
            self._first = done - 1
            self._task = self._progress.add_task("answering", total=total, completed=self._first, speed=0)
        self._progress.update(self._task, completed=done, speed=round(tokens / seconds))
        if not self._console.is_terminal and now - self._reported > LINES:
            self._reported = now
            left = (total - done) * seconds / (done - self._first)
            print(f"{done} of {total} answered, {tokens / seconds:.0f} tokens/s, {left:.0f} s left", flush=True)
