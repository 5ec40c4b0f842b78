"""Text coloured by who drafted it, and what the colours mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.text import Text

from draftree.colours import COLOURS, colour_of, drafter_of
from draftree.detokenizer import Detokenizer

BOLD = ("lookahead/both",)  # besides what several merged drafters drafted


def legend(sources: Iterable[str] | None = None) -> Text:
    """What the colours of `ColouredText` mean: of those that drafted what was accepted, or of all."""
    shown = (*COLOURS, *BOLD, "another drafter") if sources is None else sorted(sources)
    if not shown:
        return Text("Colours: all tokens are the model's own; no draft token was accepted.")
    text = Text("Colours: plain = the model's own token; accepted draft tokens by drafter: ")
    return text.append_text(Text(", ").join(Text(name, style=source_style(name)) for name in shown)).append(".")


def source_style(source: str | None) -> str:
    """A source's colour; bold where prompt and answers, or several merged drafters, have drafted the token."""
    if source is None:
        return ""
    bold = source in BOLD or drafter_of(source) == "several"
    return f"bold {colour_of(source)}" if bold else colour_of(source)


class ColouredText:
    """Grows a rich Text token by token; bytes of unfinished characters wait for the rest of theirs."""

    def __init__(self, tokenizer: Any) -> None:
        self.text = Text()
        self._detokenizer = Detokenizer(tokenizer)

    def add(self, token: int, source: str | None) -> Text:
        """Append a token in its source's colour; returns the piece of text that became printable."""
        coloured = Text(self._detokenizer.feed(token), style=source_style(source))
        self.text.append_text(coloured)
        return coloured
