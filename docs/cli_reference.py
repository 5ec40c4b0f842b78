"""Writes docs/cli.md from the commands themselves: `python docs/cli_reference.py`, or `make docs`.

What a verb and its options mean is told once, in the code that declares them. This reads the declarations rather than
the text that `--help` prints, so that the page depends on no terminal and on no version of what draws it.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import typer

from draftree.cli import app

PAGE = Path(__file__).parent / "cli.md"
INTRODUCTION = PAGE.with_name("_cli_introduction.md")
KINDS = {str: "text", int: "integer", float: "number", Path: "path", bool: "flag"}


def verbs(group: typing.Any, path: str = "draftree") -> Iterator[tuple[str, typing.Any]]:
    """(name, command) of every verb, in the order of `--help`."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def code(text: str) -> str:
    """Names of options as code, and safe in a table."""
    return re.sub(r"(?<![\w-])--[a-z][\w-]*", r"`\g<0>`", text).replace("|", "\\|")


def kind_of(annotation: typing.Any, info: typing.Any) -> str:
    """What an option takes, within which limits and whether it may be given several times."""
    inner = annotation
    while typing.get_origin(inner) in (types.UnionType, typing.Union, list):
        inner = next(part for part in typing.get_args(inner) if part is not type(None))
    kind = KINDS[inner]
    if info.min is not None:
        kind += f", {info.min} or more" if info.max is None else f", {info.min} to {info.max}"
    return kind + (", repeated" if "list[" in str(annotation) else "")


def row(option: typing.Any, declared: inspect.Parameter) -> tuple[str, str, str, str]:
    """Its flags, meaning, default and type; a narrow page shows the first columns.

    `declared` is the argument of the verb's function.
    """
    annotation, info = typing.get_args(declared.annotation)
    flags = [*option.opts, *option.secondary_opts] if option.opts[0].startswith("-") else [option.name.upper()]
    default = info.show_default if isinstance(info.show_default, str) else declared.default
    if default is inspect.Parameter.empty:
        default = "required"
    elif isinstance(default, bool):
        default = flags[not default].lstrip("-") if len(flags) > 1 else "off"
    shown = "none" if default is None else str(default)
    return ", ".join(f"`{flag}`" for flag in flags), code(info.help), shown, kind_of(annotation, info)


def page() -> str:
    """The page's text."""
    lines = [INTRODUCTION.read_text(encoding="utf-8").rstrip()]
    for name, command in verbs(typer.main.get_command(app)):
        declared = inspect.signature(command.callback, eval_str=True).parameters
        rows = [row(option, declared[option.name]) for option in command.params]
        arguments = ""
        for given in (option for option in command.params if not option.opts[0].startswith("-")):
            shown = given.name.upper() + "..." * (given.nargs == -1)
            arguments += f" {shown}" if given.required else f" [{shown}]"
        lines += ["", f"## `{name}`", "", code(command.help), "", "```text", f"{name} [OPTIONS]{arguments}", "```", ""]
        lines += ["| option | meaning | default | type |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
