"""`draftree trace`: record a run step by step, and show a recorded run as text or as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.decoding import Asking, Constraint, Drafting, Running, ask, checked, opened, read_prompt
from draftree.cli.options import MaxNewTokens, Model, check_file, grouped
from draftree.cli.where import Where


@grouped
def trace(
    *,
    context: typer.Context,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Prompts, answered together; '-' reads one from standard input."),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Show this recorded run instead of recording one.", show_default=False)
    ] = None,
    out: Annotated[Path, "File for the record."] = Path("trace.jsonl"),
    html: Annotated[
        Path | None, typer.Option(help="Also write the run as a self-contained HTML page.", show_default=False)
    ] = None,
    step: Annotated[
        list[int] | None,
        typer.Option(min=1, help="With --replay: draw the tree of this step; may be repeated.", show_default="all"),
    ] = None,
    model: Model = None,
    where: Where,
    drafting: Drafting,
    trie: Annotated[Path | None, "Trie file to draft from; it is not changed."] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Draft tokens verified in each step.", show_default="sized by cost"),
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Requests decoded together.", show_default="all of them")
    ] = None,
    max_new_tokens: MaxNewTokens = 128,
    constraint: Constraint,
    asking: Asking,
    running: Running,
) -> None:
    """Record each step of answering PROMPTS: its tree, pruned, accepted and emitted tokens, and times."""
    inputs = {"replay": replay, "trie": trie, "json_schema": constraint.json_schema, "ebnf": constraint.ebnf}
    check_file(html, "--html", **inputs)
    if replay is not None:
        _refuse_recording(context)
        show_recorded(replay, html, step or [])
        return
    check_file(out, "--out", **inputs, html=html)
    grammar, drafting = checked(constraint, drafting, trie, asking, running, where, nodes=nodes)
    if not prompts:
        raise ValueError("Give a prompt, or --replay and a recorded run.")
    if step:
        raise ValueError("--step has no effect without --replay: add --replay, or leave it out.")
    texts = [read_prompt(prompt) for prompt in prompts]
    if trie is not None and not trie.is_file():
        raise ValueError(f"There is no trie {trie}: make one by draftree generate --trie, or leave it out.")

    from draftree.cli.screen import report_written, wide_console
    from draftree.cli.trace_view import outline
    from draftree.engine.recorder import Recorder
    from draftree.shaping import Fixed
    from draftree.trace.file import read_trace, write_trace, write_trace_page

    recorder, console, shape = Recorder(), wide_console(), None if nodes is None else Fixed(nodes)
    slots = min(slots or len(texts), len(texts))
    engine, tokenizer = opened(model, where, drafting, trie, running, shape=shape, slots=slots, recorder=recorder)
    requests = [ask(engine, tokenizer, text, asking, max_new_tokens, grammar, b) for b, text in enumerate(texts)]
    engine.run()
    for request in requests:
        if request.error is not None:
            raise request.error
    recorded = read_trace(write_trace(recorder, out, tokenizer))
    outline(recorded, console)
    written = [out]
    if html is not None:
        written.append(write_trace_page(recorded, html, f"draftree trace: {out.name}"))
    report_written(console, written)


def _refuse_recording(context: typer.Context) -> None:
    """Raise a ValueError if options of a recording stand next to --replay."""
    for name in context.params:
        given = context.get_parameter_source(name)
        if name not in ("replay", "html", "step") and given is not None and given.name == "COMMANDLINE":
            called = "the prompt" if name == "prompts" else f"--{name.replace('_', '-')}"
            raise ValueError(f"--replay shows a recorded run: leave out {called} or --replay.")


def show_recorded(replay: Path, html: Path | None, steps: list[int]) -> None:
    """Show a recorded run on the terminal, or write it to the page `html`; with `steps` do both.

    Raises:
        ValueError: there is no such run, or no such step in it.
    """
    from draftree.cli.screen import report_written, wide_console
    from draftree.cli.trace_view import show
    from draftree.trace.file import read_trace, write_trace_page

    if not replay.is_file():
        raise ValueError(f"There is no recorded run {str(replay)!r}: make one with draftree trace PROMPT.")
    recorded, console = read_trace(replay), wide_console()
    if html is None or steps:
        show(recorded, console, steps)
    if html is not None:
        write_trace_page(recorded, html, f"draftree trace: {replay.name}")
        report_written(console, [html])
