"""Bars of a results table as a small SVG file, which a telephone, a screen and a dark page can show.

The picture has a ground of its own, so that it can be read on any page; its colours follow the reader's preference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDE, EDGE = 440, 12  # Pixels: of the picture, and of its margin. On a telephone it is shown at five sixths.
SERIES = ("#3ca578", "#0096ff", "#e17800", "#964bb4", "#848484")
STYLE = """svg{background:#fff}text{font:12.5px system-ui,sans-serif;fill:#1c2024}.h{font-size:13.5px;font-weight:600}
.s,.v{fill:#60666d;font-size:12px}.v{text-anchor:end}.g{fill:#fff}.p{fill:#5b6875}.t{fill:#9aa5b1}
.w{stroke:#1c2024;stroke-width:1.2}.m{stroke:#60666d;stroke-dasharray:2 2}@media(prefers-color-scheme:dark){
svg{background:#1c2024}text{fill:#e6e8ea}.s,.v{fill:#9aa2aa}.g{fill:#1c2024}.p{fill:#93a0ad}.t{fill:#5f6b77}
.w{stroke:#e6e8ea}.m{stroke:#9aa2aa}}""".replace("\n", "")


class Bar(NamedTuple):
    """One value with its interval; `colour` is "#rrggbb" or a class of the style: "p", plain decoding; "t", others."""

    name: str
    value: float
    low: float | None
    high: float | None
    colour: str
    text: str


def chart(title: str, rows: Sequence[tuple[str, Sequence[Bar]]], mark: float | None = None) -> str:
    """Return the SVG text of horizontal bars.

    Args:
        title: what the bars measure.
        rows: of each row, its label and its bars; a single bar without a name stands below its label.
        mark: value with a dashed line, such as 1 for ratios.
    """
    bars = [bar for _, own in rows for bar in own]
    most = max(bar.high or bar.value for bar in bars) or 1.0
    named = max((len(bar.name) for bar in bars), default=0)
    left = EDGE + (min(220, 10 + round(6.4 * named)) if named else 0)
    right = WIDE - EDGE - (46 if named else 0)
    drawn: list[str] = [f'<text class="h" x="{EDGE}" y="24">{escape(title)}</text>']

    def at(value: float) -> float:
        return round(left + (right - left) * value / most, 1)

    y = 36
    for label, own in rows:
        y += 16
        drawn.append(f'<text x="{EDGE}" y="{y}">{escape(label)}</text>')
        y += 5
        for bar in own:
            look = f'fill="{bar.colour}"' if bar.colour.startswith("#") else f'class="{bar.colour}"'
            drawn.append(
                f'<rect {look} x="{left}" y="{y}" width="{max(1, round(at(bar.value) - left, 1))}" height="10"/>'
            )
            if bar.low is not None and bar.high is not None and bar.high > bar.low:
                drawn.append(f'<path class="w" d="M{at(bar.low)} {y + 5}H{at(bar.high)}"/>')
            if mark is not None and mark < most:
                drawn.append(f'<path class="m" d="M{at(mark)} {y - 2}v14"/>')
            if bar.name:
                drawn.append(f'<text class="s" x="{EDGE}" y="{y + 9}">{escape(bar.name)}</text>')
            place = y + 9 if bar.name else y - 5
            drawn.append(f'<text class="v" x="{WIDE - EDGE}" y="{place}">{escape(bar.text)}</text>')
            y += 15
        y += 4
    size = f'width="{WIDE}" height="{y + 8}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {y + 8}" {size} role="img">'
    ground = f'<rect class="g" {size} rx="8"/>'
    return "\n".join([head, f"<title>{escape(title)}</title><style>{STYLE}</style>{ground}", *drawn, "</svg>\n"])
