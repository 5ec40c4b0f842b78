"""One colour for each drafter, the same on a terminal, on pages and in pictures.

All are readable on white and on black, and also differ for people who confuse red and green. Tests compute both.
"""

from __future__ import annotations

import re

COLOURS = {
    "lookahead": "#3ca578",
    "lookahead/prompt": "#007887",
    "prompt-lookup": "#0096ff",
    "medusa": "#e12d96",
    "bita": "#ff0ff0",
    "hidden-transfer": "#964bb4",
    "draft-model": "#e17800",
    "bild": "#b4874b",
    "grammar": "#961eff",
    "several": "#b44b4b",  # Merged drafters that drafted the same token.
}
# Greys, for drafters without a colour, Hugging Face and plain decoding.
OTHER, THEIRS, PLAIN = "#848484", "#9aa5b1", "#5b6875"


def drafter_of(name: str) -> str | None:
    """Return the drafter in `COLOURS` that a name stands for; None for another name.

    Args:
        name: of a drafter, of a source of draft tokens ("lookahead/output"), of one of several drafters of a kind
            ("medusa-2"), or of a method of `draftree bench` ("lookahead-warm").
    """
    if "+" in name:
        return "several"
    while name and name not in COLOURS:
        name = re.sub(r"(^|[-/])[^-/]*$", "", name)  # The last part names a kind of the drafter.
    return name or None


def colour_of(name: str) -> str:
    """Return the colour, "#rrggbb", of any name that `drafter_of` knows; grey for others."""
    drafter = drafter_of(name)
    return OTHER if drafter is None else COLOURS[drafter]
