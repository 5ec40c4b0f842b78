"""`draftree trace`: record a run step by step, and show a recorded run as text or as a page.

The text is coloured by drafter; below it are the steps and their trees.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from draftree.cli.decoding import Asking, Constraint, Drafting, Running, ask, checked, opened, read_prompt
from draftree.cli.options import MaxNewTokens, Model, Where, check_file, grouped
from draftree.cli.screen import legend, report_written, source_style, wide_console


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
    from draftree.trace.file import read_trace, write_trace_page

    if not replay.is_file():
        raise ValueError(f"There is no recorded run {str(replay)!r}: make one with draftree trace PROMPT.")
    recorded, console = read_trace(replay), wide_console()
    if html is None or steps:
        show(recorded, console, steps)
    if html is not None:
        write_trace_page(recorded, html, f"draftree trace: {replay.name}")
        report_written(console, [html])


if TYPE_CHECKING:
    from draftree.trace.file import Trace

KEY = "Trees: ✓ accepted, ✕ pruned inside the pass, others rejected; numbers are path probabilities."


def outline(trace: Trace, console: Console) -> None:
    """Print the text, coloured by drafter, and the statistics."""
    for request, name in trace.names().items():
        if len(trace.requests) > 1:
            console.print(Text(f"Request {name}", style="bold"))
        console.print(_text(trace, request), soft_wrap=True)
    stats = trace.statistics()
    console.print(legend(stats.total.accepted_by_source))
    stats.summary()


def show(trace: Trace, console: Console, numbers: list[int]) -> None:
    """Print the outline and the trees of the steps `numbers` (from 1, of each request); of all steps for [].

    Raises:
        ValueError: there is no such step.
    """
    longest = max(sum(1 for _ in trace.of(request)) for request in trace.requests)
    for number in numbers:
        if number > longest:
            raise ValueError(f"There is no step {number}: the longest request of this run has {longest}.")
    outline(trace, console)
    console.print(KEY)
    for number, request in enumerate(trace.requests, 1):
        name = f"Request {number}, step" if len(trace.requests) > 1 else "Step"
        for i, (step, member) in enumerate(trace.of(request), 1):
            if not numbers or i in numbers:
                console.print()
                console.print(_heading(f"{name} {i}", step, member))
                console.print(_tree(trace, step, member), soft_wrap=True)
                console.print(_emitted(trace, step, member), soft_wrap=True)


def _text(trace: Trace, request: int) -> Text:
    about = trace.requests[request]
    text = Text()
    pieces = iter(about["pieces"])
    for step, member in trace.of(request):
        for source in _sources(trace, step, member):
            text.append(next(pieces), style=source_style(source))
    return text.append(f" [{about['finish_reason']}]", style="dim")


def _sources(trace: Trace, step: dict[str, Any], member: dict[str, Any]) -> list[str | None]:
    """Return the source of each emitted token; None for the model itself."""
    names = trace.runs[step["run"]]["sources"]
    return [None if node is None else names[member["sources"][node]] for node in member["accepted"]]


def _heading(name: str, step: dict[str, Any], member: dict[str, Any]) -> Text:
    accepted = sum(node is not None for node in member["accepted"])
    facts = [] if member["budget"] is None else [f"budget {member['budget']}", f"{member['drafted']} drafted"]
    facts.append(f"{len(member['tokens']) - 1} verified")
    if member["pruned"]:
        facts.append(f"{len(member['pruned'])} pruned")
    facts.append(f"{accepted} accepted")
    shape = step["shape_seconds"]
    times = {"draft": step["seconds"]["draft"] - shape, "shape": shape}
    times |= {stage: seconds for stage, seconds in step["seconds"].items() if stage != "draft"}
    spent = ", ".join(f"{stage} {1000 * seconds:.2f}" for stage, seconds in times.items())
    batch = f"; batch of {len(step['members'])}" if len(step["members"]) > 1 else ""
    return Text.assemble((name, "bold"), f": {', '.join(facts)}{batch}. Milliseconds: {spent}")


def _tree(trace: Trace, step: dict[str, Any], member: dict[str, Any]) -> Tree:
    names = trace.runs[step["run"]]["sources"]
    parents, logp, sources = member["parents"], member["logp"], member["sources"]
    accepted, pruned = set(member["accepted"]), set(member["pruned"])

    def styled(node: int) -> Text:
        label = _visible(trace, member["tokens"][node]) or "∅"
        if node == 0:
            return Text(label, style="bold")
        source = names[sources[node]]
        mark = "✓ " if node in accepted else "✕ " if node in pruned else ""
        chance = "" if logp[node] is None else f"  {math.exp(min(logp[node], 0)):.2f}"
        weight = "bold" if node in accepted else "dim strike" if node in pruned else ""
        return Text.assemble(mark, (label, f"{source_style(source)} {weight}".strip()), (f"{chance}  {source}", "dim"))

    branches = [Tree(styled(node)) for node in range(len(parents))]
    chances = [-math.inf if chance is None else chance for chance in logp]
    for node in sorted(range(1, len(parents)), key=lambda i: (-chances[i], i)):  # The most probable child is first.
        branches[parents[node]].children.append(branches[node])
    return branches[0]


def _visible(trace: Trace, token: int) -> str:
    """Return the text of a token with visible spaces and line breaks."""
    return repr(trace.tokens[token])[1:-1].replace(" ", "␣")


def _emitted(trace: Trace, step: dict[str, Any], member: dict[str, Any]) -> Text:
    text = Text("emitted:")
    for token, source in zip(member["emitted"], _sources(trace, step, member), strict=True):
        text.append(" ").append(_visible(trace, token), style=source_style(source))
    return text
