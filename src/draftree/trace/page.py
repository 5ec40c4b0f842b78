"""One page of a trace: text coloured by source, every step's tree, times and counts, all in a single file.

The page asks nothing of any network: style, script and the trace itself are in it, and a policy in its head forbids the
rest. Texts reach it as data only, never as markup.
"""

from __future__ import annotations

import html
import json
from dataclasses import asdict
from pathlib import Path

from draftree.files import write_text
from draftree.pages import fill
from draftree.trace.file import Trace
from draftree.trace.labels import names_of

# What could end the data's element, or begin another one, is written as JSON's own escapes.
ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def write_trace_page(trace: Trace, path: str | Path, title: str = "draftree trace") -> Path:
    """Write `trace` (from `read_trace`) as one self-contained HTML page of that title; returns the path."""
    held = asdict(trace) | {"names": names_of(trace)}
    data = json.dumps(held, separators=(",", ":"), allow_nan=False).translate(ESCAPES)
    page = fill("draftree.trace", title=html.escape(title), data=data)
    write_text(path, page)
    return Path(path)
