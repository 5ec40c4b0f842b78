"""Options of verbs that answer prompts: what an answer may say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from draftree.grammar import Grammar


@dataclass(frozen=True)
class Constraint:
    """What an answer may say; at most one of these."""

    json_schema: Annotated[
        Path | None, typer.Option(help="Answer in JSON that fits the schema in this file.", show_default=False)
    ] = None
    regex: Annotated[
        str | None, typer.Option(help="Answer with a text that this regular expression matches.", show_default=False)
    ] = None
    ebnf: Annotated[
        Path | None,
        typer.Option(help="Answer by the grammar in this file, written as GBNF or Lark.", show_default=False),
    ] = None
    choice: Annotated[
        list[str] | None, typer.Option(help="Answer with this text; given again, with one of several.")
    ] = None

    @property
    def given(self) -> list[str]:
        """The options that were given."""
        names = ("json_schema", "regex", "ebnf", "choice")
        return [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) not in (None, [])]

    def grammar(self) -> Grammar | None:
        """The grammar, None where anything may be said; a ValueError for two of them, or one that cannot be read."""
        if len(self.given) > 1:
            raise ValueError(f"{self.given[0]} and {self.given[1]} both say what to answer: give one of them.")
        if not self.given:
            return None
        from draftree.grammar import Grammar

        if self.json_schema is not None:
            return Grammar.json_schema(_text(self.json_schema, "--json-schema"))
        if self.regex is not None:
            return Grammar.regex(self.regex)
        if self.ebnf is not None:
            return Grammar.ebnf(_text(self.ebnf, "--ebnf"))
        return Grammar.choice(self.choice or [])


def _text(file: Path, option: str) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8 text"
        raise ValueError(f"{option} is {str(file)!r}, which cannot be read ({reason}): give another file.") from None
