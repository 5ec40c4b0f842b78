"""One page of a trace: text coloured by source, every step's tree, times and counts, all in a single file.

The page asks nothing of any network: style, script and the trace itself are in it, and a policy in its head forbids the
rest. Texts reach it as data only, never as markup.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

from draftree.files import write_text
from draftree.trace.file import Trace

# What could end the data's element, or begin another one, is written as JSON's own escapes.
ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def write_trace_page(trace: Trace, path: str | Path, title: str = "draftree trace") -> Path:
    """Write `trace` (from `read_trace`) as one self-contained HTML page; returns the path.

    Args:
        trace: what to show.
        path: of the page, by custom named .html.
        title: of the page.
    """
    assets = files("draftree.trace")
    parts = {name: assets.joinpath(f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}
    data = json.dumps(asdict(trace), separators=(",", ":"), allow_nan=False).translate(ESCAPES)
    filled = {"title": html.escape(title), "style": parts["css"], "script": parts["js"], "data": data}
    # In one pass: what is filled in may look like a place for something else.
    page = re.sub(r"\{\{(\w+)\}\}", lambda place: filled[place[1]], parts["html"])
    write_text(path, page)
    return Path(path)
