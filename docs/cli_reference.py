"""Write docs/cli.md from the declarations of the commands: `python docs/cli_reference.py`, or `make docs`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import typer

from draftree.cli import app

PAGE = Path(__file__).parent / "cli.md"
INTRODUCTION = PAGE.with_name("_cli_introduction.md")
SHARED = 3  # Verbs with the same option from which on it is listed once.
KINDS = {"str": "TEXT", "int": "INTEGER", "float": "NUMBER", "Path": "PATH"}

Block = type[typing.Any]


def verbs(group: typing.Any, path: str = "draftree") -> Iterator[tuple[str, typing.Any]]:
    """Yield (name, command) of each verb, in the order of `--help`."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def code(text: str) -> str:
    """Return `text` with option names as code."""
    return re.sub(r"(?<![\w`-])--[a-z][\w-]*", r"`\g<0>`", text)


def line(option: typing.Any, declared: inspect.Parameter) -> str:
    """Return the line of an option; `declared` is the argument of the verb's function."""
    annotation, info = typing.get_args(declared.annotation)
    flags = [*option.opts, *option.secondary_opts]
    kind = next(shown for name, shown in (KINDS | {"bool": ""}).items() if name in str(annotation))
    default = declared.default
    said = info.show_default if isinstance(info.show_default, str) else ""
    required = default is inspect.Parameter.empty
    if not flags[0].startswith("-"):
        flags, kind = [option.metavar or option.name.upper()], ""
    elif kind and not required and default is not None and not said:
        kind = str(default)
    elif isinstance(default, bool) and len(flags) > 1:
        said = f"{flags[not default]}"
    names = ", ".join(f"`{flag} {kind}`".replace(" `", "`") for flag in flags)
    more = " Required." if required and option.opts[0].startswith("-") else f" Default: {code(said)}." if said else ""
    return f"- {names}: {code(info.help)}{more}"


def blocks_of(command: typing.Any) -> list[Block]:
    """Return the classes whose fields are options of a verb, each before those that inherit from it."""
    parameters = inspect.signature(inspect.unwrap(command.callback), eval_str=True).parameters
    kinds = [parameter.annotation for parameter in parameters.values()]
    found = [one for kind in kinds if dataclasses.is_dataclass(kind) for one in reversed(kind.__mro__)]
    return [one for one in found if one is not object]


def title(block: Block) -> str:
    """Return the heading of a class's options."""
    return re.sub("([A-Z])", r" \1", block.__name__).strip().capitalize()


def page() -> str:
    """Return the text of the page. Options of several verbs are listed once, at the end."""
    found = list(verbs(typer.main.get_command(app)))
    uses = Counter(block for _, command in found for block in dict.fromkeys(blocks_of(command)))
    several = [block for block in uses if uses[block] > 1]
    lines_of: dict[str, dict[str, str]] = {}
    for name, command in found:
        declared = inspect.signature(command.callback, eval_str=True).parameters
        lines_of[name] = {o.name: line(o, declared[o.name]) for o in command.params if o.name != "first"}
    counts = Counter(one for lines in lines_of.values() for one in lines.values())
    homes: dict[str, set[str]] = {}  # The blocks of each line.
    for name, command in found:
        blocks = {field: title(block) for block in blocks_of(command) for field in inspect.get_annotations(block)}
        for option, one in lines_of[name].items():
            homes.setdefault(one, set()).add(blocks.get(option, "Others"))
    sections: dict[str, list[str]] = {title(block): [] for block in several} | {"Others": []}
    text = [INTRODUCTION.read_text(encoding="utf-8").rstrip()]
    for name, command in found:
        arguments = ""
        for given in (option for option in command.params if not option.opts[0].startswith("-")):
            shown = (given.metavar or given.name.upper()) + "..." * (given.nargs == -1)
            arguments += f" {shown}" if given.required else f" [{shown}]"
        text += ["", f"## `{name}`", "", code(command.help), "", "```text", f"{name} [OPTIONS]{arguments}", "```", ""]
        also: list[str] = []
        for one in lines_of[name].values():
            where = next(iter(homes[one])) if len(homes[one]) == 1 else "Others"
            alike = [known for known in sections.get(where, ()) if known.split(":")[0] == one.split(":")[0]]
            if where not in sections or (where == "Others" and counts[one] < SHARED) or alike not in ([], [one]):
                text.append(one)
                continue
            sections[where] += [] if alike else [one]
            shown = f"[{where}](#{where.lower().replace(' ', '-')})"
            also += [] if shown in also else [shown]
        text += [f"- Also: {', '.join(also)}."] if also else []
    text += ["", "## Options of several verbs"]
    for heading, lines in sections.items():
        text += ["", f"### {heading}", "", *lines] if lines else []
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
