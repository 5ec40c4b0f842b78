"""Print a recorded run to the terminal: its text coloured by drafter, its steps and their trees."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from draftree.cli.screen import legend, source_style
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
