"""`draftree trace`: record a run step by step, and show a recorded run as text or as a page.

The text is coloured by drafter; the page has each step's tree.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from draftree.cli.decoding import Asking, Constraint, Drafting, Running, ask, checked, opened, read_prompt
from draftree.cli.options import MaxNewTokens, Model, Where, check_file, grouped, is_model, the_model
from draftree.cli.screen import legend, report_written, source_style, wide_console

if TYPE_CHECKING:
    from draftree.trace.file import Trace


@grouped
def trace(
    *,
    context: typer.Context,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] PROMPTS",
            help="Prompts, answered together; '-' reads one from standard input. The first of several may be the "
            "model: a folder, a GGUF file or owner/name.",
        ),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Show this recorded run instead of recording one.", show_default=False)
    ] = None,
    out: Annotated[Path, "File for the record."] = Path("trace.jsonl"),
    html: Annotated[
        Path | None, typer.Option(help="Also write the run as a self-contained HTML page.", show_default=False)
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
        if not replay.is_file():
            raise ValueError(f"There is no recorded run {str(replay)!r}: make one with draftree trace PROMPT.")
        from draftree.trace.file import read_trace  # Torch is imported after the check, which then answers at once.

        show(read_trace(replay), html, [])
        return
    prompts = prompts or []
    first = prompts.pop(0) if len(prompts) > 1 and is_model(prompts[0]) else None
    model = the_model(first, model)
    check_file(out, "--out", **inputs, html=html)
    grammar, drafting = checked(constraint, drafting, trie, asking, running, where, nodes=nodes)
    if not prompts:
        raise ValueError("Give a prompt, or --replay and a recorded run.")
    texts = [read_prompt(prompt) for prompt in prompts]
    if trie is not None and not trie.is_file():
        raise ValueError(f"There is no trie {trie}: make one by draftree generate --trie, or leave it out.")

    from draftree.engine.recorder import Recorder
    from draftree.shaping import Fixed
    from draftree.trace.file import read_trace, write_trace

    recorder, shape = Recorder(), None if nodes is None else Fixed(nodes)
    slots = min(slots or len(texts), len(texts))
    engine, tokenizer = opened(model, where, drafting, trie, running, shape=shape, slots=slots, recorder=recorder)
    requests = [ask(engine, tokenizer, text, asking, max_new_tokens, grammar, b) for b, text in enumerate(texts)]
    engine.run()
    for request in requests:
        if request.error is not None:
            raise request.error
    show(read_trace(write_trace(recorder, out, tokenizer)), html, [out])


def _refuse_recording(context: typer.Context) -> None:
    """Raise a ValueError if options of a recording stand next to --replay."""
    for name in context.params:
        given = context.get_parameter_source(name)
        if name not in ("replay", "html") and given is not None and given.name == "COMMANDLINE":
            called = "the prompt" if name == "prompts" else f"--{name.replace('_', '-')}"
            raise ValueError(f"--replay shows a recorded run: leave out {called} or --replay.")


def show(trace: Trace, html: Path | None, written: list[Path]) -> None:
    """Print a run's text, coloured by drafter, and its statistics; write the trees of its steps to a page `html`."""
    console = wide_console()
    for request, name in trace.names().items():
        if len(trace.requests) > 1:
            console.print(Text(f"Request {name}", style="bold"))
        console.print(_text(trace, request), soft_wrap=True)
    stats = trace.statistics()
    console.print(legend(stats.total.accepted_by_source))
    stats.summary()
    if html is not None:
        from draftree.trace.file import write_trace_page

        written = [*written, write_trace_page(trace, html, f"draftree trace: {html.stem}")]
    if written:
        report_written(console, written)


def _text(trace: Trace, request: int) -> Text:
    about = trace.requests[request]
    text = Text()
    pieces = iter(about["pieces"])
    for step, member in trace.of(request):
        names = trace.runs[step["run"]]["sources"]
        for node in member["accepted"]:  # None for a token of the model's own.
            source = None if node is None else names[member["sources"][node]]
            text.append(next(pieces), style=source_style(source))
    return text.append(f" [{about['finish_reason']}]", style="dim")
