"""Web pages that are one file each, and one colour for each drafter.

A page has a template, and the style and script that all pages share. A drafter's colour is the same on a terminal, on
pages and in pictures. All colours are about equally far from white and from black, so that they can be read on both;
and they differ in more than red and green, so that people who confuse these see different ones as well. A test computes
both.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files

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
    "mtp": "#4b6900",
    "eagle-3": "#9687c3",
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


SHARED = "draftree.pages"


def fill(package: str, *scripts: str, **places: str) -> str:
    """Return the page of a package, from its page.html, page.css and page.js.

    The places {{style}} and {{script}} get the shared style and script followed by the page's own; between the scripts
    the drafters' colours are handed over.

    Args:
        package: its name.
        *scripts: further scripts of the package, before page.js.
        **places: what stands in the template's other places, already safe as markup.
    """
    style = _text(SHARED, "shared.css") + _text(package, "page.css")
    colours = f"Object.assign(Draw.colours, {json.dumps(COLOURS | {'other': OTHER})});\n"
    script = _text(SHARED, "draw.js") + colours + "".join(_text(package, name) for name in (*scripts, "page.js"))
    filled = {"style": style, "script": script} | places
    # In one pass: what is filled in may look like a place for something else.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: filled[place[1]], _text(package, "page.html"))


def _text(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")
