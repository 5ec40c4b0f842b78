"""`draftree chat`: a dialogue in the terminal, with accepted draft tokens in colour."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftree.cli.decoding import Choosing, Drafter, Drafting, Running
from draftree.cli.generate import kept
from draftree.cli.options import MaxNewTokens, RealModel, check_file, grouped
from draftree.cli.where import Where, chosen_model

if TYPE_CHECKING:
    from draftree.chat import Chat

HELP = "/stats: how drafting goes; /plain: drafting off and on again; /reset: forget the dialogue; /exit: leave."
LINES = 1000  # of what was typed, kept for the arrow keys


@grouped
def chat(
    *,
    model: RealModel = None,
    where: Where,
    drafter: Drafter = None,
    trie: Annotated[Path | None, "Saved trie to draft from; what it learns is added to it."] = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default="none")] = None,
    max_new_tokens: MaxNewTokens = 512,
    choosing: Choosing,
    running: Running,
    history: Annotated[
        Path | None,
        typer.Option(help="File of the lines that were typed, for the arrow keys.", show_default="draftree's own"),
    ] = None,
) -> None:
    """Talk with MODEL; the drafter and what the model has read live on from turn to turn."""
    drafting = Drafting(drafter)
    drafting.check(trie)
    check_file(trie, "--trie", history=history)
    choosing.check()
    running.check()
    from draftree.chat import Chat  # torch takes seconds, and a refusal none

    target, tokenizer = where.load(chosen_model(model, embedded=drafting.of_embedded))
    running.prepare(target)
    made = drafting.for_engine(target, tokenizer, trie)["drafter"]
    dialogue = Chat(
        target,
        tokenizer,
        made,
        system=system,
        max_new_tokens=max_new_tokens,
        seed=choosing.seed,
        runner=running.name,
        strict=running.strict,
        **choosing.given(),
    )
    with kept(trie, made, tokenizer), dialogue:
        talk(dialogue, typed(history or Path(typer.get_app_dir("draftree")) / "history"))


def talk(dialogue: Chat, lines: Iterator[str]) -> None:
    """Answer line after line, until there are no more."""
    from draftree.cli.screen import line_console

    console, plain = line_console(), False
    console.print(HELP, style="dim")
    for line in lines:
        command = line.strip()
        if command == "/exit":
            return
        if command == "/stats":
            dialogue.stats().summary()
        elif command == "/reset":
            dialogue.reset()
            console.print("The dialogue begins anew; the drafter keeps what it has learned.", style="dim")
        elif command == "/plain":
            plain = not plain
            console.print("Drafting is off." if plain else "Drafting is on.", style="dim")
        elif command.startswith("/"):
            console.print(f"There is no command {command.split()[0]!r}. {HELP}", style="dim")
        elif command:
            try:
                answer(dialogue, line, console, drafting=not plain)
            except ValueError as error:  # a dialogue that fills the context: it can be reset
                console.print(str(error), style="red")


def answer(dialogue: Chat, line: str, console: Any, *, drafting: bool) -> None:
    """Print an answer as it comes; Ctrl-C ends it, and what has come stays."""
    from draftree.cli.screen import print_answer, source_style
    from draftree.detokenizer import Detokenizer

    text, stream = Detokenizer(dialogue.tokenizer), dialogue.stream(line, drafting=drafting)
    try:
        for emitted in stream:
            print_answer(console, text.feed(emitted.token), source_style(emitted.source))
        print_answer(console, text.rest())
    except KeyboardInterrupt:
        console.print(" ...", style="dim", end="")
    finally:
        stream.close()
        console.print()


def typed(history: Path) -> Iterator[str]:
    """What is typed, line by line, with arrow keys where there is a terminal; ends with the input."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import readline  # `input` uses it from then on

    with suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(LINES)
    try:
        while True:
            try:
                line = input("> ")
            except KeyboardInterrupt:  # meant for an answer that had just ended, perhaps
                print("\nCtrl-D or /exit leaves.")
            else:
                yield line
    except EOFError:
        print()
    finally:
        with suppress(OSError):  # a chat without a history is a chat
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)
