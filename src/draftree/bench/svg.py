"""Charts as SVG text for pages that are one file: no script, no library, colours from the page's style sheet.

Every chart has the same width, so that a page's grid scales all of them alike; exact values stand in `<title>`
elements, which browsers show under the pointer. Colours are the classes c0 to c7.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 440
ROW = 22  # of charts with one line for each label
LETTER = 6.3  # width of a character of the labels, about
COLOURS = 8
BOTTOM = 34  # below the axis


@dataclass(frozen=True, slots=True)
class Bar:
    """A line of a bar chart: its label, value, interval, colour and text under the pointer."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    colour: int = 0
    title: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour: (x, y) each, or (row, x) in a dot chart."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: int = 0


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, both included where they are round."""
    if not high > low:
        high = low + 1
    rough = (high - low) / about
    size = 10 ** math.floor(math.log10(rough))
    step = next(s * size for s in (1, 2, 2.5, 5, 10) if s * size >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def bars(lines: Sequence[Bar], number: str = "{:.0f}", unit: str = "") -> str:
    """Horizontal bars with intervals, one under the other, each with its value."""
    left = _room([line.label for line in lines])
    top = max([line.high or line.value for line in lines], default=1) or 1
    right = WIDTH - 12 - LETTER * max((len(number.format(line.value)) for line in lines), default=4)
    height = ROW * len(lines) + BOTTOM
    scale = (right - left) / top
    parts = _grid(ticks(0, top), left, scale, 0, 0, height - BOTTOM, unit)
    for i, line in enumerate(lines):
        y = ROW * i + ROW / 2
        tip = f"<title>{escape(line.title or f'{line.label}: {number.format(line.value)}')}</title>"
        parts.append(_text(left - 6, y + 4, line.label, "end"))
        parts.append(
            f'<rect class="c{line.colour}" x="{left}" y="{y - 7:.1f}" width="{max(line.value * scale, 0.5):.1f}" '
            f'height="14" rx="2">{tip}</rect>'
        )
        end = line.value
        if line.low is not None and line.high is not None:
            end = max(end, line.high)
            parts.append(
                f'<path class="whisker" d="M{left + line.low * scale:.1f} {y}H{left + line.high * scale:.1f}"/>'
            )
        parts.append(_text(left + end * scale + 5, y + 4, number.format(line.value), "start", "value"))
    return _svg(height, parts)


def stacked(lines: Sequence[tuple[str, Sequence[float]]], names: Sequence[str], number: str, unit: str) -> str:
    """Horizontal bars made of parts; `names` are those of the parts, in the order of their colours."""
    left = _room([label for label, _ in lines])
    top = max((sum(values) for _, values in lines), default=1) or 1
    right = WIDTH - 14 - LETTER * len(number.format(top))
    key, head = _key(names, range(len(names)))
    height = head + ROW * len(lines) + BOTTOM
    scale = (right - left) / top
    parts = [*key, *_grid(ticks(0, top), left, scale, 0, head, height - BOTTOM, unit)]
    for i, (label, values) in enumerate(lines):
        y, x = head + ROW * i + ROW / 2, float(left)
        parts.append(_text(left - 6, y + 4, label, "end"))
        for colour, (name, value) in enumerate(zip(names, values, strict=True)):
            tip = f"<title>{escape(label)}, {escape(name)}: {number.format(value)} {escape(unit)}</title>"
            parts.append(
                f'<rect class="c{colour}" x="{x:.1f}" y="{y - 7:.1f}" width="{max(value * scale, 0):.1f}" '
                f'height="14">{tip}</rect>'
            )
            x += value * scale
        parts.append(_text(x + 5, y + 4, number.format(sum(values)), "start", "value"))
    return _svg(height, parts)


def dots(rows: Sequence[str], series: Sequence[Series], unit: str, mark: float | None = None) -> str:
    """A line for each of `rows`, with a dot of every series on it; `mark` is a vertical line."""
    left = _room(rows)
    values = [x for one in series for _, x in one.points] + ([] if mark is None else [mark])
    low, high = min([0.0, *values]), max(values, default=1)
    scale = (WIDTH - 16 - left) / ((high - low) or 1)
    key, head = _key([one.label for one in series], [one.colour for one in series])
    height = head + ROW * len(rows) + BOTTOM
    parts = [*key, *_grid(ticks(low, high), left, scale, low, head, height - BOTTOM, unit)]
    if mark is not None:
        parts.append(f'<path class="mark" d="M{left + (mark - low) * scale:.1f} {head}V{height - BOTTOM}"/>')
    for i, label in enumerate(rows):
        y = head + ROW * i + ROW / 2
        parts.append(_text(left - 6, y + 4, label, "end"))
        parts.append(f'<path class="line" d="M{left} {y}H{WIDTH - 12}"/>')
    for one in series:
        for row, x in one.points:
            y = head + ROW * row + ROW / 2
            tip = f"<title>{escape(one.label)}, {escape(rows[int(row)])}: {x:.2f}</title>"
            parts.append(
                f'<circle class="c{one.colour}" cx="{left + (x - low) * scale:.1f}" cy="{y}" r="5">{tip}</circle>'
            )
    return _svg(height, parts)


def lines(series: Sequence[Series], x_name: str, y_name: str, *, x_log: bool = False) -> str:
    """Lines through points; with `x_log` the horizontal axis shows factors of two."""
    key, head = _key([one.label for one in series], [one.colour for one in series])
    left, bottom, height = 46, head + 200, head + 200 + BOTTOM
    xs = [x for one in series for x, _ in one.points] or [1.0]
    top = max([y for one in series for _, y in one.points], default=1) or 1
    place = math.log2 if x_log else float
    low, high = place(min(xs)), place(max(xs))
    x_scale, y_scale = (WIDTH - 20 - left) / ((high - low) or 1), (bottom - head - 18) / top
    parts = [*key, _text(left, head + 8, y_name, "start", "axis"), _text(WIDTH - 12, height - 4, x_name, "end", "axis")]
    for value in ticks(0, top):
        y = bottom - value * y_scale
        parts.append(f'<path class="line" d="M{left} {y:.1f}H{WIDTH - 12}"/>')
        parts.append(_text(left - 6, y + 4, f"{value:g}", "end", "axis"))
    for x in sorted(set(xs)) if x_log or len(set(xs)) <= 12 else ticks(min(xs), max(xs)):
        parts.append(_text(left + (place(x) - low) * x_scale, bottom + 15, f"{x:g}", "middle", "axis"))
    for one in series:
        at = [(left + (place(x) - low) * x_scale, bottom - y * y_scale) for x, y in one.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
        parts.append(f'<path class="curve s{one.colour}" d="M{path}"/>')
        for (x, y), (shown_x, shown_y) in zip(at, one.points, strict=True):
            tip = f"<title>{escape(one.label)}, {escape(x_name)} {shown_x:g}: {shown_y:.3g} {escape(y_name)}</title>"
            parts.append(f'<circle class="c{one.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.2">{tip}</circle>')
    return _svg(height, parts)


def plane(series: Sequence[Series], names: Sequence[Sequence[str]], x_name: str, y_name: str) -> str:
    """Named points over lines of equal y / x, each told at its upper end.

    Args:
        series: the points.
        names: of each series' points.
        x_name, y_name: of the axes.
    """
    key, head = _key([one.label for one in series], [one.colour for one in series])
    left, bottom, height = 46, head + 300, head + 300 + BOTTOM
    xs = [x for one in series for x, _ in one.points] or [1.0]
    ys = [y for one in series for _, y in one.points] or [1.0]
    (x0, x1), (y0, y1) = _padded(min([*xs, 1.0]), max(xs)), _padded(min([*ys, 1.0]), max(ys))
    x_scale, y_scale = (WIDTH - 24 - left) / (x1 - x0), (bottom - head - 18) / (y1 - y0)
    parts = [*key, _text(left, head + 8, y_name, "start", "axis"), _text(WIDTH - 12, height - 4, x_name, "end", "axis")]
    for value in ticks(x0, x1):
        parts.append(_text(left + (value - x0) * x_scale, bottom + 15, f"{value:g}", "middle", "axis"))
    for value in ticks(y0, y1):
        parts.append(_text(left - 6, bottom - (value - y0) * y_scale + 4, f"{value:g}", "end", "axis"))
    parts.append(f'<path class="line" d="M{left} {head + 14}V{bottom}H{WIDTH - 12}"/>')
    taken: list[tuple[float, float, float, float]] = []
    circles, labels = [], []
    for one, called in zip(series, names, strict=True):
        for (x, y), name in zip(one.points, called, strict=True):
            at = left + (x - x0) * x_scale, bottom - (y - y0) * y_scale
            tip = f"<title>{escape(name)}: {y:.2f} tokens a step, verified in {x:.2f} plain steps</title>"
            circles.append(f'<circle class="c{one.colour}" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="4.5">{tip}</circle>')
            taken.append((at[0] - 5, at[1] - 5, at[0] + 5, at[1] + 5))
            labels.append((at, name))
    ratios = [y / x for one in series for x, y in one.points if x] or [1.0]
    for speed in _speeds(min([*ratios, 1.0]), max([*ratios, 1.0])):
        ends = sorted({(x, speed * x) for x in (x0, x1) if y0 <= speed * x <= y1}
                      | {(y / speed, y) for y in (y0, y1) if x0 <= y / speed <= x1})  # fmt: skip
        if len(ends) < 2:
            continue
        (ax, ay), (bx, by) = [(left + (x - x0) * x_scale, bottom - (y - y0) * y_scale) for x, y in (ends[0], ends[-1])]
        parts.append(f'<path class="{"mark" if speed == 1 else "iso"}" d="M{ax:.1f} {ay:.1f}L{bx:.1f} {by:.1f}"/>')
        text = f"{speed:g}x"
        x, y, anchor = min(
            (_free((ax + t * (bx - ax), ay + t * (by - ay)), text, [*taken]) for t in (0.97, 0.8, 0.6)),
            key=lambda spot: sum(_covers(_box(spot[0], spot[1], spot[2], text), other) for other in taken),
        )
        taken.append(_box(x, y, anchor, text))
        parts.append(_text(x, y, text, anchor, "axis"))
    parts += circles
    for at, name in labels:
        x, y, anchor = _free(at, name, taken)
        parts.append(_text(x, y, name, anchor, "value"))
    return _svg(height, parts)


def _free(
    at: tuple[float, float], name: str, taken: list[tuple[float, float, float, float]]
) -> tuple[float, float, str]:
    """Where a point's name covers nothing, or else least."""
    best = None
    for reach in (0, 11, 22):
        for dx, dy, anchor in ((8, 4, "start"), (-8, 4, "end"), (0, -8 - reach, "middle"), (0, 17 + reach, "middle"),
                               (8, -6 - reach, "start"), (8, 14 + reach, "start"), (-8, -6 - reach, "end"),
                               (-8, 14 + reach, "end")):  # fmt: skip
            x, y = at[0] + dx, at[1] + dy
            box = _box(x, y, anchor, name)
            cost = sum(_covers(box, other) for other in taken) + 1000 * (box[0] < 46 or box[2] > WIDTH) + reach
            if best is None or cost < best[0]:
                best = (cost, x, y, anchor, box)
    assert best is not None
    taken.append(best[4])
    return best[1], best[2], best[3]


