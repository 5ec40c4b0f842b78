"""`draftree chat`: a dialogue in the terminal, with accepted draft tokens coloured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftree.cli.decoding import Drafter, Drafting, Running, Sampling
from draftree.cli.generate import saved_trie
from draftree.cli.options import MaxNewTokens, RealModel, Where, check_file, chosen_model, grouped

if TYPE_CHECKING:
    from draftree.chat import Chat

HELP = "/stats: statistics; /plain: switch drafting off or on; /reset: new dialogue; /exit: leave."


@grouped
def chat(
    *,
    model: RealModel = None,
    where: Where,
    drafter: Drafter = None,
    trie: Annotated[Path | None, "Trie file to draft from; the answers are added to it."] = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default="none")] = None,
    max_new_tokens: MaxNewTokens = 512,
    sampling: Sampling,
    running: Running,
) -> None:
    """Talk with MODEL. The drafter and the KV cache are reused from turn to turn."""
    drafting = Drafting(drafter)
    drafting.check(trie)
    check_file(trie, "--trie")
    sampling.check()
    running.check()
    from draftree.chat import Chat  # Torch is imported after the checks, which then answer at once.

    target, tokenizer = where.load(chosen_model(model, embedded=drafting.of_embedded))
    running.prepare(target)
    made = drafting.for_engine(target, tokenizer, trie)["drafter"]
    dialogue = Chat(
        target,
        tokenizer,
        made,
        system=system,
        max_new_tokens=max_new_tokens,
        seed=sampling.seed,
        runner=running.name,
        strict=running.strict,
        **sampling.given(),
    )
    with saved_trie(trie, made, tokenizer), dialogue:
        talk(dialogue, typed())


def talk(dialogue: Chat, lines: Iterator[str]) -> None:
    """Answer each line until the input ends."""
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
            console.print("New dialogue. The drafter keeps its trie.", style="dim")
        elif command == "/plain":
            plain = not plain
            console.print("Drafting is off." if plain else "Drafting is on.", style="dim")
        elif command.startswith("/"):
            console.print(f"There is no command {command.split()[0]!r}. {HELP}", style="dim")
        elif command:
            try:
                answer(dialogue, line, console, drafting=not plain)
            except ValueError as error:  # The dialogue is longer than the context; the user can reset it.
                console.print(str(error), style="red")


def answer(dialogue: Chat, line: str, console: Any, *, drafting: bool) -> None:
    """Stream an answer; Ctrl-C stops it and keeps the text so far."""
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


def typed() -> Iterator[str]:
    """Yield input lines; on a terminal with line editing."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import readline  # noqa: F401  # It gives `input` line editing and a history.

    try:
        while True:
            try:
                line = input("> ")
            except KeyboardInterrupt:  # The user may have wanted to stop an answer that just ended.
                print("\nCtrl-D or /exit leaves.")
            else:
                yield line
    except EOFError:
        print()
