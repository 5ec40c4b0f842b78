"""Text coloured by who drafted it, and what the colours mean."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from draftree.detokenizer import Detokenizer

SOURCE_STYLES = {
    "prompt-lookup": "cyan",
    "lookahead": "green",
    "lookahead/prompt": "cyan",
    "lookahead/output": "green",
    "lookahead/both": "bold green",
    "medusa": "magenta",
    "bita": "magenta",
    "hidden-transfer": "magenta",
    "self-speculative": "magenta",
    "draft-model": "yellow",
    "bild-lossy": "yellow",
    "bild-lossless": "yellow",
    "jacobi": "yellow",
    "grammar": "blue",
}


def legend() -> Text:
    """What the colours of `ColouredText` mean."""
    return Text.assemble(
        "Colours: plain = the model's own token; ",
        ("green", SOURCE_STYLES["lookahead/output"]),
        " = accepted draft token from earlier answers; ",
        ("cyan", SOURCE_STYLES["lookahead/prompt"]),
        " = from the prompt; ",
        ("bold", SOURCE_STYLES["lookahead/both"]),
        " = from both; ",
        ("magenta", SOURCE_STYLES["medusa"]),
        " = from a drafter inside the model; ",
        ("yellow", SOURCE_STYLES["draft-model"]),
        " = from a small model, or from n-grams of the model's own; ",
        ("blue", SOURCE_STYLES["grammar"]),
        " = what a grammar leaves no choice about.",
    )


def source_style(source: str | None) -> str:
    """A source's colour; bold where several merged drafters drafted it."""
    if source is None:
        return ""
    if "+" in source:
        return SOURCE_STYLES["lookahead/both"]
    return SOURCE_STYLES.get(source, "")


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

    def rest(self) -> str:
        """What is left at the end, an incomplete character for one."""
        return self._detokenizer.rest()