def _box(x: float, y: float, anchor: str, text: str) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a text, and of some air beside it."""
    width = LETTER * len(text)
    first = x - {"start": 0.0, "end": width, "middle": width / 2}[anchor]
    return first - 3, y - 10, first + width + 3, y + 2


def _covers(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> float:
    """Area that two boxes share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _speeds(low: float, high: float) -> list[float]:
    """Round numbers around the speeds that are there."""
    return [s for s in (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4, 6, 8) if 0.8 * low < s < 1.25 * high]


def _padded(low: float, high: float) -> tuple[float, float]:
    room = 0.08 * ((high - low) or 1)
    return max(low - room, 0.0), high + room


def _room(labels: Sequence[str]) -> int:
    return 12 + int(LETTER * max((len(label) for label in labels), default=0))


def _grid(values: Sequence[float], left: float, scale: float, low: float, top: float, bottom: float,
          unit: str) -> list[str]:  # fmt: skip
    parts = []
    for value in values:
        x = left + (value - low) * scale
        parts.append(f'<path class="line" d="M{x:.1f} {top}V{bottom}"/>')
        parts.append(_text(x, bottom + 15, f"{value:g}", "middle", "axis"))
    parts.append(_text(WIDTH - 12, bottom + 30, unit, "end", "axis"))
    return parts


def _key(names: Sequence[str], colours: Sequence[int]) -> tuple[list[str], int]:
    """What colours mean, in as many lines as it takes; and the height of these."""
    parts, x, y = [], 4.0, 12
    for name, colour in zip(names, colours, strict=True):
        width = 22 + LETTER * len(name)
        if x > 4 and x + width > WIDTH:
            x, y = 4.0, y + 16
        parts.append(f'<rect class="c{colour}" x="{x:.1f}" y="{y - 9}" width="10" height="10" rx="2"/>')
        parts.append(_text(x + 14, y, name, "start"))
        x += width + 6
    return parts, y + 12


def _text(x: float, y: float, text: str, anchor: str, kind: str = "label") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg>'
