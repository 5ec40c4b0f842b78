"""Write docs/cli.md from the declarations of the commands: `python docs/cli_reference.py`, or `make docs`."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import typer

from draftree.cli import app

PAGE = Path(__file__).parent / "cli.md"
INTRODUCTION = PAGE.with_name("_cli_introduction.md")
SHARED = 3  # Verbs with the same option from which on it is listed once.
KINDS = {str: "text", int: "integer", float: "number", Path: "path", bool: "flag"}


def verbs(group: typing.Any, path: str = "draftree") -> Iterator[tuple[str, typing.Any]]:
    """Yield (name, command) of each verb, in the order of `--help`."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def code(text: str) -> str:
    """Return `text` with option names as code, escaped for a table."""
    return re.sub(r"(?<![\w-])--[a-z][\w-]*", r"`\g<0>`", text).replace("|", "\\|")


def kind_of(annotation: typing.Any, info: typing.Any) -> str:
    """Return the type of an option's value, its range and whether it may be repeated."""
    inner = annotation
    while typing.get_origin(inner) in (types.UnionType, typing.Union, list):
        inner = next(part for part in typing.get_args(inner) if part is not type(None))
    kind = KINDS[inner]
    if info.min is not None:
        kind += f", {info.min} or more" if info.max is None else f", {info.min} to {info.max}"
    return kind + (", repeated" if "list[" in str(annotation) else "")


def row(option: typing.Any, declared: inspect.Parameter) -> tuple[str, str, str, str]:
    """Return flags, meaning, default and type of an option; `declared` is the argument of the verb's function."""
    annotation, info = typing.get_args(declared.annotation)
    flags = [*option.opts, *option.secondary_opts]
    if not flags[0].startswith("-"):
        flags = [option.metavar or option.name.upper()]
    default = info.show_default if isinstance(info.show_default, str) else declared.default
    if default is inspect.Parameter.empty:
        default = "required"
    elif isinstance(default, bool):
        default = flags[not default].lstrip("-") if len(flags) > 1 else "off"
    shown = "none" if default is None else str(default)
    return ", ".join(f"`{flag}`" for flag in flags), code(info.help), shown, kind_of(annotation, info)


def table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the lines of a Markdown table of options."""
    return ["| option | meaning | default | type |", "|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]


def page() -> str:
    """Return the text of the page. Options shared by several verbs are listed once, at the end."""
    found = list(verbs(typer.main.get_command(app)))
    rows: dict[str, list[tuple[str, ...]]] = {}
    for name, command in found:
        declared = inspect.signature(command.callback, eval_str=True).parameters
        rows[name] = [row(option, declared[option.name]) for option in command.params]
    counts = Counter(one for verb in rows.values() for one in verb)
    shared = [one for one, count in counts.items() if count >= SHARED]
    shared = [one for one in shared if one == max((o for o in shared if o[0] == one[0]), key=counts.__getitem__)]
    lines = [INTRODUCTION.read_text(encoding="utf-8").rstrip()]
    for name, command in found:
        arguments = ""
        for given in (option for option in command.params if not option.opts[0].startswith("-")):
            shown = (given.metavar or given.name.upper()) + "..." * (given.nargs == -1)
            arguments += f" {shown}" if given.required else f" [{shown}]"
        lines += ["", f"## `{name}`", "", code(command.help), "", "```text", f"{name} [OPTIONS]{arguments}", "```", ""]
        lines += table(one for one in rows[name] if one not in shared)
        common = ", ".join(one[0] for one in rows[name] if one in shared)
        lines += ["", f"[Shared options](#shared-options): {common}."] if common else []
    lines += ["", "## Shared options", "", *table(shared)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
