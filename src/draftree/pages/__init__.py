"""Web pages that are one file each: the template of a page, with the style and script that all pages share."""

from __future__ import annotations

import json
import re
from importlib.resources import files

from draftree.colours import COLOURS, OTHER

SHARED = "draftree.pages"


def fill(package: str, **places: str) -> str:
    """Return the page of a package, from its page.html, page.css and page.js.

    The places {{style}} and {{script}} get the shared style and script followed by the page's own; between the scripts
    the drafters' colours are handed over.

    Args:
        package: its name.
        **places: what stands in the template's other places, already safe as markup.
    """
    style = _text(SHARED, "shared.css") + _text(package, "page.css")
    colours = f"Object.assign(Draw.colours, {json.dumps(COLOURS | {'other': OTHER})});\n"
    script = _text(SHARED, "draw.js") + colours + _text(package, "page.js")
    filled = {"style": style, "script": script} | places
    # In one pass: what is filled in may look like a place for something else.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: filled[place[1]], _text(package, "page.html"))


def _text(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")
